"""`load_adapter`: reads a LoRA adapter in PEFT's format, and packs its matrices as those of the base model are packed.

The names of the tensors say which modules are adapted. A tensor that is not used is an error: an adapter of which a
part is ignored gives wrong answers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.engine.errors import ModelError, one_line, refuse_pointer
from weft.engine.model.adapter_config import FILE, AdapterConfig, read_adapter_config
from weft.engine.model.checkpoint import WHOLE, Part, Tensors
from weft.engine.model.expert_weights import cut_to
from weft.engine.model.families import family_of
from weft.engine.model.families.family import TensorNames
from weft.engine.model.layer_weights import norm_weight
from weft.engine.model.parts import Experts
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import plain_tensors
from weft.kernels.matmul import weight_layout as pack
from weft.kernels.reference.adapters import LowRank

WEIGHTS = "adapter_model.safetensors"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# PEFT names the matrices of stacked experts after the module that has them, which it wraps once for each tensor.
_STACKED = re.compile(r"(.+\.experts)(?:\.base_layer)?")
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of one model, or a rank's shard of it."""

    layers: tuple[Mapping[str, tuple[LowRank, ...]], ...]  # Matrices by operation, for each layer.
    rank: int  # The largest rank of its modules.

    def tensors(self) -> Iterator[Tensor]:
        for layer in self.layers:
            for matrices in layer.values():
                for each in matrices:
                    yield from (each.a, each.b, *(() if each.shift is None else (each.shift,)))

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())


def adapter_digest(path: Path) -> str:
    """Return 32 hex digits that identify the adapter's content. Raises `ModelError` if it has no readable files."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (FILE, WEIGHTS):
        try:
            refuse_pointer(path / name)
            with (path / name).open("rb") as file:
                digest.update(b"%d " % (path / name).stat().st_size)
                while block := file.read(1 << 20):
                    digest.update(block)
        except FileNotFoundError:
            raise ModelError(_missing(path, name)) from None
        except OSError as error:
            raise ModelError(f"cannot read {path / name}: {one_line(error)}") from None
    return digest.hexdigest()


def _missing(path: Path, name: str) -> str:
    if name == WEIGHTS and (path / "adapter_model.bin").exists():
        return f"{path} has only adapter_model.bin, a pickle file, which may run code: save it as {WEIGHTS}"
    return f"{path} has no {name}: it is no LoRA adapter in PEFT's format"


class _Pair(NamedTuple):
    """The two matrices of a module, copied from the file; the scale is in `b`."""

    a: Tensor  # [R, in] float32
    b: Tensor  # [out, R] float32


class _Modules:
    """The adapted modules by name, each to be taken once."""

    def __init__(self, path: Path, config: AdapterConfig, names: TensorNames) -> None:
        self._found: dict[str, _Pair] = {}
        self._path, self._config = path, config
        self._stacked: dict[str, list[_Pair]] = {}  # By module; not scaled yet.
        halves: dict[str, dict[str, Tensor]] = {}
        for name, tensor in _tensors(path / WEIGHTS):
            match = _NAME.fullmatch(name)
            if match is None:
                raise ModelError(
                    f"{path / WEIGHTS}: {name} is not supported: only lora_A and lora_B of linear layers are"
                )
            halves.setdefault(match[1], {})[match[2]] = tensor
        if not halves:
            raise ModelError(f"{path / WEIGHTS} has no tensors")
        self.rank = 0
        for module, half in halves.items():
            if len(half) < 2:
                raise ModelError(f"{path / WEIGHTS}: {module} has lora_{'A' if 'A' in half else 'B'} only")
            for which, tensor in half.items():
                if not tensor.isfinite().all():
                    raise ModelError(f"{path / WEIGHTS}: lora_{which} of {module} has values that are not finite")
            a, b = half["A"].to(torch.float32, copy=True), half["B"].to(torch.float32, copy=True)
            if stacked := _STACKED.fullmatch(module):
                self._stacked.setdefault(_in_family(stacked[1], names), []).append(_Pair(a, b))
                continue
            scale = self._checked(module, a, b)
            self._found[_in_family(module, names)] = _Pair(a, b * scale)

    def _checked(self, module: str, a: Tensor, b: Tensor, count: int = 1) -> float:
        """Return the scale of a module, or of `count` experts. Raises `ModelError` for another rank than configured."""
        rank, scale = self._config.of(module)
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank * count or b.shape[1] != rank * count:
            raise ModelError(
                f"{self._path / WEIGHTS}: {module} has shapes {tuple(a.shape)} and {tuple(b.shape)}, "
                f"but its rank by {FILE} is {rank}"
            )
        self.rank = max(self.rank, rank)
        return scale

    def take(self, name: str, out: int, inner: int) -> _Pair | None:
        """Return a module's matrices, if it is adapted. Raises `ModelError` if they do not fit `[out, inner]`."""
        name = name if name in self._found else name.replace("block_sparse_moe.", "mlp.")
        pair = self._found.pop(name, None)
        if pair is not None and (len(pair.b), pair.a.shape[1]) != (out, inner):
            raise ModelError(
                f"the adapter's {name} is for a matrix {len(pair.b)} x {pair.a.shape[1]}, "
                f"but the base model's is {out} x {inner}"
            )
        return pair

    def take_stacked(self, modules: tuple[str, ...], tensor: str, count: int, out: int, inner: int) -> list[_Pair]:
        """Return the matrices of each expert for a stacked tensor `[count, out, inner]`; none if it is not adapted.

        modules: possible names of the module that has it. Shapes say which tensor matrices are for."""
        for module in modules:
            for place, (a, b) in enumerate(self._stacked.get(module, [])):
                if a.dim() == b.dim() == 2 and (len(b), a.shape[1]) == (out, inner):
                    del self._stacked[module][place]
                    b = b * self._checked(f"{module}.{tensor}", a, b, count)
                    # Rows of A are in the order of experts, columns of B in that of components.
                    rank = len(a) // count
                    return [_Pair(a[i * rank : (i + 1) * rank], b[:, i::count]) for i in range(count)]
        return []

    def refuse_rest(self) -> None:
        rest = [*self._found, *(module for module, pairs in self._stacked.items() for _ in pairs)]
        if rest:
            first = min(rest)
            raise ModelError(
                f"the adapter changes {first}, which adapters cannot change here "
                f"({len(rest)} such module(s)): attention, MLPs and most experts are supported"
            )


