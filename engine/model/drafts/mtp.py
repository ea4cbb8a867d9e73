"""The layer that predicts one more token, which some checkpoints have (multi-token prediction, `"method": "mtp"`).

DeepSeek-V3 and GLM-4.5 keep it after the last layer. It is a decoder layer like those before it. It reads a token's
embedding and the target's state after the final norm at the token before, each after a norm, through one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from weft.engine.errors import ModelError
from weft.engine.model.checkpoint import Checkpoint, Part, Tensors
from weft.engine.model.drafts.spec import Target, check_layers
from weft.engine.model.families import family_of
from weft.engine.model.finite import FiniteCheck
from weft.engine.model.layer_weights import norm_weight, pack_layer
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.kernels.matmul import weight_layout as pack


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The tensors of such a layer."""

    embedded_norm: Tensor  # `[H]`
    hidden_norm: Tensor  # `[H]`
    both: Tensor  # `[H, 2 H]`, over the normed embedding and the normed state
    layer: Weights
    """The layer as a model. Its embedding and its head have no rows if they are the target's."""

    def tensors(self) -> Sequence[Tensor]:
        return (self.embedded_norm, self.hidden_norm, self.both, *self.layer.tensors())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in self.tensors()}.values())


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """See `DraftSpec`."""

    path: Path
    layer: ModelSpec  # a model of this layer alone
    place: int  # the number of the layer in the checkpoint

    def load(self, dtype: torch.dtype, max_positions: int, device: torch.device) -> MtpWeights:
        assert device.type == "cpu"
        with ExitStack() as stack:
            return self._read(Checkpoint(self.path, stack), dtype, max_positions)

    def _read(self, checkpoint: Checkpoint, dtype: torch.dtype, max_positions: int) -> MtpWeights:
        spec, finite = self.layer, FiniteCheck()
        hidden, names = spec.hidden_size, family_of(spec.architecture).names
        prefix = names.layer.format(self.place)

        def get(name: str, shape: tuple[int, ...], part: Part, kind: torch.dtype) -> Tensor:
            # A copy, because the checkpoint's tensor is the mapped file.
            tensor = checkpoint(name, shape, part).raw.to(kind, copy=True).reshape(shape)
            finite.add(name, tensor)
            return tensor

        def own(name: str) -> Tensor:
            """Return the layer's embedding or head, or no rows."""
            if f"{prefix}{name}.weight" not in checkpoint:
                return torch.zeros(0, hidden, dtype=dtype)
            return tensors.get(f"{prefix}{name}.weight", (spec.vocab_size, hidden))

        tensors = Tensors(get, checkpoint.__contains__, dtype, checkpoint.shape_of)
        norm = norm_weight(tensors, spec, f"{prefix}shared_head.norm", hidden)
        assert norm is not None
        tables = tuple(
            pack.rotary_table(frequencies, max_positions, scale, spec.rotary_width // 2)
            for frequencies, scale in spec.rotary(max_positions)
        )
        layer = pack_layer(tensors, spec, replace(names, layer=prefix), 0)
        read = MtpWeights(
            tensors.get(f"{prefix}enorm.weight", (hidden,)),
            tensors.get(f"{prefix}hnorm.weight", (hidden,)),
            tensors.get(f"{prefix}eh_proj.weight", (hidden, 2 * hidden)),
            Weights(own("embed_tokens"), (layer,), norm, own("shared_head.head"), tables),
        )
        finite.end(dtype)
        return read


def read_mtp(path: Path, target: Target) -> MtpLayer:
    """Find the layer in the target's checkpoint. Raises `ModelError`, one line, if it has none or cannot draft."""
    spec = target.spec
    names, place = family_of(spec.architecture).names, spec.num_layers
    if not names.draft_layers:
        raise ModelError(f"{path}: {spec.architecture} has no layer for multi-token prediction that weft can use")
    check_layers(path, spec)
    with ExitStack() as stack:
        if f"{names.layer.format(place)}eh_proj.weight" not in Checkpoint(path, stack):
            raise ModelError(f"{path}: the checkpoint has no layer for multi-token prediction")
    layer = replace(spec.layers[-1], window=None)
    return MtpLayer(path, replace(spec, num_layers=1, layers=(layer,)), place)
