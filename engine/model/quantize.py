"""`quantize`: writes a checkpoint's matrices in FP8, as compressed-tensors has them, and measures what that loses.

Shard by shard into a folder beside the target, which becomes the target when all is there: what was interrupted goes on
behind the last whole shard, and nobody ever sees half a model.
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
from weft.engine.model.apart import Together, together
from weft.engine.model.checkpoint import Checkpoint, Part, Tensors
from weft.engine.model.directory import read_config, read_spec
from weft.engine.model.families import family_of
from weft.engine.model.gguf.file import INDEX as GGUF_INDEX
from weft.engine.model.hub import FOLDERS
from weft.engine.model.shapes import ShapesAlone
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import ask
from weft.engine.progress import Progress
from weft.kernels.formats import fp8

PARTIAL, STATE = ".partial", "quantize.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
ASKED_AS = torch.bfloat16
"""what is asked for in another dtype than this is no matrix of a product: routers are float32"""


@dataclass(frozen=True, slots=True)
class MatrixError:
    """What a matrix in FP8 is away from what it was."""

    name: str
    layer: int
    out: int
    inner: int
    squares: float
    """sum of the squares of its numbers"""
    lost: float
    """sum of the squares of the differences"""
    largest: float
    """difference, beside the largest number of its row"""

    @property
    def error(self) -> float:
        return relative(self.lost, self.squares)


def relative(lost: float, squares: float) -> float:
    """Root mean square of the differences beside that of the numbers."""
    return (lost / squares) ** 0.5 if squares else 0.0


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was written."""

    path: Path
    errors: list[MatrixError]
    kept: list[str]
    """modules with matrices that stay as they were, the embedding aside"""
    bytes_before: int
    bytes_after: int
    resumed: int
    """shards that an earlier run had written"""


def quantize(source: Path, target: Path, keep: tuple[str, ...] = (), progress: Progress | None = None) -> Quantized:
    """Write the model at `source` to the new directory `target`.

    keep: regular expressions; modules that one of them is found in stay in 16 bits. Raises `ConfigError` for a target
    that is there or a `keep` that is no expression or fits nothing, `ModelError` for a model that cannot be written so;
    each one line.
    """
    if target.exists():
        raise ConfigError(f"{target} is there already: give a new directory")
    config = _config(source)
    spec = read_spec(source)
    with ExitStack() as stack:
        checkpoint = Checkpoint(source, stack)
        modules, joined = _modules(spec, checkpoint)
        chosen = _chosen(modules, keep)
        shards = checkpoint.shards()
        kept = _kept(checkpoint, modules, chosen, spec)
        folder = target.with_name(target.name + PARTIAL)
        _check_room(folder, _size_after(checkpoint, chosen, joined))
        try:
            run = _Run(checkpoint, chosen, joined, folder, _identity(source, shards, chosen), progress)
            written = [run.shard(file, names, _new_name(file, len(shards))) for file, names in shards.items()]
            total = sum((folder / file).stat().st_size for file, _ in written)
            _write_others(source, folder, {**config, **_says(kept)}, written, total)
            os.replace(folder, target)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot write {folder}: {error}; the same command goes on from there") from None
    before = sum((source / file).stat().st_size for file in shards)
    return Quantized(target, run.errors, kept, before, total, run.resumed)


def _config(source: Path) -> dict[str, Any]:
    if (source / GGUF_INDEX).is_file():
        raise ModelError(f"{source.name} is a GGUF file: give a checkpoint of safetensors files in 16 or 32 bits")
    config = read_config(source)
    if config.get("quantization_config"):
        raise ModelError(f"{source} is quantized already: give a checkpoint in 16 or 32 bits")
    return config


