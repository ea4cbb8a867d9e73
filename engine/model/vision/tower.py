"""`Tower`: a model's vision tower and projector, computed by `transformers`' own code; `load_tower` loads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from weft.engine.errors import ModelError, one_line
from weft.engine.model.finite import FiniteCheck
from weft.engine.model.transformers_impl.reading import quiet
from weft.engine.model.vision.family import Normalisation, Vision


class Tower:
    """Encodes one image per call, so that its embeddings depend on no other image."""

    def __init__(self, vision: Vision, parts: nn.ModuleDict, normalise: Normalisation, dtype: torch.dtype) -> None:
        self.vision, self._parts, self._normalise, self._dtype = vision, parts, normalise, dtype
        if self.device.type == "cuda":
            vision.on_gpu(parts)

    @property
    def device(self) -> torch.device:
        return next(self.tensors()).device

    def encode(self, pixels: bytearray, shapes: Sequence[tuple[int, int]], grid: tuple[int, ...]) -> Tensor:
        """Return embeddings `[n, 1 + deepstack, H]`. pixels: uint8 RGB rows of all tiles, back to back."""
        flat = torch.frombuffer(pixels, dtype=torch.uint8).to(self.device)
        parts = flat.split([3 * height * width for height, width in shapes])
        tiles = [
            self._normalise(part.view(*shape, 3)).to(self._dtype) for part, shape in zip(parts, shapes, strict=True)
        ]
        return self.vision.embed(self._parts, tiles, grid)

    def tensors(self) -> Iterator[Tensor]:
        yield from self._parts.parameters()
        yield from self._parts.buffers()

    @property
    def num_bytes(self) -> int:
        return sum({t.data_ptr(): t.nbytes for t in self.tensors()}.values())


def load_tower(
    vision: Vision, path: Path, dtype: torch.dtype, device: torch.device, dummy_seed: int | None = None
) -> Tower:
    """Load the tower of a model directory. dummy_seed: make random weights instead. Raises `ModelError` for missing
    weights, other shapes and values that are not finite."""
    normalise = Normalisation(path, vision)
    with quiet():
        try:
            # The language model has no layers here: weft computes it.
            config = _without_layers(AutoConfig.from_pretrained(path))
            if dummy_seed is not None:
                return Tower(vision, _random(vision, config, dtype, device, dummy_seed), normalise.to(device), dtype)
            model, info = AutoModelForImageTextToText.from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True
            )
            parts = vision.parts(model.eval())
        except Exception as error:  # the loader fails in many ways
            raise ModelError(f"transformers cannot load the vision tower in {path}: {one_line(error)}") from None
    inside = {id(tensor) for tensor in parts.parameters()}
    named = {name for name, tensor in model.named_parameters() if id(tensor) in inside}
    if missing := sorted(named & set(info["missing_keys"])):
        raise ModelError(f"{path} has no tensor {missing[0]}, which config.json requires")
    if wrong := sorted(info["mismatched_keys"]):
        raise ModelError(f"{wrong[0][0]} has shape {tuple(wrong[0][1])}, config.json requires {tuple(wrong[0][2])}")
    del model
    finite = FiniteCheck()
    for name, parameter in parts.named_parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.clone()  # the loader may return the mapped file, which others may overwrite
        finite.add(name, parameter)
    finite.end(dtype)
    return Tower(vision, parts.to(device), normalise.to(device), dtype)


def _random(vision: Vision, config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> nn.ModuleDict:
    """Return random parts. Their weights keep the size of activations about the same from layer to layer."""
    config.get_text_config().vocab_size = 8
    for name in ("image_token_id", "image_token_index", "pad_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        parts = vision.parts(AutoModelForImageTextToText.from_config(config, dtype=dtype).eval())
        for parameter in parts.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    return parts


def _without_layers(config: Any) -> Any:
    text = config.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # that of the language model
    return config
