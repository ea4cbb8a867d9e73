"""`quantize`: writes a checkpoint's matrices in FP8, in compressed-tensors format, and measures the error.

It writes shard by shard into a folder next to the target, which it renames to the target when complete. An interrupted
run resumes after the last complete shard, and the target never holds an incomplete model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from weft.engine.errors import ConfigError, ModelError, UnknownArchitecture
from weft.engine.model import matrices
from weft.engine.model.checkpoint import Checkpoint, Part, Tensors
from weft.engine.model.directory import read_config, read_spec
from weft.engine.model.families import family_of
from weft.engine.model.gguf.file import INDEX as GGUF_INDEX
from weft.engine.model.hub import FOLDERS
from weft.engine.model.shapes import ShapesOnly
from weft.engine.model.spec import ModelSpec
from weft.engine.model.stacked_experts import StackedExperts, stacked_experts
from weft.engine.model.weights import request_tensors
from weft.engine.progress import Progress
from weft.kernels.formats import fp8

PARTIAL, STATE = ".partial", "quantize.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
ASKED_AS = torch.bfloat16
"""Projection matrices are requested in this dtype; others, such as float32 routers, are not quantized."""


@dataclass(frozen=True, slots=True)
class MatrixError:
    """Quantization error of one matrix."""

    name: str
    layer: int
    out: int
    inner: int
    squares: float  # Sum of the squares of its values.
    lost: float  # Sum of the squares of the errors.
    largest: float  # Largest error relative to the largest value of its row.

    @property
    def error(self) -> float:
        return relative(self.lost, self.squares)


def relative(lost: float, squares: float) -> float:
    """Return the root mean square error relative to that of the values."""
    return (lost / squares) ** 0.5 if squares else 0.0


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """What `quantize` wrote."""

    path: Path
    errors: list[MatrixError]
    kept: list[str]  # Modules whose matrices were not quantized, the embedding aside.
    bytes_before: int
    bytes_after: int
    resumed: int  # Shards written by an earlier run.


def quantize(
    source: Path, target: Path, keep: tuple[str, ...] = (), progress: Progress | None = None
) -> QuantizeResult:
    """Write the model at `source` to the new directory `target`.

    keep: regular expressions; modules that match one stay in 16 bits. Raises `ConfigError` for an existing target or
    an invalid or unmatched `keep`, `ModelError` for a model that cannot be quantized, each one line."""
    if target.exists():
        raise ConfigError(f"{target} exists already: give a new directory")
    config = _config(source)
    spec = read_spec(source)
    with ExitStack() as stack:
        checkpoint = Checkpoint(source, stack)
        modules, joined = _modules(spec, checkpoint)
        chosen = _chosen(modules, keep)
        shards = checkpoint.shards()
        kept = _kept(checkpoint, modules, chosen, spec)
        folder = target.with_name(target.name + PARTIAL)
        _check_disk_space(folder, _size_after(checkpoint, chosen, joined))
        try:
            run = _Run(checkpoint, chosen, joined, folder, _identity(source, shards, chosen), progress)
            written = [run.shard(file, names, _new_name(file, len(shards))) for file, names in shards.items()]
            total = sum((folder / file).stat().st_size for file, _ in written)
            _write_others(source, folder, {**config, **_quantization_config(kept)}, written, total)
            os.replace(folder, target)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot write {folder}: {error}; the same command resumes from there") from None
    before = sum((source / file).stat().st_size for file in shards)
    return QuantizeResult(target, run.errors, kept, before, total, run.resumed)


def _config(source: Path) -> dict[str, Any]:
    if (source / GGUF_INDEX).is_file():
        raise ModelError(f"{source.name} is a GGUF file: give a checkpoint of safetensors files in 16 or 32 bits")
    config = read_config(source)
    if config.get("quantization_config"):
        raise ModelError(f"{source} is quantized already: give a checkpoint in 16 or 32 bits")
    return config


def _modules(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[dict[str, int], dict[str, StackedExperts]]:
    """Return the layer of each module with a projection matrix, and the checkpoint's stacked expert tensors."""
    names = family_of(spec.architecture).names
    if names.transposed:
        raise ModelError(
            f"checkpoints of {spec.architecture} store transposed matrices, which compressed-tensors does not support: "
            "serve it with --quantization fp8 instead"
        )
    checkpoint.rename(f"{names.embedding}.weight", names.prefix, names.other_prefixes)
    layer = re.compile(re.escape(names.layer).replace(re.escape("{}"), r"(\d+)"))
    found: dict[str, int] = {}
    joined: dict[str, StackedExperts] = {}

    def source(name: str, shape: tuple[int, ...], part: Part, kind: torch.dtype) -> Tensor:
        matrices.check_format(name, checkpoint(name, shape, part), kind)
        place = layer.match(name)
        if place is None or kind != ASKED_AS:
            return torch.empty(shape, dtype=kind, device="meta")
        inside = checkpoint.inside(name)
        prefix = inside.removesuffix(name[place.end() :])
        stacked = {} if spec.experts is None else stacked_experts(names, prefix, spec.experts.count, spec.hidden_size)
        if (of_all := stacked.get(inside)) is not None:
            joined[inside] = of_all
            found.update(dict.fromkeys(of_all.modules(), int(place[1])))
        elif name.endswith(".weight") and len(shape) == 2 and shape[0] > 1:
            found[inside.removesuffix(".weight")] = int(place[1])
        return torch.empty(shape, dtype=kind, device="meta")

    with ShapesOnly():
        request_tensors(spec, Tensors(source, checkpoint.__contains__, ASKED_AS, checkpoint.shape_of))
    return found, joined


