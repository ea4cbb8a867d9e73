"""`pack_layer`: packs the tensors of one layer for its operations (`kernels.matmul.weight_layout`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from weft.engine.model import matrices
from weft.engine.model.checkpoint import WHOLE, Part, Tensors
from weft.engine.model.expert_weights import ExpertWeights, cut_to
from weft.engine.model.families.family import TensorNames
from weft.engine.model.matrices import QuantizedMatrix, Unpacked
from weft.engine.model.parts import Experts, Latent, Recurrence
from weft.engine.model.spec import ModelSpec
from weft.engine.model.state_weights import StateWeights, read_state_weights
from weft.kernels.formats.fp8_matrix import Fp8Matrix
from weft.kernels.formats.matrix import Matrix
from weft.kernels.formats.packed_matrix import PackedMatrix
from weft.kernels.formats.packed_rows import PackedRows
from weft.kernels.matmul import weight_layout as pack


@dataclass(frozen=True, slots=True)
class ProjectionWeights:
    """The weights of one operation of a layer, in the layout of `kernels.matmul.weight_layout`.

    The preceding norm is folded in, except into quantized matrices (`fp8`, `packed`)."""

    weight: Tensor  # [out, inner]; experts: `[experts, out, inner]`; router: float32; quantized: e4m3 or codes.
    bias: Tensor | None = None  # [out]; experts: `[experts, out]`.
    q_norm: Tensor | None = None  # [D], or [Hq * D] if one norm covers all heads.
    k_norm: Tensor | None = None  # [D], or [Hkv * D].
    sinks: Tensor | None = None  # [Hq], for the attention after a QKV projection.
    post_norm: Tensor | None = None  # [H] float32: the norm between a projection and the residual stream.
    gate: Tensor | None = None  # [1, H]: gate of a shared expert.
    choice_bias: Tensor | None = None  # [experts] float32, of a router.
    fp8: Fp8Matrix | None = None  # The same weight with its scales and the preceding norm, if quantized.
    packed: PackedMatrix | None = None  # The same weight in 4 or 8 bits; rows of gate and up then do not alternate.
    state: StateWeights | None = None  # The other weights of a recurrence, with its input projection.

    @property
    def matrix(self) -> Matrix:
        """The matrix as a reference implementation reads it."""
        if self.packed is not None:
            return self.packed
        return self.weight if self.fp8 is None else self.fp8

    @property
    def of_experts(self) -> Tensor | Fp8Matrix:
        """The matrices of experts, which are never packed."""
        return self.weight if self.fp8 is None else self.fp8

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, each once."""
        own = [getattr(self, field.name) for field in fields(self)]
        if self.fp8 is not None:
            own += [self.fp8.weight.scale, self.fp8.input_scale, self.fp8.norm, self.fp8.norm_bias]
        if self.packed is not None:
            own += self.packed.tensors()
        if self.state is not None:
            own += [getattr(self.state, field.name) for field in fields(self.state)]
        return tuple(tensor for tensor in own if isinstance(tensor, Tensor))


def _packed_both(one: Unpacked, other: Unpacked) -> bool:
    return isinstance(one, PackedRows) and isinstance(other, PackedRows)


def _packed(
    rows: PackedRows, bias: Tensor | None, norm: Tensor | None = None, norm_bias: Tensor | None = None, *,
    centred: bool = False,
) -> ProjectionWeights:  # fmt: skip
    if rows.data.is_meta:  # only shapes are wanted
        return ProjectionWeights(rows.data, bias)
    matrix = PackedMatrix.of(rows, norm, norm_bias, centred=centred)
    return ProjectionWeights(matrix.tiles.codes, bias, packed=matrix)


LayerWeights = Mapping[str, ProjectionWeights]  # Weights by operation.


def norm_weight(tensors: Tensors, spec: ModelSpec, name: str, width: int, part: Part = WHOLE) -> Tensor | None:
    """Return a norm's weight `[width]`, in float32 if the checkpoint stores it minus one."""
    if not spec.norm.weight:
        return None
    weight = tensors.get(f"{name}.weight", (width,), part)
    return weight.float() + 1.0 if spec.norm.unit_offset else weight


def _own_rows(begin: int, end: int, part: Part, fused: Tensor) -> Tensor:
    return cut_to(fused[begin:end], part)


