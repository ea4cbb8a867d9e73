"""`Weights`: a model's weights packed for the kernels, from a checkpoint or random (`--load-format dummy`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from weft.engine.model import matrices
from weft.engine.model.checkpoint import WHOLE, Checkpoint, Dummy, Part, Tensors, TensorSource
from weft.engine.model.conversion import Conversion, Wanted
from weft.engine.model.families import family_of
from weft.engine.model.families.family import TensorNames
from weft.engine.model.finite import FiniteCheck
from weft.engine.model.gguf.checkpoint import GgufCheckpoint
from weft.engine.model.gguf.file import INDEX
from weft.engine.model.integers import GIB, IntegerCheckpoint
from weft.engine.model.layer_weights import LayerWeights, ProjectionWeights, norm_weight, pack_layer
from weft.engine.model.matrices import Unpacked
from weft.engine.model.realistic import RealisticDummy
from weft.engine.model.shapes import ShapesOnly
from weft.engine.model.spec import ModelSpec
from weft.engine.model.staging import Staging
from weft.engine.progress import LOADING, Progress, notice
from weft.kernels.formats import fp8
from weft.kernels.formats.packed_matrix import PackedMatrix
from weft.kernels.formats.packed_rows import PackedRows
from weft.kernels.matmul import weight_layout as pack

HARMLESS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", "score.weight", "score.bias")
"""Name endings of checkpoint tensors that follow from the config and are ignored."""
OTHER_HEAD = "config.json ties the output head to the embedding, but the checkpoint has a head of its own: using it"
NO_HEAD = "config.json says that the output head is not tied, but the checkpoint has no head: using the embedding"


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor  # [V, H]; in a shard the rows of `spec.vocabulary`. Packed: codes.
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [H].
    lm_head: Tensor  # [V, H], or a shard's rows; the embedding itself when tied. Packed: codes.
    rotary: tuple[Tensor, ...]  # [positions, D/2, 2] float32 each; `ModelSpec.rotary_table` gives a layer's index.
    norm_bias: Tensor | None = None  # [H].
    head_bias: Tensor | None = None  # [V].
    positions: Tensor | None = None  # [positions, H], learned: added to the embedding.
    kv_scales: Tensor | None = None
    """[layers with K and V, 2, Hkv] float32, for FP8 K and V, if the checkpoint has them."""
    packed_embedding: PackedMatrix | None = None  # The embedding, if it is in 4 or 8 bits.
    packed_head: PackedMatrix | None = None
    has_hidden_states = True  # See `TransformersModule`.

    def tensors(self) -> list[Tensor]:
        """Return all tensors; some may be the same."""
        projections = (projection for layer in self.layers for projection in layer.values())
        own = (self.embedding, self.norm, self.lm_head, self.norm_bias, self.head_bias, self.positions, self.kv_scales)
        packed = (each.tensors() for each in (self.packed_embedding, self.packed_head) if each is not None)
        tensors = (
            *own,
            *chain(*packed),
            *self.rotary,
            *(tensor for projection in projections for tensor in projection.tensors()),
        )
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def table(self) -> Tensor | PackedMatrix:
        """The embedding as the reference implementation reads it."""
        return self.packed_embedding if self.packed_embedding is not None else self.embedding

    @property
    def head(self) -> Tensor | PackedMatrix:
        """The output head as the reference implementation reads it."""
        return self.packed_head if self.packed_head is not None else self.lm_head

    def kv_page_scales(self, spec: ModelSpec, dtype: torch.dtype) -> fp8.KvScales | None:
        """Return the scales of FP8 pages: the checkpoint's, or 1 for every head. None for pages in another format."""
        if dtype != fp8.E4M3:
            return None
        if self.kv_scales is not None:
            return fp8.kv_scales(self.kv_scales)
        return fp8.unit_kv_scales(len(spec.kv_heads), spec.num_kv_heads, self.norm.device)

    @property
    def num_bytes(self) -> int:
        return sum({t.data_ptr(): t.nbytes for t in self.tensors()}.values())


def warn_of_surplus(surplus: list[str]) -> None:
    if surplus:
        named = ", ".join(surplus[:3]) + (" …" if len(surplus) > 3 else "")
        notice(
            f"{len(surplus)} tensor(s) of the checkpoint are not used, as config.json does not require them: {named}"
        )


