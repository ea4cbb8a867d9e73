"""`StateWeights`: the weights of a recurrence besides its projections, and how a rank's part of them is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.engine.model.checkpoint import Part, Tensors
from weft.engine.model.families.family import StateNames
from weft.engine.model.parts import Recurrence


@dataclass(frozen=True, slots=True)
class StateWeights:
    """Weights of a recurrence, as the functions in `kernels.reference.states` read them."""

    conv: Tensor  # [C, taps], in the serving dtype.
    conv_bias: Tensor | None = None  # [C].
    scalars: Tensor | None = None  # [S, H] float32: the projection to `Recurrence.scalars`, norm folded in.
    scalars_bias: Tensor | None = None  # [S] float32.
    a_log: Tensor | None = None  # [heads] float32.
    time_bias: Tensor | None = None  # [heads] float32.
    skip: Tensor | None = None  # [heads] float32.
    norm: Tensor | None = None  # [value_dim] or [width] float32.


def read_state_weights(
    tensors: Tensors, own: Recurrence, names: StateNames, prefix: str, rows: Part, keys: Part
) -> StateWeights:
    """Read a rank's weights except its projections. rows, keys: the rank's part of value heads and of key heads."""

    def vector(name: str, size: int, part: Part) -> Tensor | None:
        return tensors.get(f"{prefix}{name}", (size,), part, torch.float32) if name else None

    sections = {"x": own.heads} if own.kind == "short_conv" else dict(list(own.sections.items())[:3])
    parts = [keys if name in own.keyed else rows for name in sections]
    whole = sum(size * part.of for size, part in zip(sections.values(), parts, strict=True))
    every = tensors.get(f"{prefix}{names.conv}.weight", (whole, 1, own.taps)).flatten(1)
    bias = tensors.get(f"{prefix}{names.conv}.bias", (whole,)) if own.conv_bias else None
    spans, end = [], 0
    for size, part in zip(sections.values(), parts, strict=True):
        spans.append(slice(end + part.part * size, end + (part.part + 1) * size))
        end += size * part.of
    whole_norm = own.kind == "mamba2"
    return StateWeights(
        torch.cat([every[span] for span in spans]),
        None if bias is None else torch.cat([bias[span] for span in spans]),
        a_log=vector(names.a_log, own.heads, rows),
        time_bias=vector(names.time_bias, own.heads, rows),
        skip=vector(names.skip, own.heads, rows),
        norm=vector(names.norm, own.width if whole_norm else own.value_dim, rows if whole_norm else Part()),
    )
