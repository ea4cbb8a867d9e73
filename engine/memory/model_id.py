"""What identifies the model behind a KV page, so that another checkpoint at the same path never hits."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash

from weft.engine.config import EngineConfig
from weft.engine.errors import ModelError
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.directory import MODELOPT
from weft.engine.model.spec import ModelSpec

SAMPLES, SAMPLE_BYTES = 16, 1 << 16
"""of each weights file, evenly spaced, beside its header, size and time of change"""
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def model_id(config: EngineConfig, layout: KvLayout, spec: ModelSpec, dtype: torch.dtype, max_positions: int) -> str:
    """A digest of configuration and weights, how they are computed, and the layout of a page. Raises `ModelError`.

    dtype: of activations, whatever that of the pages is. max_positions: of a context; some ropes turn by it.

    Weights are hundreds of gigabytes at times: of each file the header, the size, the time of its last change and
    samples count. Made-up weights are named by their seed.
    """
    digest = xxhash.xxh3_128()
    path = config.model_path
    digest.update(str(dtype).encode())
    for inv_freq, scale in spec.rotary(max_positions):
        digest.update(inv_freq.numpy().tobytes() + str(scale).encode())
    if not spec.native:  # whose code has ropes of its own
        digest.update(str(max_positions).encode())
    try:
        digest.update((path / "config.json").read_bytes())
        if (path / MODELOPT).is_file():
            digest.update((path / MODELOPT).read_bytes())
        if config.quantization is not None:
            digest.update(f"as {config.quantization}".encode())
        if config.load_format == "dummy":
            digest.update(f"dummy {config.seed}".encode())
            if config.dummy_weights != "plain":
                digest.update(config.dummy_weights.encode())
            if config.dummy_skew:
                digest.update(f"skewed {config.dummy_skew}".encode())
        else:
            for file in sorted(file for kind in WEIGHTS for file in path.glob(kind)):
                _add_file(digest, file)
    except OSError as error:
        raise ModelError(f"cannot read the model in {path}: {error.strerror}") from None
    return f"{digest.hexdigest()}|{layout.id}"


def _add_file(digest: xxhash.xxh3_128, file: Path) -> None:
    status = file.stat()
    digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    with file.open("rb") as f:
        header = int.from_bytes(f.read(8), "little")
        digest.update(f.read(min(header, 1 << 26)))
        step = max(1, status.st_size // SAMPLES)
        for at in range(0, status.st_size, step):
            f.seek(at)
            digest.update(f.read(SAMPLE_BYTES))