class _Wanted:
    """Records the tensors that packing requests; returns only shapes."""

    def __init__(self, checkpoint: TensorSource, *, packs: bool) -> None:
        self._checkpoint, self._packs = checkpoint, packs
        self.tensors: list[Wanted] = []

    def __call__(self, name: str, shape: tuple[int, ...], part: Part, kind: torch.dtype) -> Tensor:
        packing = self._checkpoint.packing(name, shape, part) if self._packs and kind == torch.uint8 else None
        if packing is None:
            stored = self._checkpoint(name, shape, part)
            matrices.check_format(name, stored, kind)
            self.tensors.append(Wanted(name, stored, shape, kind))
        else:
            stored = self._checkpoint.packed(name, shape, part)
            self.tensors.append(Wanted(name, stored, shape, kind, (packing.form, shape[1])))
        return torch.empty(self.tensors[-1].target, dtype=kind, device="meta")


class _Reader:
    """Returns the tensors of a checkpoint on the device, in the recorded order, as copies.

    A GPU receives them through `Staging`, and converts and checks them itself; for a CPU, `Conversion` does."""

    def __init__(
        self, wanted: list[Wanted], device: torch.device, progress: Progress | None, stack: ExitStack, staged: bool
    ) -> None:
        self._wanted = iter(wanted)
        self._progress = progress
        self.finite = FiniteCheck()
        self._source: Staging | Conversion
        if staged:
            self._source = stack.enter_context(Staging([each.stored.raw for each in wanted], device))
        else:
            self._source = stack.enter_context(Conversion(wanted, self.finite))
        self._done, self._total = 0, sum(each.stored.raw.nbytes for each in wanted)
        if progress is not None:
            progress(LOADING, 0, self._total)

    def __call__(self, name: str, _shape: tuple[int, ...], _part: Part, kind: torch.dtype) -> Tensor:
        wanted = next(self._wanted)
        stored = wanted.stored
        assert name == wanted.name, "packing must request the same tensors each time"
        # Convert to the serving dtype first, so that folding a norm rounds once, in that dtype. Always copy, because a
        # checkpoint returns the mapped file, which may be overwritten or truncated during serving.
        tensor = self._source.take()
        if isinstance(self._source, Staging):
            read = tensor if stored.decode is None else stored.decode(tensor, kind)
            tensor = read.to(dtype=kind).reshape(wanted.target).contiguous()
            wanted.check(self.finite, tensor)
        self._done += stored.raw.nbytes
        if self._progress is not None:
            self._progress(LOADING, self._done, self._total)
        return tensor