def _chosen(modules: dict[str, int], keep: tuple[str, ...]) -> dict[str, int]:
    for pattern in keep:
        try:
            if not any(re.search(pattern, module) for module in modules):
                raise ConfigError(f"--keep {pattern}: matches no module, such as {next(iter(modules))}")
        except re.error as error:
            raise ConfigError(f"--keep {pattern}: not a regular expression: {error}") from None
    return {m: layer for m, layer in modules.items() if not any(re.search(pattern, m) for pattern in keep)}


def _kept(checkpoint: Checkpoint, modules: dict[str, int], chosen: dict[str, int], spec: ModelSpec) -> list[str]:
    names = family_of(spec.architecture).names
    tables = {checkpoint.inside(f"{name}.weight") for name in (names.embedding, names.positions)}
    there = [
        name.removesuffix(".weight")
        for file, shard in checkpoint.shards().items()
        for name in shard
        if name.endswith(".weight") and name not in tables and len(checkpoint.inside_shape(name, file)) == 2
    ]
    return sorted({"lm_head", *(m for m in (*there, *modules) if m not in chosen)})


def _quantization_config(kept: list[str]) -> dict[str, Any]:
    """Return the part of a `config.json` that compressed-tensors reads."""
    plain = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
    group = {
        "targets": ["Linear"],
        "weights": {**plain, "strategy": "channel", "dynamic": False},
        "input_activations": {**plain, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": kept, "kv_cache_scheme": None,
        }
    }  # fmt: skip


def _identity(source: Path, shards: dict[str, list[str]], chosen: dict[str, int]) -> list[Any]:
    """Return what must be unchanged for an interrupted run to resume."""
    files = [(file, (source / file).stat().st_size, (source / file).stat().st_mtime_ns) for file in sorted(shards)]
    same: list[Any] = json.loads(json.dumps([files, sorted(chosen)]))  # as read back from a file
    return same


def _size_after(checkpoint: Checkpoint, chosen: dict[str, int], joined: dict[str, StackedExperts]) -> int:
    """Return the bytes of the result's tensors, without scales."""
    size = 0.0
    for file, names in checkpoint.shards().items():
        for name in names:
            tensor, of_all = checkpoint.whole(name, file), joined.get(name)
            modules = of_all.modules() if of_all is not None else [name.removesuffix(".weight")]
            matrix = of_all.tail == ".weight" if of_all is not None else name.endswith(".weight")
            small = sum(module in chosen for module in modules) / len(modules) if matrix else 0.0
            size += tensor.numel() * (small + (1 - small) * tensor.itemsize)
    return int(size)


def _check_disk_space(folder: Path, size: int) -> None:
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    done = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed, free = size - done, shutil.disk_usage(there).free
    if needed > free:
        raise ConfigError(f"{there} has {free / 2**30:.1f} GiB left, the result takes {needed / 2**30:.1f} GiB")


def _new_name(file: str, count: int) -> str:
    """Return a shard's name in the result; PyTorch files keep only their number."""
    if file.endswith(".safetensors"):
        return file
    number = re.search(r"-\d+-of-\d+", file)
    return f"model{number[0] if number and count > 1 else ''}.safetensors"


def _write_others(
    source: Path, folder: Path, config: dict[str, Any], written: list[tuple[str, list[str]]], total: int
) -> None:
    """Write index and config, and copy all files except weights, resolving the links of the hub's cache."""
    if len(written) > 1:
        weight_map = {name: file for file, names in written for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS) and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)
        elif file.is_dir() and file.name in FOLDERS:
            shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / STATE).unlink()