def _times(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1.0 else (tensor.float() * scale).to(tensor.dtype)


class _Layer:
    """Reads the tensors of one layer by name, as the rank's shard."""

    def __init__(self, tensors: Tensors, spec: ModelSpec, names: TensorNames, i: int) -> None:
        self.tensors, self.spec, self.names = tensors, spec, names
        self.prefix = names.layer.format(i)
        self.parts = spec.layer(i)
        own = spec.shard_of
        # Column-parallel projections split rows of their weights, row-parallel ones (o, down) split columns.
        self.rows, self.columns = Part(0, own.rank, own.ranks), Part(1, own.rank, own.ranks)
        self.kv_rows = Part(0, own.kv_part, own.kv_parts)
        self.state_keys = WHOLE
        if spec.recurrence is not None:
            parts = spec.recurrence.key_parts
            self.state_keys = Part(0, own.rank * parts // own.ranks, parts)
        self.first = own.rank == 0
        self.piecewise = own.ranks > 1 and tensors.known is not None
        """Whether pieces of a tensor are read one by one; random tensors are cut from the full tensor."""

    def matrix(self, name: str, out: int, inner: int, part: Part = WHOLE) -> Unpacked:
        asked = self.spec.quantization
        if asked is not None and asked.at_load and part.of > 1 and part.dim == 1:
            # A row's scale covers all its columns on all ranks, so read them all.
            whole = self.in_format(self.read(name, out, part.whole((out, inner))[1], WHOLE))
            assert isinstance(whole, QuantizedMatrix)
            own = whole.weight.values[part.of_whole((out, inner))].contiguous()
            return whole._replace(weight=whole.weight._replace(values=own))
        return self.read(name, out, inner, part)

    def read(self, name: str, out: int, inner: int, part: Part) -> Unpacked:
        found = self.stored(name, out, inner, part)
        return matrices.dequantize(found, self.tensors.dtype) if self.spec.widened else found

    def _widened(self, name: str, out: int, inner: int, part: Part = WHOLE) -> Unpacked:
        """Read a matrix of an expert, which no kernel reads in 4 or 8 bits."""
        found = self.matrix(name, out, inner, part)
        return found.values(self.tensors.dtype) if isinstance(found, PackedRows) else found

    def stored(self, name: str, out: int, inner: int, part: Part = WHOLE) -> Unpacked:
        """Read a matrix in the checkpoint's format."""
        if not self.names.transposed:
            given = self.spec.quantization
            if given is None and not self.spec.widened:
                matrices.refuse_undeclared_scale(self.tensors, f"{self.prefix}{name}")
            static = given is not None and given.activations == "static"
            return matrices.read(self.tensors, f"{self.prefix}{name}", out, inner, part, static=static)
        turned = part._replace(dim=1 - part.dim)
        return self.tensors.get(f"{self.prefix}{name}.weight", (inner, out), turned).t().contiguous()

    def _in_32_bits(self, name: str, out: int, inner: int, part: Part = WHOLE) -> Tensor:
        """Read a matrix in float32, which some checkpoints store in FP8."""
        if matrices.find_scale(self.tensors, f"{self.prefix}{name}") is None:
            return self.tensors.get(f"{self.prefix}{name}.weight", (out, inner), part, torch.float32)
        return matrices.dequantize(self.stored(name, out, inner, part), torch.float32)

    def bias(self, name: str, out: int, part: Part = WHOLE) -> Tensor:
        return self.tensors.get(f"{self.prefix}{name}.bias", (out,), part)

    def rows_of(
        self, fused: str, names: tuple[str, ...], sizes: tuple[int, ...], parts: tuple[Part, ...], inner: int
    ) -> list[Unpacked]:
        """Read matrices `[size, inner]` in this order, from separate tensors or the `fused` one."""

        def read(name: str, size: int, part: Part) -> Unpacked:
            return self.matrix(name, size, inner, part)

        return self._rows_of(read, fused, names, sizes, parts)

    def biases_of(
        self, fused: str, names: tuple[str, ...], sizes: tuple[int, ...], parts: tuple[Part, ...]
    ) -> list[Tensor]:
        """Read biases `[size]` in this order, from separate tensors or the `fused` one."""
        found = self._rows_of(self.bias, fused, names, sizes, parts)
        return [bias for bias in found if isinstance(bias, Tensor)]

    def _rows_of(
        self, read: Callable[[str, int, Part], Unpacked], fused: str, names: tuple[str, ...], sizes: tuple[int, ...],
        parts: tuple[Part, ...],
    ) -> list[Unpacked]:  # fmt: skip
        if not fused:
            return [read(*each) for each in zip(names, sizes, parts, strict=True)]
        whole = [size * part.of for size, part in zip(sizes, parts, strict=True)]
        if self.piecewise:
            firsts = [sum(whole[:i]) + part.part * sizes[i] for i, part in enumerate(parts)]
            spans = [Part.span(first, sum(whole)) for first in firsts]
            return [read(fused, size, span) for size, span in zip(sizes, spans, strict=True)]
        whole_tensor, ends = read(fused, sum(whole), WHOLE), [sum(whole[: i + 1]) for i in range(len(whole))]
        return [
            self.map_rows(partial(_own_rows, end - size, end, part), whole_tensor)
            for end, size, part in zip(ends, whole, parts, strict=True)
        ]

    def map_rows(self, change: Callable[..., Tensor], *of: Unpacked) -> Unpacked:
        """See `matrices.map_rows`."""
        return matrices.map_rows(change, *of, dtype=self.tensors.dtype)

    def norm(self, name: str) -> Tensor | None:
        return norm_weight(self.tensors, self.spec, f"{self.prefix}{name}", self.spec.hidden_size)

    def post_norm(self, name: str) -> Tensor | None:
        if not self.spec.placement.after:
            return None
        weight = self.norm(name)
        return None if weight is None else weight.float()

    def folded(self, weight: Tensor, norm: str, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Fold the preceding norm's weight and bias into a matrix `[..., out, inner]` and its bias."""
        spec = self.spec
        if not spec.placement.before:
            return weight, bias
        if spec.norm.bias:
            shift = self.bias(norm, spec.hidden_size)
            more = weight.float() @ shift.float()
            bias = (more if bias is None else bias.float() + more).to(weight.dtype)
        return pack.fold_norm(weight, self.norm(norm), centred=spec.norm.centred), bias

    def input_projection(self, weight: Unpacked, norm: str, bias: Tensor | None = None) -> ProjectionWeights:
        """Return a projection that reads the stream, with the preceding norm folded in or, if quantized, alongside."""
        own = self.in_format(weight)
        if isinstance(own, Tensor):
            return ProjectionWeights(*self.folded(own, norm, bias))
        before, spec = self.spec.placement.before, self.spec
        shift = self.bias(norm, spec.hidden_size) if before and spec.norm.bias else None
        if isinstance(own, PackedRows):
            weight_of_norm = self.norm(norm) if before else None
            return _packed(own, bias, weight_of_norm, shift, centred=before and spec.norm.centred)
        matrix = self.fp8_matrix(own, self.norm(norm) if before else None, shift, before and spec.norm.centred)
        return ProjectionWeights(own.weight.values, bias, fp8=matrix)

    def output_projection(
        self, weight: Unpacked, bias: Tensor | None, *, post_norm: Tensor | None = None
    ) -> ProjectionWeights:
        """Return a projection that adds to the stream; only rank 0 adds its bias."""
        scale = self.spec.residual_scale
        bias = None if bias is None or not self.first else _times(bias, scale)
        own = matrices.scaled(self.in_format(weight), scale)
        if isinstance(own, Tensor):
            return ProjectionWeights(own, bias, post_norm=post_norm)
        if isinstance(own, PackedRows):
            return replace(_packed(own, bias), post_norm=post_norm)
        return ProjectionWeights(own.weight.values, bias, post_norm=post_norm, fp8=self.fp8_matrix(own))

    def _without_norm(self, own: Unpacked) -> ProjectionWeights:
        """Return a projection whose input is normalized before."""
        if isinstance(own, Tensor):
            return ProjectionWeights(own)
        if isinstance(own, PackedRows):
            return _packed(own, None)
        return ProjectionWeights(own.weight.values, fp8=self.fp8_matrix(own))

    def in_format(self, weight: Unpacked) -> Unpacked:
        """Quantize a matrix if requested and not done by the checkpoint."""
        asked = self.spec.quantization
        if asked is not None and asked.at_load and isinstance(weight, Tensor):
            return matrices.quantize(weight)
        return weight

    def fp8_matrix(
        self, own: QuantizedMatrix, norm: Tensor | None = None, norm_bias: Tensor | None = None, centred: bool = False
    ) -> Fp8Matrix:
        asked = self.spec.quantization
        assert asked is not None  # ensured by `matrix`
        return Fp8Matrix(matrices.packed(own.weight), asked.activations, own.input_scale, norm, norm_bias, centred)

    # -- attention

    def attention(self) -> dict[str, ProjectionWeights]:
        spec, names, d = self.spec, self.names, self.spec.head_dim
        sizes = ((1 + spec.output_gate) * spec.num_heads * d, spec.num_kv_heads * d, spec.num_kv_heads * d)
        parts, separate = (self.rows, self.kv_rows, self.kv_rows), (names.q, names.k, names.v)
        rope = spec.ropes[self.parts.rope or 0] if spec.ropes else None
        rotated = rope.dim(d) if rope is not None and not rope.interleaved else 0

        def paired(t: Tensor) -> Tensor:
            return pack.interleave_rotary(t, d, rotated) if rotated else t

        def half(t: Tensor, which: int) -> Tensor:
            """Return the queries (0) or the gate (1) of all heads."""
            return t.unflatten(0, (-1, 2, d))[:, which].flatten(0, 1)

        q, k, v = self.rows_of(names.qkv, separate, sizes, parts, spec.hidden_size)
        bias = gate_bias = None
        if spec.qkv_bias:
            qb, kb, vb = self.biases_of(names.qkv, separate, sizes, parts)
            if spec.output_gate:
                qb, gate_bias = half(qb, 0), half(qb, 1)
            bias = torch.cat((paired(qb), paired(kb), vb))
        found = {"o": self.o()}
        if spec.output_gate:
            gate = self.map_rows(partial(half, which=1), q)
            found["output_gate"] = self.input_projection(gate, names.attention_norm, gate_bias)
            q = self.map_rows(partial(half, which=0), q)
        weight = self.map_rows(lambda q, k, v: torch.cat((paired(q), paired(k), v)), q, k, v)
        q_norm = k_norm = sinks = None
        if spec.qk_norm:
            # A norm over all heads is sharded like the heads.
            widths, cuts = ((d, d), (WHOLE, WHOLE)) if spec.qk_norm == "head" else (sizes[:2], parts[:2])
            q_norm, k_norm = (
                norm_weight(self.tensors, spec, f"{self.prefix}{name}", width, cut)
                for name, width, cut in zip((names.q_norm, names.k_norm), widths, cuts, strict=True)
            )
            q_norm, k_norm = (None if n is None else paired(n) for n in (q_norm, k_norm))
        if spec.sinks:
            sinks = self.tensors.get(f"{self.prefix}{names.sinks}", (spec.num_heads,), self.rows)
        projection = self.input_projection(weight, names.attention_norm, bias)
        return found | {"qkv": replace(projection, q_norm=q_norm, k_norm=k_norm, sinks=sinks)}

    def o(self) -> ProjectionWeights:
        spec, names = self.spec, self.names
        weight = self.matrix(names.o, spec.hidden_size, spec.num_heads * spec.head_dim, self.columns)
        bias = self.bias(names.o, spec.hidden_size) if spec.o_bias else None
        return self.output_projection(weight, bias, post_norm=self.post_norm(names.attention_post_norm))

    # -- latent attention

    def latent_attention(self, own: Latent) -> dict[str, ProjectionWeights]:
        spec, names, heads = self.spec, self.names, self.spec.num_heads
        queries, norm = heads * own.query_dim, names.attention_norm
        paired = not (spec.ropes and spec.ropes[0].interleaved)

        def rotated_last(t: Tensor, width: int) -> Tensor:
            """Make rotary pairs of the last rows of each head of `width` rows neighbors."""
            per_head = t.unflatten(0, (-1, width))
            last = per_head[:, width - own.rotated :].flatten(0, 1)
            if paired:
                last = pack.interleave_rotary(last, own.rotated)
            last = last.unflatten(0, (-1, own.rotated))
            return torch.cat((per_head[:, : width - own.rotated], last), 1).flatten(0, 1)

        def projected(t: Tensor) -> Tensor:
            return rotated_last(t, own.query_dim)

        found: dict[str, ProjectionWeights] = {}
        q_norm = None
        if own.query_rank:
            first = self.matrix(names.query_down, own.query_rank, spec.hidden_size)
            up = self.in_format(
                self.map_rows(projected, self.matrix(names.query_up, queries, own.query_rank, self.rows))
            )
            q_norm = self.tensors.get(f"{self.prefix}{names.query_norm}.weight", (own.query_rank,))
            found["query_up"] = replace(self._without_norm(up), q_norm=q_norm)
        else:
            first = self.map_rows(projected, self.matrix(names.q, queries, spec.hidden_size, self.rows))
        down = self.matrix(names.latent_down, own.width, spec.hidden_size)
        down = self.map_rows(lambda t: rotated_last(t, own.width), down)
        weight = self.map_rows(lambda *each: torch.cat(each), first, down)
        found["latent_in"] = self.input_projection(weight, norm)
        # Multiplied with each other's outputs, not with activations: in 16 or 32 bits.
        both = self.matrix(names.latent_up, heads * (own.plain + own.value_dim), own.rank, self.rows)
        per_head = matrices.dequantize(both, self.tensors.dtype).unflatten(0, (heads, -1))
        keys, values = per_head.split((own.plain, own.value_dim), 1)
        latent_norm = self.tensors.get(f"{self.prefix}{names.latent_norm}.weight", (own.rank,))
        found["latent_queries"] = ProjectionWeights(keys.contiguous(), k_norm=latent_norm)
        found["latent_values"] = ProjectionWeights(values.contiguous())
        o = self.matrix(names.o, spec.hidden_size, heads * own.value_dim, self.columns)
        return found | {"o": self.output_projection(o, None)}

    # -- recurrence

    def recurrence(self, own: Recurrence) -> dict[str, ProjectionWeights]:
        spec, names = self.spec, self.names.state
        assert names is not None  # a family with a recurrence names its tensors
        rows: dict[str, Unpacked] = {}
        biases: dict[str, Tensor] = {}
        for module, sections in names.inputs:
            rows |= self._sections(own, module, sections)
            if own.bias:
                sizes, parts = self._columns(own, sections)
                biases |= dict(zip(sections, self.biases_of(module, (), sizes, parts), strict=True))
        weight = self.map_rows(lambda *each: torch.cat(each), *(rows[name] for name in own.sections))
        bias = torch.cat([biases[name] for name in own.sections]) if own.bias else None
        projection = self.input_projection(weight, self.names.attention_norm, bias)
        state = read_state_weights(self.tensors, own, names, self.prefix, self.rows, self.state_keys)
        if own.scalars:
            few = torch.cat([matrices.dequantize(rows[name], torch.float32).float() for name in own.scalars])
            few_bias = torch.cat([biases[name].float() for name in own.scalars]) if own.bias else None
            scalars, scalars_bias = self.folded(few, self.names.attention_norm, few_bias)
            state = replace(state, scalars=scalars, scalars_bias=scalars_bias)
        out = self.matrix(names.out, spec.hidden_size, own.width, self.columns)
        out_bias = self.bias(names.out, spec.hidden_size) if own.bias else None
        return {"state_in": replace(projection, state=state), "state_out": self.output_projection(out, out_bias)}

    def _columns(self, own: Recurrence, sections: str) -> tuple[tuple[int, ...], tuple[Part, ...]]:
        """Return the size of sections and the rank's part of each."""
        every = own.sections | own.scalars
        sizes = tuple(every[name] for name in sections)
        return sizes, tuple(self.state_keys if name in own.keyed else self.rows for name in sections)

    def _sections(self, own: Recurrence, module: str, sections: str) -> dict[str, Unpacked]:
        """Return the rank's rows of each section of an input projection."""
        names, hidden = self.names.state, self.spec.hidden_size
        assert names is not None
        sizes, parts = self._columns(own, sections)
        # A module with only one number a head is not quantized: it decides what a state forgets.
        get = self._in_32_bits if set(sections) <= own.scalars.keys() else self.matrix
        if not names.by_key_head:

            def read(name: str, size: int, part: Part) -> Unpacked:
                return get(name, size, hidden, part)

            return dict(zip(sections, self._rows_of(read, module, (), sizes, parts), strict=True))
        # Several ranks may share a key head: each takes its part of the head's values.
        shared = Part(0, self.rows.part % (self.rows.of // own.key_parts), self.rows.of // own.key_parts)
        cuts = [WHOLE if name in own.keyed else shared for name in sections]
        widths = [size * cut.of // own.key_heads for size, cut in zip(sizes, cuts, strict=True)]
        whole = get(module, own.key_heads * sum(widths), hidden, self.state_keys)

        def take(begin: int, width: int, cut: Part, t: Tensor) -> Tensor:
            return cut_to(t.unflatten(0, (own.key_heads, -1))[:, begin : begin + width].flatten(0, 1), cut)

        begins = [sum(widths[:i]) for i in range(len(widths))]
        return {
            name: self.map_rows(partial(take, begin, width, cut), whole)
            for name, begin, width, cut in zip(sections, begins, widths, cuts, strict=True)
        }

    # -- MLP

    @property
    def mlp_norm(self) -> str:
        return self.names.attention_norm if self.spec.placement.norms == 1 else self.names.mlp_norm

    def gate_up(self, fused: str, gate: str, up: str, inter: int, switch: Tensor | None = None) -> ProjectionWeights:
        spec = self.spec
        parts, sizes = (self.rows, self.rows), (inter, inter)
        g, u = self.rows_of(fused, (gate, up), sizes, parts, spec.hidden_size)
        weight = self.map_rows(lambda *each: torch.cat(each), g, u) if _packed_both(g, u) else None
        if not isinstance(weight, PackedRows):
            weight = self.map_rows(pack.interleave_gate_up, g, u)
        bias = None
        if spec.mlp_bias:
            gb, ub = self.biases_of(fused, (gate, up), sizes, parts)
            bias = torch.cat((gb, ub)) if isinstance(weight, PackedRows) else torch.stack((gb, ub), 1).flatten()
        return replace(self.input_projection(weight, self.mlp_norm, bias), gate=switch)

    def dense(self) -> dict[str, ProjectionWeights]:
        spec, names = self.spec, self.names
        h, inter = spec.hidden_size, spec.intermediate_size
        if spec.gated:
            found = {"gate_up": self.gate_up(names.gate_up, names.gate, names.up, inter)}
        else:
            bias = self.bias(names.up, inter, self.rows) if spec.mlp_bias else None
            found = {"up": self.input_projection(self.matrix(names.up, inter, h, self.rows), self.mlp_norm, bias)}
        down = self.matrix(names.down, h, inter, self.columns)
        bias = self.bias(names.down, h) if spec.mlp_bias else None
        return found | {"down": self.output_projection(down, bias, post_norm=self.post_norm(names.mlp_post_norm))}

    def experts(self, e: Experts) -> dict[str, ProjectionWeights]:
        spec, names, get = self.spec, self.names, self.tensors.get
        h, router = spec.hidden_size, self._in_32_bits(names.router, e.count, spec.hidden_size)
        router_bias = choice = None
        if e.router_bias:
            router_bias = get(f"{self.prefix}{names.router}.bias", (e.count,), dtype=torch.float32)
        if e.choice_bias:
            choice = get(f"{self.prefix}{names.choice_bias}", (e.count,), dtype=torch.float32)
        weight, router_bias = self.folded(router, names.mlp_norm, router_bias)
        made = ExpertWeights(self.tensors, spec, names, self.prefix, self._widened, self.bias).read(e)
        kernel = "gate_up" if spec.gated else "up"
        out = {
            "router": ProjectionWeights(weight, router_bias, choice_bias=choice),
            f"experts_{kernel}": self.input_projection(made.gate_up, names.mlp_norm, made.gate_up_bias),
            "experts_down": self.output_projection(made.down, made.down_bias),
        }
        if e.shared_size and not spec.gated:
            shared_up = self.matrix(names.shared_up, e.shared_size, h, self.rows)
            out["shared_up"] = self.input_projection(shared_up, self.mlp_norm)
        elif e.shared_size:
            gate = None
            if e.shared_gate:
                switch = matrices.dequantize(self.matrix(names.shared_switch, 1, h), self.tensors.dtype)
                gate, _ = self.folded(switch, names.mlp_norm)
            out["shared_gate_up"] = self.gate_up(
                names.shared_gate_up, names.shared_gate, names.shared_up, e.shared_size, gate
            )
        if e.shared_size:
            shared_down = self.matrix(names.shared_down, h, e.shared_size, self.columns)
            out["shared_down"] = self.output_projection(shared_down, None)
        return out


def pack_layer(tensors: Tensors, spec: ModelSpec, names: TensorNames, i: int) -> LayerWeights:
    """Return the weights of the operations of `spec.layer_operations` for layer `i` of a model or a shard.

    Raises `ModelError` for a missing tensor or one of another shape."""
    layer, own = _Layer(tensors, spec, names, i), spec.recurrence
    found: dict[str, ProjectionWeights] = {}
    if layer.parts.attention:
        found |= layer.attention() if spec.latent is None else layer.latent_attention(spec.latent)
    elif layer.parts.state is not None and own is not None:
        found |= layer.recurrence(own)
    if layer.parts.mlp:
        found |= layer.dense() if spec.experts is None or not layer.parts.experts else layer.experts(spec.experts)
    return found