def _skewed(weights: Weights, by: float) -> Weights:
    """Bias the routers so that they send more tokens to the first eighth of the experts."""

    def router(old: ProjectionWeights) -> ProjectionWeights:
        count, device = len(old.weight), old.weight.device
        more = torch.where(torch.arange(count, device=device) < max(1, count // 8), by, 0.0)
        return replace(old, bias=more if old.bias is None else old.bias + more)

    if not by:
        return weights
    layers = ({**w, "router": router(w["router"])} if "router" in w else w for w in weights.layers)
    return replace(weights, layers=tuple(layers))


def _checkpoint(spec: ModelSpec, path: Path, stack: ExitStack) -> TensorSource:
    if (path / INDEX).is_file():
        return GgufCheckpoint(path)
    return Checkpoint(path, stack) if spec.integers is None else IntegerCheckpoint(path, stack, spec.integers)


def load_weights(
    spec: ModelSpec, path: Path, *, device: torch.device, dtype: torch.dtype, max_positions: int,
    dummy_seed: int | None = None, dummy_skew: float = 0.0, dummy_realistic: bool = False,
    progress: Progress | None = None, staged: bool | None = None,
) -> Weights:  # fmt: skip
    """Load and pack.

    dummy_seed: make random weights instead of reading `path`. dummy_skew: what random routers add to the logits of the
    first eighth of the experts. dummy_realistic: use `RealisticDummy`. progress: counts bytes. staged: copy through
    `Staging`; None: to a GPU, where it is faster.

    The result is a copy, so later changes to the files do not affect it. Before reading any weight, raises `ModelError`
    for a missing shard or tensor, a shape that does not fit the config, or extra layers; afterwards for values that are
    not finite. Prints one line about unused tensors."""
    names = family_of(spec.architecture).names
    tables = tuple(
        pack.rotary_table(inv_freq.to(device), max_positions, scale, spec.rotary_width // 2)
        for inv_freq, scale in spec.rotary(max_positions)
    )
    if dummy_seed is not None:
        dummy: Dummy | RealisticDummy = Dummy(dummy_seed, device)
        if dummy_realistic:
            dummy = RealisticDummy(dummy_seed, device, spec, names)
        made = _made_up(spec, names, dummy, dtype, progress)
        return _skewed(_pack(spec, names, Tensors(made, None, dtype), tables, tied=spec.tie_embeddings), dummy_skew)
    head = f"{names.lm_head}.weight"
    with ExitStack() as stack:
        checkpoint = _checkpoint(spec, path, stack)
        embedding = f"{names.embedding}.weight"
        checkpoint.rename(embedding, names.prefix, names.other_prefixes, head if spec.tie_embeddings else "")
        tied = _is_tied(spec, names, checkpoint)
        checkpoint.refuse_further_layers(names.layer, spec.num_layers + names.draft_layers)
        packs = spec.packed is not None
        wanted = _Wanted(checkpoint, packs=packs)
        known = checkpoint.__contains__, dtype, checkpoint.shape_of, checkpoint.packing if packs else None
        with ShapesOnly():
            _pack(spec, names, Tensors(wanted, *known), tables, tied=tied)
        reader = _Reader(wanted.tensors, device, progress, stack, device.type == "cuda" if staged is None else staged)
        weights = _pack(spec, names, Tensors(reader, *known), tables, tied=tied)
        reader.finite.end(dtype)
        if spec.shard_of.rank == 0:  # the others would print the same
            _report_conversion(checkpoint, wanted, weights, spec)
            harmless = (*HARMLESS, *names.harmless, *matrices.HARMLESS)
            surplus = checkpoint.surplus((*harmless, head) if tied else harmless)
            drafts = (names.layer.format(spec.num_layers + i) for i in range(names.draft_layers))
            skipped = (*names.unused, *drafts)
            warn_of_surplus([name for name in surplus if not name.startswith(skipped)])
    return weights


def plain_tensors(spec: ModelSpec, path: Path, dtype: torch.dtype, stack: ExitStack) -> Tensors:
    """Return the tensors of a checkpoint on the CPU, each read when requested. Raises `ModelError`."""
    names = family_of(spec.architecture).names
    checkpoint = _checkpoint(spec, path, stack)
    checkpoint.rename(f"{names.embedding}.weight", names.prefix, names.other_prefixes)

    def get(name: str, shape: tuple[int, ...], part: Part, kind: torch.dtype) -> Tensor:
        stored = checkpoint(name, shape, part)
        return (stored.raw if stored.decode is None else stored.decode(stored.raw, kind)).to(kind).reshape(shape)

    return Tensors(get, checkpoint.__contains__, dtype, checkpoint.shape_of)


def _is_tied(spec: ModelSpec, names: TensorNames, checkpoint: TensorSource) -> bool:
    """Return whether the embedding is the output head as well. If the file contradicts `config.json`, print a line and
    use a head of its own if the file has one, as `transformers` does."""
    head, embedding = f"{names.lm_head}.weight", f"{names.embedding}.weight"
    if head not in checkpoint:
        is_decoder = not spec.architecture.removesuffix("LMHeadModel").endswith("Model")  # others need no head
        if is_decoder and not spec.tie_embeddings and spec.shard_of.rank == 0:
            notice(NO_HEAD)
        return True
    if not spec.tie_embeddings:
        return False
    shape = (spec.vocab_size, spec.hidden_size)
    if embedding not in checkpoint or checkpoint.shape_of(head) != shape or checkpoint.shape_of(embedding) != shape:
        return True  # reading the embedding reports what is wrong
    own, stored = (checkpoint(name, shape).raw for name in (head, embedding))
    if own.dtype == stored.dtype and torch.equal(own, stored):
        return True
    if spec.shard_of.rank == 0:
        notice(OTHER_HEAD)
    return False


def _report_conversion(checkpoint: TensorSource, wanted: _Wanted, weights: Weights, spec: ModelSpec) -> None:
    """Print what became of matrices that the checkpoint stores in fewer bits."""
    if spec.packed is not None:
        notice(
            f"weights stay in 4 and 8 bits ({spec.packed.formats}): {weights.num_bytes / GIB:.2f} GiB, activations are "
            "rounded to int8; --quantization none widens the weights instead"
        )
    elif isinstance(checkpoint, IntegerCheckpoint):
        notice(checkpoint.summary(weights.num_bytes, spec))
    if spec.widened:
        stored = sum(each.stored.raw.nbytes for each in wanted.tensors) / GIB
        notice(
            "matrices in FP8, whose activations are not quantized, became 16 bits while loading: "
            f"{stored:.2f} GiB in the checkpoint, the weights now take {weights.num_bytes / GIB:.2f} GiB"
        )


def _made_up(
    spec: ModelSpec, names: TensorNames, dummy: Dummy | RealisticDummy, dtype: torch.dtype, progress: Progress | None
) -> Callable[[str, tuple[int, ...], Part, torch.dtype], Tensor]:
    done = total = 0

    def count(_name: str, shape: tuple[int, ...], _part: Part, kind: torch.dtype) -> Tensor:
        nonlocal total
        total += math.prod(shape) * kind.itemsize
        return torch.empty(shape, dtype=kind, device="meta")

    def get(name: str, shape: tuple[int, ...], part: Part, kind: torch.dtype) -> Tensor:
        nonlocal done
        tensor = dummy(name, shape, part).to(kind, copy=part.of > 1).contiguous()
        done += tensor.nbytes
        if progress is not None:
            progress(LOADING, done, total)
        return tensor

    if progress is not None:
        with ShapesOnly():
            _pack(spec, names, Tensors(count, None, dtype), (), tied=spec.tie_embeddings)
        progress(LOADING, 0, total)
    return get


def request_tensors(spec: ModelSpec, tensors: Tensors) -> None:
    """Request all tensors of a model; run inside `ShapesOnly`."""
    names = family_of(spec.architecture).names
    tied = spec.tie_embeddings or not tensors.has(f"{names.lm_head}.weight")
    _pack(spec, names, tensors, (), tied=tied)


def _table(given: Unpacked, dtype: torch.dtype) -> Tensor | PackedMatrix:
    """Return the embedding or the head. FP8, in which some checkpoints store the head, becomes 16 bits."""
    if isinstance(given, PackedRows):
        return given.data if given.data.is_meta else PackedMatrix.of(given)
    return matrices.dequantize(given, dtype)


def _plain(table: Tensor | PackedMatrix) -> Tensor:
    return table.tiles.codes if isinstance(table, PackedMatrix) else table


def _pack(spec: ModelSpec, names: TensorNames, tensors: Tensors, rotary: tuple[Tensor, ...], *, tied: bool) -> Weights:
    """Read all tensors of a model in a fixed order."""
    get, hidden = tensors.get, spec.hidden_size
    own = spec.vocabulary  # a shard's rows
    rows = Part.span(own.start, spec.vocab_size) if len(own) < spec.vocab_size else WHOLE
    embedding = _table(matrices.read_plain(tensors, f"{names.embedding}.weight", len(own), hidden, rows), tensors.dtype)
    layers = tuple(pack_layer(tensors, spec, names, i) for i in range(spec.num_layers))
    norm = norm_weight(tensors, spec, names.norm, hidden)
    if norm is None:
        norm = torch.ones(hidden, dtype=tensors.dtype, device=_plain(embedding).device)
    norm_bias = get(f"{names.norm}.bias", (hidden,)) if spec.norm.bias else None
    head = embedding
    if not tied:
        head = _table(matrices.read(tensors, names.lm_head, len(own), hidden, rows), tensors.dtype)
    head_bias = get(f"{names.lm_head}.bias", (len(own),), rows) if spec.head_bias else None
    positions = None
    if (offset := spec.learned_positions) is not None:
        positions = get(f"{names.positions}.weight", (spec.max_positions + offset, hidden))[offset:]
    kv_scales = matrices.kv_scales(tensors, spec, names)
    packed = (each if isinstance(each, PackedMatrix) else None for each in (embedding, head))
    return Weights(
        _plain(embedding), layers, norm, _plain(head), rotary, norm_bias, head_bias, positions, kv_scales, *packed
    )