def _in_family(module: str, names: TensorNames) -> str:
    """Return a module's name as the family has it."""
    for prefix in names.other_prefixes:
        if prefix and module.startswith(prefix):
            return names.prefix + module.removeprefix(prefix)
    return module if module.startswith(names.prefix) else names.prefix + module


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Read all tensors of a file. Raises `ModelError`, one line."""
    refuse_pointer(file)
    if not file.is_file():
        raise ModelError(_missing(file.parent, file.name))
    try:
        with safe_open(file, "pt") as opened:
            for name in sorted(opened.keys()):
                tensor = opened.get_tensor(name)
                if tensor.dtype not in DTYPES:
                    raise ModelError(
                        f"{file}: {name} is {str(tensor.dtype).removeprefix('torch.')}, which is not read here"
                    )
                yield name, tensor
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is not a complete safetensors file: {one_line(error)}") from None


def load_adapter(path: Path, spec: ModelSpec, base: Tensors, max_rank: int) -> Adapter:
    """Load the adapter in a directory for a model, or for the shard that `spec` describes.

    base: the tensors of the base model, of which norms are read. Raises `ModelError`, one line, before anything of the
    adapter is used."""
    if not spec.native:
        raise ModelError(f"{spec.architecture} runs on transformers' code, where adapters are not supported")
    if spec.recurrence is not None or spec.latent is not None:
        kind = "recurrent layers" if spec.latent is None else "latent attention"
        raise ModelError(f"{spec.architecture} has {kind}, which LoRA adapters do not support yet")
    names = family_of(spec.architecture).names
    modules = _Modules(path, read_adapter_config(path, max_rank), names)
    layers = tuple(dict(_Layer(spec, names, base, modules, i).operations()) for i in range(spec.num_layers))
    modules.refuse_rest()
    return Adapter(layers, modules.rank)


class AdapterReader:
    """Reads adapters of one model: returns the digest and the packed matrices of a directory. Raises `ModelError`."""

    def __init__(self, spec: ModelSpec, model_path: Path, dtype: torch.dtype, max_rank: int) -> None:
        """dtype: of the model's weights."""
        self._spec, self._model_path, self._dtype, self._max_rank = spec, model_path, dtype, max_rank

    def __call__(self, path: Path) -> tuple[str, Adapter]:
        digest = adapter_digest(path)
        with ExitStack() as stack:
            base = plain_tensors(self._spec, self._model_path, self._dtype, stack)
            adapter = load_adapter(path, self._spec, base, self._max_rank)
        if adapter_digest(path) != digest:
            raise ModelError(f"{path} changed while it was being loaded: load it again")
        return digest, adapter


