"""`Activity`: how busy a GPU's memory and SMs were, by the driver's counters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Shares(NamedTuple):
    """Means over an interval, 0 to 1."""

    dram: float  # Share of the memory bandwidth.
    sm: float  # Share of SMs that are busy.
    warps: float  # Share of warp slots in use.


class Activity:
    """Reads NVML's GPM metrics, which Hopper and later GPUs have. Needs no root."""

    def __init__(self, device: torch.device) -> None:
        """Raises `OSError` with the reason if the metrics are unavailable."""
        if device.type != "cuda":
            raise OSError("a CPU has no such counters")
        try:
            import pynvml
        except ImportError:
            raise OSError("nvidia-ml-py is not installed") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            if not pynvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                raise OSError("this GPU has no GPM metrics (Hopper and later do)")
            self._before, self._after = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
            self.begin()
            self.end()
        except (pynvml.NVMLError, AttributeError) as error:
            raise OSError(str(error)) from None

    def begin(self) -> None:
        self._nvml.nvmlGpmSampleGet(self._handle, self._before)

    def end(self) -> Shares | None:
        """Return the means since `begin`, or None if the driver returns nothing."""
        nvml = self._nvml
        wanted = (nvml.NVML_GPM_METRIC_DRAM_BW_UTIL, nvml.NVML_GPM_METRIC_SM_UTIL, nvml.NVML_GPM_METRIC_SM_OCCUPANCY)
        try:
            nvml.nvmlGpmSampleGet(self._handle, self._after)
            request = nvml.c_nvmlGpmMetricsGet_t()
            request.version = nvml.NVML_GPM_METRICS_GET_VERSION
            request.numMetrics = len(wanted)
            request.sample1, request.sample2 = self._before, self._after
            for i, metric in enumerate(wanted):
                request.metrics[i].metricId = metric
            nvml.nvmlGpmMetricsGet(request)
        except nvml.NVMLError:
            return None
        if any(request.metrics[i].nvmlReturn for i in range(len(wanted))):
            return None
        return Shares(*(request.metrics[i].value / 100 for i in range(len(wanted))))


def activity_of(device: torch.device) -> tuple[Activity | None, str]:
    """Open the counters; otherwise return None and the reason."""
    try:
        return Activity(device), ""
    except OSError as error:
        return None, str(error)