def _modules(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[dict[str, int], dict[str, Together]]:
    """The modules of matrices that layers multiply with, as the result names them, and their layers; and the tensors of
    the checkpoint that have something of all experts.
    """
    names = family_of(spec.architecture).names
    if names.transposed:
        raise ModelError(
            f"the matrices lie turned in checkpoints of {spec.architecture}, which compressed-tensors has no form for: "
            "serve it with --quantization fp8 instead"
        )
    checkpoint.rename(f"{names.embedding}.weight", names.prefix, names.other_prefixes)
    layer = re.compile(re.escape(names.layer).replace(re.escape("{}"), r"(\d+)"))
    found: dict[str, int] = {}
    joined: dict[str, Together] = {}

    def source(name: str, shape: tuple[int, ...], part: Part, kind: torch.dtype) -> Tensor:
        matrices.check_format(name, checkpoint(name, shape, part), kind)
        place = layer.match(name)
        if place is None or kind != ASKED_AS:
            return torch.empty(shape, dtype=kind, device="meta")
        inside = checkpoint.inside(name)
        prefix = inside.removesuffix(name[place.end() :])
        if spec.experts is not None and (of_all := together(names, prefix, spec.experts.count).get(inside)) is not None:
            joined[inside] = of_all
            found.update(dict.fromkeys(of_all.modules(), int(place[1])))
        elif name.endswith(".weight") and len(shape) == 2 and shape[0] > 1:
            found[inside.removesuffix(".weight")] = int(place[1])
        return torch.empty(shape, dtype=kind, device="meta")

    with ShapesAlone():
        ask(spec, Tensors(source, checkpoint.__contains__, ASKED_AS, checkpoint.shape_of))
    return found, joined


def _chosen(modules: dict[str, int], keep: tuple[str, ...]) -> dict[str, int]:
    for pattern in keep:
        try:
            if not any(re.search(pattern, module) for module in modules):
                raise ConfigError(f"--keep {pattern}: no module of the model fits it, such as {next(iter(modules))}")
        except re.error as error:
            raise ConfigError(f"--keep {pattern}: no regular expression: {error}") from None
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


def _says(kept: list[str]) -> dict[str, Any]:
    """The part of a `config.json` that compressed-tensors reads."""
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
    """What must be the same for an interrupted run to go on."""
    files = [(file, (source / file).stat().st_size, (source / file).stat().st_mtime_ns) for file in sorted(shards)]
    same: list[Any] = json.loads(json.dumps([files, sorted(chosen)]))  # as it comes back from a file
    return same


def _size_after(checkpoint: Checkpoint, chosen: dict[str, int], joined: dict[str, Together]) -> int:
    """Bytes of the result's matrices and other tensors, without scales."""
    size = 0.0
    for file, names in checkpoint.shards().items():
        for name in names:
            tensor, of_all = checkpoint.whole(name, file), joined.get(name)
            modules = of_all.modules() if of_all is not None else [name.removesuffix(".weight")]
            matrix = of_all.tail == ".weight" if of_all is not None else name.endswith(".weight")
            small = sum(module in chosen for module in modules) / len(modules) if matrix else 0.0
            size += tensor.numel() * (small + (1 - small) * tensor.itemsize)
    return int(size)


def _check_room(folder: Path, size: int) -> None:
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    done = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed, free = size - done, shutil.disk_usage(there).free
    if needed > free:
        raise ConfigError(f"{there} has {free / 2**30:.1f} GiB left, the result takes some {needed / 2**30:.1f} GiB")


def _new_name(file: str, count: int) -> str:
    """A shard's name in the result; those of PyTorch files have it in their number alone."""
    if file.endswith(".safetensors"):
        return file
    number = re.search(r"-\d+-of-\d+", file)
    return f"model{number[0] if number and count > 1 else ''}.safetensors"


def _write_others(
    source: Path, folder: Path, config: dict[str, Any], written: list[tuple[str, list[str]]], total: int
) -> None:
    """Index and config; tokenizer, templates, licence: all files but weights. The hub's cache has links, here they are
    files.
    """
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
    """Writes shards into `folder`, and notes beside them what is done."""

    def __init__(
        self, checkpoint: Checkpoint, chosen: dict[str, int], joined: dict[str, Together], folder: Path,
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
        """What an earlier run has done; nothing, and an empty folder, where that was another's."""
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
        """The new file and what is in it."""
        if (done := self._done.get(file)) is not None and (self._folder / new).is_file():
            self.errors += [MatrixError(**error) for error in done["errors"]]
            self.resumed += 1
            self._tell(len(names))
            return new, list(done["names"])
        tensors: dict[str, Tensor] = {}
        errors: list[MatrixError] = []
        for inside in names:
            whole, of_all = self._checkpoint.whole(inside, file), self._joined.get(inside)
            for name, tensor in ((inside, whole),) if of_all is None else of_all.parts(whole):
                module = name.removesuffix(".weight")
                if name.endswith(".weight") and module in self._chosen:
                    values, scale, error = _quantized(name, tensor, self._chosen[module])
                    tensors[name], tensors[f"{module}.{matrices.SCALES[0]}"] = values, scale
                    errors.append(error)
                else:
                    tensors[name] = tensor
            self._tell(1)
        beside = self._folder / f"{new}.tmp"
        save_file(_apart(tensors), beside, {"format": "pt"})
        beside.chmod(0o644)  # readable as any other file
        os.replace(beside, self._folder / new)
        self.errors += errors
        self._done[file] = {"names": list(tensors), "errors": [asdict(error) for error in errors]}
        state = self._folder / f"{STATE}.tmp"
        state.write_text(json.dumps({"identity": self._identity, "done": self._done}), encoding="utf-8")
        os.replace(state, self._folder / STATE)
        return new, list(tensors)

    def _tell(self, tensors: int) -> None:
        self._at += tensors
        if self._progress is not None:
            self._progress("quantising", self._at, sum(len(names) for names in self._checkpoint.shards().values()))


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each contiguous in memory of its own: PyTorch's files have tied matrices once, under both names."""
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
    apart = fp8.weight_values(made) - weight
    by_row = apart.abs().amax(-1) / weight.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    out, inner = weight.shape
    error = MatrixError(
        name.removesuffix(".weight"), layer, out, inner, float(weight.double().square().sum()),
        float(apart.double().square().sum()), float(by_row.max()),
    )  # fmt: skip
    return made.values, made.scale[:, None], error


def refuse_unknown(source: Path) -> None:
    """Raises `ModelError` for an architecture whose layers weft does not have."""
    try:
        read_spec(source)
    except UnknownArchitecture as error:
        raise ModelError(f"only models of weft's own layers are quantised: {error}") from None


def by_layer(errors: list[MatrixError]) -> list[tuple[int, int, float, MatrixError]]:
    """Layer, how many matrices, their error together, the worst of them."""
    count = Counter(error.layer for error in errors)
    found = []
    for layer in sorted(count):
        own = [error for error in errors if error.layer == layer]
        together = relative(sum(e.lost for e in own), sum(e.squares for e in own))
        found.append((layer, len(own), together, max(own, key=lambda e: e.error)))
    return found