class _Run:
    """Writes shards into `folder` and records finished ones there."""

    def __init__(
        self, checkpoint: Checkpoint, chosen: dict[str, int], joined: dict[str, StackedExperts], folder: Path,
        identity: list[Any], progress: Progress | None,
    ) -> None:  # fmt: skip
        self._checkpoint, self._chosen, self._folder, self._identity = checkpoint, chosen, folder, identity
        self._joined = joined
        self._progress, self._at = progress, 0
        self.errors: list[MatrixError] = []
        self.resumed = 0
        self._done: dict[str, Any] = self._found()
        folder.mkdir(parents=True, exist_ok=True)

    def _found(self) -> dict[str, Any]:
        """Return the finished shards of an earlier run, or clear the folder if that was a different job."""
        try:
            state = json.loads((self._folder / STATE).read_text(encoding="utf-8"))
            if state["identity"] == self._identity:
                return dict(state["done"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if self._folder.exists():
            shutil.rmtree(self._folder)
        return {}

    def shard(self, file: str, names: list[str], new: str) -> tuple[str, list[str]]:
        """Write a shard, and return the new file's name and the names of its tensors."""
        if (done := self._done.get(file)) is not None and (self._folder / new).is_file():
            self.errors += [MatrixError(**error) for error in done["errors"]]
            self.resumed += 1
            self._report(len(names))
            return new, list(done["names"])
        tensors: dict[str, Tensor] = {}
        errors: list[MatrixError] = []
        for inside in names:
            whole, of_all = self._checkpoint.whole(inside, file), self._joined.get(inside)
            for name, tensor in ((inside, whole),) if of_all is None else of_all.split(whole):
                module = name.removesuffix(".weight")
                if name.endswith(".weight") and module in self._chosen:
                    values, scale, error = _quantized(name, tensor, self._chosen[module])
                    tensors[name], tensors[f"{module}.{matrices.SCALES[0]}"] = values, scale
                    errors.append(error)
                else:
                    tensors[name] = tensor
            self._report(1)
        unfinished = self._folder / f"{new}.tmp"
        save_file(_unshared(tensors), unfinished, {"format": "pt"})
        unfinished.chmod(0o644)  # like any other file
        os.replace(unfinished, self._folder / new)
        self.errors += errors
        self._done[file] = {"names": list(tensors), "errors": [asdict(error) for error in errors]}
        state = self._folder / f"{STATE}.tmp"
        state.write_text(json.dumps({"identity": self._identity, "done": self._done}), encoding="utf-8")
        os.replace(state, self._folder / STATE)
        return new, list(tensors)

    def _report(self, tensors: int) -> None:
        self._at += tensors
        if self._progress is not None:
            self._progress("quantizing", self._at, sum(len(names) for names in self._checkpoint.shards().values()))


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give each tensor its own contiguous memory: PyTorch files store tied matrices once under two names."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        own = tensor.contiguous()
        memory = own.untyped_storage().data_ptr()
        found[name] = own.clone() if memory in seen else own
        seen.add(memory)
    return found


def _quantized(name: str, tensor: Tensor, layer: int) -> tuple[Tensor, Tensor, MatrixError]:
    weight = tensor.float()
    if not bool(weight.isfinite().all()):
        raise ModelError(f"{name} is not finite (NaN or inf): the checkpoint is damaged")
    made = fp8.quantize_weight(weight)
    difference = fp8.weight_values(made) - weight
    by_row = difference.abs().amax(-1) / weight.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    out, inner = weight.shape
    error = MatrixError(
        name.removesuffix(".weight"), layer, out, inner, float(weight.double().square().sum()),
        float(difference.double().square().sum()), float(by_row.max()),
    )  # fmt: skip
    return made.values, made.scale[:, None], error


def refuse_unknown(source: Path) -> None:
    """Raise `ModelError` for an architecture that weft's own layers do not support."""
    try:
        read_spec(source)
    except UnknownArchitecture as error:
        raise ModelError(f"only models of weft's own layers can be quantized: {error}") from None


def by_layer(errors: list[MatrixError]) -> list[tuple[int, int, float, MatrixError]]:
    """Return for each layer its number, its matrix count, their joint error and the worst matrix."""
    count = Counter(error.layer for error in errors)
    found = []
    for layer in sorted(count):
        own = [error for error in errors if error.layer == layer]
        together = relative(sum(e.lost for e in own), sum(e.squares for e in own))
        found.append((layer, len(own), together, max(own, key=lambda e: e.error)))
    return found
