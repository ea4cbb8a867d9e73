"""`model_id`: identifies the model behind a KV page, so that another checkpoint at the same path never hits."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash

from weft.engine.config import EngineConfig
from weft.engine.errors import ModelError
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.directory import MODELOPT, read_config
from weft.engine.model.spec import ModelSpec
from weft.engine.model.vision import vision_of

SAMPLES, SAMPLE_BYTES = 16, 1 << 16
"""Evenly spaced samples per weights file, in addition to its header, size and modification time."""
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def model_id(config: EngineConfig, layout: KvLayout, spec: ModelSpec, dtype: torch.dtype, max_positions: int) -> str:
    """Return a digest of the configuration, the weights, the computation and the page layout. Raises `ModelError`.
    `dtype` is that of activations. `max_positions` matters because some ropes depend on it. Weights can be hundreds of
    gigabytes, so only each file's header, size, modification time and samples count. Dummy weights count by their
    seed."""
    digest = xxhash.xxh3_128()
    path = config.model_path
    digest.update(str(dtype).encode())
    for inv_freq, scale in spec.rotary(max_positions):
        digest.update(inv_freq.numpy().tobytes() + str(scale).encode())
    if not spec.native:  # its code has its own ropes
        digest.update(str(max_positions).encode())
    try:
        digest.update((path / "config.json").read_bytes())
        if (path / MODELOPT).is_file():
            digest.update((path / MODELOPT).read_bytes())
        if vision_of(read_config(path)) is not None:  # what its tower gets depends on its image processor
            for file in (path / "preprocessor_config.json", path / "processor_config.json"):
                digest.update(file.read_bytes() if file.is_file() else b"")
        if config.quantization == "fp8":
            digest.update(f"as {config.quantization}".encode())
        if spec.native and spec.packed is not None:  # its products round activations to int8
            digest.update(b"packed")
        if (drafting := config.drafting) is not None and drafting.method == "mtp":
            digest.update(b"drafts mtp")
        elif drafting is not None and drafting.model is not None:  # pages hold its K and V too
            digest.update(f"drafts {drafting.method}".encode() + (drafting.model / "config.json").read_bytes())
            _add_weights(digest, drafting.model)
        if config.load_format == "dummy":
            digest.update(f"dummy {config.seed}".encode())
            if config.dummy_weights != "plain":
                digest.update(config.dummy_weights.encode())
            if config.dummy_skew:
                digest.update(f"skewed {config.dummy_skew}".encode())
        else:
            _add_weights(digest, path)
    except OSError as error:
        raise ModelError(f"cannot read the model in {path}: {error.strerror}") from None
    return f"{digest.hexdigest()}|{layout.id}"


def _add_weights(digest: xxhash.xxh3_128, path: Path) -> None:
    for file in sorted(file for kind in WEIGHTS for file in path.glob(kind)):
        _add_file(digest, file)


def _add_file(digest: xxhash.xxh3_128, file: Path) -> None:
    status = file.stat()
    digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    with file.open("rb") as f:
        if file.suffix == ".safetensors":
            header = int.from_bytes(f.read(8), "little")
            digest.update(f.read(min(header, 1 << 26)))
        step = max(1, status.st_size // SAMPLES)
        for at in range(0, status.st_size, step):
            f.seek(at)
            digest.update(f.read(SAMPLE_BYTES))
