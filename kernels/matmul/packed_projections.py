"""`PackedProjections`: the projections of a layer with weights in 4 and 8 bits.

Few tokens multiply by the codes (`packed_triton`). More multiply by a copy in 16 bits, which is made in scratch memory
before each product: it takes a fixed time. Signatures are those of `mid_projections`.

Codes cannot be multiplied by the preceding norm's weight, so it multiplies the activations: the product that adds to
the stream writes them a second time, times the weight of the norm that follows. Otherwise a pass over the rows does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.kernels.common.dependent_launch import dependent_launch
from weft.kernels.common.gpu import is_hopper
from weft.kernels.formats.packed_weight import STEP, PackedWeight, Weight
from weft.kernels.matmul import heads, mid_projections, rows
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.gemm_launch import Launch, Workspace, launch_of
from weft.kernels.matmul.packed_few_config import WIDE, is_few
from weft.kernels.matmul.packed_triton import launch_packed, times_norm, widen
from weft.kernels.matmul.projections import fuses_heads, norm_fields


def choose(tokens: int, weight: PackedWeight, num_sms: int) -> GemmConfig:
    """Return the tiles of a product: all programs run at once, because a second wave costs more than partial sums."""
    columns, whole = max(8, 1 << (tokens - 1).bit_length()), weight.group == STEP
    steps = weight.codes.shape[1]
    if columns <= 32 and whole and weight.rows >= 192 * num_sms:  # e.g. gate and up of an 8B
        return GemmConfig(columns, 128, STEP, 4, 4, 8, 1, True, 3 if columns == 8 else 2, 1, ahead=4)
    wide = 64 if columns <= 64 else 128
    # As many as an SM has registers for: 80 to 128 a thread up to 16 tokens, 142 to 255 beyond.
    per_sm = {8: 4, 16: 4 if whole else 3, 32: 2, 64: 2}.get(columns, 1)
    tiles = -(-weight.rows // wide)
    split = max((s for s in (1, 2, 4, 8) if s * 4 <= steps and tiles * s <= per_sm * num_sms), default=1)
    stages = 4 if columns == 128 and split > 1 else 3
    return GemmConfig(columns, wide, STEP, stages, 8 if columns == 128 else 4, 8, split, True, per_sm, 1, ahead=4)


def reads_codes(tokens: int, weight: PackedWeight, *, few: bool = True) -> bool:
    """Return whether a product of this many tokens is faster with the codes than with a widened copy. few: whether
    `packed_few_hopper` has its epilogue."""
    if few and is_hopper() and is_few(tokens, weight):
        return True
    return tokens <= (64 if weight.group == STEP else 32)


class PackedProjections:
    """wide: scratch for the largest matrix in 16 bits. normed `[T, H]`: scratch for the stream times the norm."""

    def __init__(self, wide: Tensor, normed: Tensor) -> None:
        self._wide, self._normed = wide, normed
        self._ready: Tensor | None = None
        """The norm's weight that `normed` contains."""

    def forget(self) -> None:
        """Call after a change to the stream by another operation."""
        self._ready = None

    def _operand(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """Return the rows that the codes multiply."""
        if weight.norm is None:
            return x
        normed = self._normed[: len(x)]
        if self._ready is not weight.norm:
            times_norm(x, weight.norm, normed)
            self._ready = weight.norm
        return normed

    def qkv_project(
        self, x: Tensor, sumsq: Tensor | None, weight: Weight, bias: Tensor | None, eps: float, rotary: Tensor,
        positions: Tensor, slot_mapping: Tensor, kv: Tensor, layer: int, num_heads: int, q_norm: Tensor | None = None,
        k_norm: Tensor | None = None, *, out: Tensor, raw: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Like `projections.qkv_project`."""
        head_dim = kv.shape[5]
        own = rotary, positions, slot_mapping, kv, layer, num_heads, q_norm, k_norm
        few = WIDE % head_dim == 0 and (q_norm is None or head_dim == WIDE)
        if not isinstance(weight, PackedWeight) or not reads_codes(len(x), weight, few=few):
            return self._widened(
                mid_projections.qkv_project, weight, x, sumsq, bias, eps, *own, place=2, out=out, raw=raw, **options
            )
        if not fuses_heads(head_dim, q_norm, normed=sumsq is not None):
            if raw is None:
                raise ValueError(f"heads of {head_dim}, or their norm, need a `raw` buffer")
            self.linear_project(x, sumsq, weight, eps, bias=bias, out=raw, **options)
            return heads.place_heads(raw, eps, *own, out=out, num_tokens=options.get("num_tokens"))
        launch, rest = _launch(weight, x, options, few=few)
        if (
            launch is not None and q_norm is not None and launch.config.features < head_dim
        ):  # the norm of a head needs all of it in one tile
            launch, rest = _launch(weight, x, options, features=head_dim)
        _run(
            "qkv", launch, self._operand(x, weight), weight, out, **rest, bias=bias, rotary=rotary,
            positions=positions, slots=slot_mapping, kv=kv, layer=layer, layers=kv.shape[1], q_norm=q_norm,
            k_norm=k_norm, HQ=num_heads, HKV=kv.shape[4], D=head_dim, PAGE=kv.shape[3], **norm_fields(sumsq, eps),
        )  # fmt: skip
        return out

    def residual_project(
        self, a: Tensor, weight: Weight, x: Tensor, *, out: Tensor, sumsq: Tensor, post_norm: Tensor | None = None,
        bias: Tensor | None = None, eps: float = 0.0, centred: bool = False, raw: Tensor | None = None,
        reader: Weight | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Like `projections.residual_project`. reader: the next matrix that multiplies the stream."""
        self.forget()
        if not isinstance(weight, PackedWeight) or not reads_codes(len(a), weight):
            return self._widened(
                mid_projections.residual_project, weight, a, x, place=1, out=out, sumsq=sumsq, post_norm=post_norm,
                bias=bias, eps=eps, centred=centred, raw=raw, **options,
            )  # fmt: skip
        if centred:
            raise ValueError("packed weights are not multiplied by rows minus their mean")
        if post_norm is not None:
            if raw is None:
                raise ValueError("a norm after the GEMM needs a `raw` buffer")
            self.linear_project(a, None, weight, eps, bias=bias, out=raw, **options)
            rows.add_normed(x, raw, post_norm, eps, sumsq=sumsq)
            return out, sumsq[:1]
        launch, rest = _launch(weight, a, options)
        parts = -(-weight.rows // (WIDE if launch is None else launch.config.features))
        if sumsq.shape[0] < parts or sumsq.stride(1) != 1:
            raise ValueError(f"sumsq needs {parts} contiguous rows")
        following: dict[str, Any] = {}
        if isinstance(reader, PackedWeight) and reader.norm is not None and reads_codes(len(a), reader):
            following = {"normed": self._normed[: len(a)], "next_norm": reader.norm}
            self._ready = reader.norm
        _run(
            "residual", launch, a, weight, out, **rest, x=x, bias=bias, sumsq=sumsq, stride_sumsq=sumsq.stride(0),
            **following,
        )  # fmt: skip
        return out, sumsq[:parts]

    def gate_up_project(
        self, x: Tensor, sumsq: Tensor | None, weight: Weight, eps: float, *, activation: str = "silu",
        bias: Tensor | None = None, out: Tensor, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Like `projections.gate_up_project`."""
        if not isinstance(weight, PackedWeight) or not reads_codes(len(x), weight):
            return self._widened(
                mid_projections.gate_up_project, weight, x, sumsq, eps, place=2, activation=activation, bias=bias,
                out=out, **options,
            )  # fmt: skip
        launch, rest = _launch(weight, x, options)
        _run(
            "gate_up", launch, self._operand(x, weight), weight, out, **rest, bias=bias, ACT=activation,
            **norm_fields(sumsq, eps),
        )  # fmt: skip
        return out

    def linear_project(
        self, x: Tensor, sumsq: Tensor | None, weight: Weight, eps: float, *, activation: str = "",
        bias: Tensor | None = None, out: Tensor, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Like `projections.linear_project`."""
        if not isinstance(weight, PackedWeight) or not reads_codes(len(x), weight):
            return self._widened(
                mid_projections.linear_project, weight, x, sumsq, eps, place=2, activation=activation, bias=bias,
                out=out, **options,
            )  # fmt: skip
        launch, rest = _launch(weight, x, options)
        _run(
            "linear", launch, self._operand(x, weight), weight, out, **rest, bias=bias, ACT=activation,
            **norm_fields(sumsq, eps),
        )  # fmt: skip
        return out

    def _widened(self, project: Any, weight: Weight, *args: Any, place: int, **options: Any) -> Any:
        """Run a projection of `mid_projections` with the matrix in 16 bits as its argument number `place`."""
        if not isinstance(weight, PackedWeight):
            return project(*args[:place], weight, *args[place:], **options)
        # A product may read weights before the kernel before it ends, so no kernel here may start early.
        with dependent_launch(allowed=False):
            wide = widen(weight, self._wide[: weight.rows * weight.columns].view(weight.shape))
            return project(*args[:place], wide, *args[place:], **options)


def _launch(
    weight: PackedWeight, x: Tensor, options: dict[str, Any], features: int = 0, *, few: bool = True
) -> tuple[Launch | None, dict[str, Any]]:  # fmt: skip
    """Return the launch of a product, None for that of few tokens, and the arguments besides the operands."""
    if x.shape[1] != weight.columns or x.shape[1] % 8 or not x.is_contiguous():
        raise ValueError(f"{tuple(x.shape)} cannot be multiplied by packed {tuple(weight.shape)}")
    space: Workspace | None = options.get("space")
    rest = {"num_tokens": options.get("num_tokens"), "space": space, "num_sms": options["num_sms"]}
    if few and not features and is_hopper() and is_few(len(x), weight):
        return None, rest
    config = choose(len(x), weight, options["num_sms"])
    if features > config.features:
        config = config._replace(features=features)
    return launch_of(len(x), weight.rows, weight.columns, config, options["num_sms"]), rest


def _run(kind: str, launch: Launch | None, a: Tensor, weight: PackedWeight, out: Tensor, *, num_sms: int,
         num_tokens: Tensor | None, space: Workspace | None, **fields: Any) -> None:  # fmt: skip
    if launch is not None:
        launch_packed(kind, launch, a, weight, out, num_tokens, space, **fields)
        return
    from weft.kernels.matmul import packed_few_hopper

    packed_few_hopper.launch_few(kind, a, weight, out, num_tokens, space, num_sms=num_sms, **fields)
