"""The accelerators of NanoFlow's Table 1, plus their energy coefficients."""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.errors import ConfigError


class Energy(NamedTuple):
    """Energy of work beyond idling, measured on one card under sustained load."""

    idle_watts: float
    joules_per_tflop: float  # Dense BF16 GEMMs on tensor cores, including their operand traffic.
    joules_per_gb: float  # Streaming reads of HBM.


class Accelerator(NamedTuple):
    """One device. Units are decimal: GB, GB/s, GFLOP/s."""

    name: str
    vendor: str
    mem_gb: float
    mem_gbs: float
    net_gbs: float  # Both directions; one direction is half of it.
    gflops: float  # Dense FP16.
    watts: float  # Power limit of the module.
    energy: Energy | None = None
    sms: int = 0
    """Streaming multiprocessors or compute units; 0: unknown, so that no plan can divide them."""
    built_gb: float = 0.0  # Actual memory if it differs from the table; 0: as in the table.

    @property
    def mem_seconds(self) -> float:
        """MemSize / MemBW: seconds to read all of the memory once."""
        return self.mem_gb / self.mem_gbs


# (690 - 122) W x 1.370 ms for 0.893 TFLOP of GEMMs; (656 - 122) W x 0.626 ms for 2.684 GB of keys and values.
_H200_ENERGY = Energy(122, 0.871, 0.1245)

ACCELERATORS = (
    Accelerator("v100", "NVIDIA", 16, 900, 300, 125_000, 300, sms=80),
    Accelerator("a100-40gb", "NVIDIA", 40, 1_555, 600, 312_000, 400, sms=108),
    Accelerator("a100", "NVIDIA", 80, 2_000, 600, 312_000, 400, sms=108),
    Accelerator("h100", "NVIDIA", 80, 3_352, 900, 989_000, 700, sms=132),
    # the paper lists 96 GB; the card has 141
    Accelerator("h200", "NVIDIA", 96, 4_800, 900, 989_000, 700, _H200_ENERGY, 132, 141),
    Accelerator("b100", "NVIDIA", 120, 8_000, 1_800, 1_800_000, 700),
    Accelerator("b200", "NVIDIA", 120, 8_000, 1_800, 2_250_000, 1_000, sms=148),
    Accelerator("mi250", "AMD", 128, 3_352, 800, 362_000, 500, sms=208),
    Accelerator("mi300", "AMD", 192, 5_300, 1_024, 1_307_000, 750, sms=304),
    Accelerator("mi325x", "AMD", 256, 6_000, 1_024, 1_307_000, 1_000, sms=304),
    Accelerator("gaudi2", "Intel", 96, 2_400, 600, 1_000_000, 600),
    Accelerator("gaudi3", "Intel", 128, 3_700, 1_200, 1_800_000, 900),
    Accelerator("ada6000", "NVIDIA", 48, 960, 64, 182_000, 300, sms=142),
)


def of_gpu(name: str) -> Accelerator | None:
    """Return the row of Table 1 for a device name such as "NVIDIA A100-SXM4-80GB"; None if it has none."""
    words = name.lower().replace("-", " ").split()
    return next((row for row in ACCELERATORS if row.name in words), None)


def accelerator(name: str) -> Accelerator:
    """Return the row of Table 1 with this name. Raises `ConfigError`."""
    for row in ACCELERATORS:
        if row.name == name.lower():
            return row
    raise ConfigError(f"unknown accelerator {name!r}; known: {', '.join(a.name for a in ACCELERATORS)}")