class _Layer:
    """Packs the matrices of one layer, in the order of `layer_weights`."""

    def __init__(self, spec: ModelSpec, names: TensorNames, base: Tensors, modules: _Modules, i: int) -> None:
        self.spec, self.names, self.base, self.modules = spec, names, base, modules
        self.prefix, self.parts = names.layer.format(i), spec.layer(i)
        own = spec.shard_of
        self.rows, self.columns = Part(0, own.rank, own.ranks), Part(1, own.rank, own.ranks)
        self.kv_rows = Part(0, own.kv_part, own.kv_parts)

    def operations(self) -> Iterator[tuple[str, tuple[LowRank, ...]]]:
        """Yield the matrices of each operation that has any."""
        spec, names = self.spec, self.names
        inter, e = spec.intermediate_size, spec.experts
        found = {"qkv": self.qkv(), "o": self.output(names.o, spec.num_heads * spec.head_dim)}
        kernel = "gate_up" if spec.gated else "up"
        if e is None or not self.parts.experts:
            found[kernel] = self.mlp(names.gate_up, names.gate, names.up, inter)
            found["down"] = self.output(names.down, inter)
        else:
            found["router"] = self.input("", (names.router,), (e.count,), (WHOLE,), names.mlp_norm, places=((0, 1),))
            found[f"experts_{kernel}"], found["experts_down"] = self.experts(e)
            if e.shared_size:
                shared = names.shared_gate_up, names.shared_gate, names.shared_up
                found[f"shared_{kernel}"] = self.mlp(*shared, e.shared_size)
                found["shared_down"] = self.output(names.shared_down, e.shared_size)
        for name, matrices in found.items():
            if matrices:
                yield name, matrices

    def mlp(self, fused: str, gate: str, up: str, inter: int) -> tuple[LowRank, ...]:
        norm = self.names.attention_norm if self.spec.placement.norms == 1 else self.names.mlp_norm
        if not self.spec.gated:
            return self.input("", (up,), (inter,), (self.rows,), norm, places=((0, 1),))
        return self.input(fused, (gate, up), (inter, inter), (self.rows, self.rows), norm, places=((0, 2), (1, 2)))

    def experts(self, e: Experts) -> tuple[tuple[LowRank, ...], tuple[LowRank, ...]]:
        """Pack the matrices of experts, whose modules are separate or stacked."""
        names, inter, hidden = self.names, e.intermediate_size, self.spec.hidden_size
        whole = inter * self.rows.of
        halves = 2 if self.spec.gated else 1
        modules = tuple(f"{self.prefix}{name}" for name in (names.expert_gate.partition(".{}")[0], "mlp.experts"))
        stacked, take = not names.experts_alternate, self.modules.take_stacked
        both = take(modules, "gate_up_proj", e.count, halves * whole, hidden) if stacked else []
        downs = take(modules, "down_proj", e.count, hidden, whole) if stacked else []
        read: list[LowRank] = []
        added: list[LowRank] = []
        for i in range(e.count):
            gate, up, down = (name.format(i) for name in (names.expert_gate, names.expert_up, names.expert_down))
            reading = self.mlp("", gate, up, inter)
            if both:
                pairs = [_Pair(both[i].a, b) for b in both[i].b.split(whole)]
                reading += self.reading(pairs, (self.rows,) * halves, names.mlp_norm, ((0, halves), (1, halves)))
            adding = self.output(down, inter) + (self.adding(downs[i]) if downs else ())
            read += [part._replace(expert=i) for part in reading]
            added += [part._replace(expert=i) for part in adding]
        return tuple(read), tuple(added)

    def qkv(self) -> tuple[LowRank, ...]:
        spec, names, d = self.spec, self.names, self.spec.head_dim
        sizes = (spec.num_heads * d, spec.num_kv_heads * d, spec.num_kv_heads * d)
        rope = spec.ropes[self.parts.rope or 0] if spec.ropes else None
        rotated = rope.dim(d) if rope is not None and not rope.interleaved else 0
        paired = partial(pack.interleave_rotary, head_dim=d, rotary_dim=rotated) if rotated else None
        return self.input(
            names.qkv, (names.q, names.k, names.v), sizes, (self.rows, self.kv_rows, self.kv_rows),
            names.attention_norm, places=((0, 1), (sizes[0], 1), (sizes[0] + sizes[1], 1)),
            order=(paired, paired, None),
        )  # fmt: skip

    def input(
        self, fused: str, names: tuple[str, ...], sizes: tuple[int, ...], parts: tuple[Part, ...], norm: str, *,
        places: tuple[tuple[int, int], ...], order: tuple[Any, ...] = (None, None),
    ) -> tuple[LowRank, ...]:  # fmt: skip
        """Pack the matrices of a projection that reads the stream, of separate modules or the `fused` one.

        places: first row and step of each in the output; order: reorders its rows."""
        hidden, whole = self.spec.hidden_size, [size * part.of for size, part in zip(sizes, parts, strict=True)]
        pairs: list[_Pair | None]
        if fused:
            pair = self.modules.take(self.prefix + fused, sum(whole), hidden)
            pairs = [None] * len(sizes) if pair is None else [_Pair(pair.a, b) for b in pair.b.split(whole)]
        else:
            pairs = [self.modules.take(self.prefix + n, size, hidden) for n, size in zip(names, whole, strict=True)]
        return self.reading(pairs, parts, norm, places, order)

    def reading(
        self, pairs: Sequence[_Pair | None], parts: tuple[Part, ...], norm: str, places: tuple[tuple[int, int], ...],
        order: tuple[Any, ...] = (None, None),
    ) -> tuple[LowRank, ...]:  # fmt: skip
        """Pack matrices of a projection that reads the stream; see `input`."""
        made = []
        for pair, part, (begin, step), arrange in zip(pairs, parts, places, order, strict=False):
            if pair is not None:
                b = cut_to(pair.b, part)
                a, shift = self._folded(pair.a, norm)
                made.append(LowRank(a, (b if arrange is None else arrange(b)).contiguous(), begin, step, shift))
        return tuple(made)

    def _folded(self, a: Tensor, norm: str) -> tuple[Tensor, Tensor | None]:
        """Fold the norm before a projection into A."""
        spec, name = self.spec, f"{self.prefix}{norm}"
        if not spec.placement.before:
            return a, None
        shift = a @ self.base.get(f"{name}.bias", (spec.hidden_size,)).float() if spec.norm.bias else None
        weight = norm_weight(self.base, spec, name, spec.hidden_size)
        return pack.fold_norm(a, weight, centred=spec.norm.centred), shift

    def output(self, name: str, inner: int) -> tuple[LowRank, ...]:
        """Pack the matrices of a projection that adds to the stream; a shard has columns of A."""
        pair = self.modules.take(self.prefix + name, self.spec.hidden_size, inner * self.columns.of)
        return () if pair is None else self.adding(pair)

    def adding(self, pair: _Pair) -> tuple[LowRank, ...]:
        return (LowRank(cut_to(pair.a, self.columns).contiguous(), pair.b * self.spec.residual_scale),)
