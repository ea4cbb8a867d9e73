"""`load_transformers`: loads a `transformers` model with its own loader and checks its weights like any other."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from weft.engine.errors import ModelError, one_line
from weft.engine.model.checkpoint import Checkpoint
from weft.engine.model.finite import FiniteCheck
from weft.engine.model.transformers_impl.hook import NAME, hook_mixer
from weft.engine.model.transformers_impl.module import TransformersModule, pin_rope
from weft.engine.model.transformers_impl.reading import build, quiet, torch_functions
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.model.weights import HARMLESS, OTHER_HEAD, warn_of_surplus
from weft.engine.progress import notice


def load_transformers(
    spec: TransformersSpec, path: Path, *, device: torch.device, dtype: torch.dtype, max_positions: int,
    dummy_seed: int | None = None, trusted: bool = False,
) -> TransformersModule:  # fmt: skip
    """Load a model. dummy_seed: make random weights instead of reading `path`.

    Raises `ModelError` for missing weights, other shapes and values that are not finite. Prints one line about unused
    tensors."""
    attention = "eager" if spec.single else NAME
    with quiet():
        if dummy_seed is not None:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(dummy_seed)
                module = build(spec.config, dtype, device, trusted, attention)
        else:
            module = _read(path, dtype, trusted, attention).to(device)
    finite = FiniteCheck()
    for name, tensor in module.named_parameters():
        finite.add(name, tensor)
    for name, tensor in module.named_buffers():
        if tensor.is_floating_point() and tensor.numel():  # buffers may hold infinite bounds
            finite.add(name, tensor.nan_to_num(nan=float("nan"), posinf=0.0, neginf=0.0))
    finite.end(dtype)
    pin_rope(module, max_positions)
    for number, mixer in enumerate(spec.mixers if not spec.single else ()):
        hook_mixer(module.get_submodule(mixer.path), number)
    return TransformersModule(module)


def _read(path: Path, dtype: torch.dtype, trusted: bool, attention: str) -> nn.Module:
    _refuse_quantized(path)
    try:
        with torch_functions():
            module, info = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=attention, trust_remote_code=trusted, output_loading_info=True
            )
    except Exception as error:  # the loader fails in many ways
        raise ModelError(f"transformers cannot load the weights in {path}: {one_line(error)}") from None
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{path} has no tensor {_some(missing)}, which config.json requires")
    if wrong := sorted(info["mismatched_keys"]):
        name, there, asked = wrong[0]
        raise ModelError(f"{name} has shape {tuple(there)}, config.json requires {tuple(asked)}")
    warn_of_surplus(sorted(name for name in info["unexpected_keys"] if not name.endswith(HARMLESS)))
    head, config = module.get_output_embeddings(), module.config.get_text_config(decoder=True)
    tied = getattr(config, "tie_word_embeddings", False)
    if head is not None and tied and head.weight is not module.get_input_embeddings().weight:
        notice(OTHER_HEAD)
    _copy(module)
    return module


def _refuse_quantized(path: Path) -> None:
    """Raise `ModelError` for undeclared quantization: the loader would read codes as plain numbers."""
    with ExitStack() as stack:
        checkpoint = Checkpoint(path, stack)
        for file, names in checkpoint.shards().items():
            for name in names:
                kind = checkpoint.whole(name, file).dtype
                # Masks may be integers.
                if kind.itemsize == 1 if kind.is_floating_point else name.endswith("weight"):
                    word = str(kind).removeprefix("torch.")
                    raise ModelError(f"{name} is {word}, but config.json has no quantization_config")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _copy(module: nn.Module) -> None:
    """Copy the parameters: the loader may return the mapped file, which others may overwrite or truncate."""
    copies: dict[int, Tensor] = {}
    for parameter in module.parameters():
        kept = copies.setdefault(parameter.data_ptr(), parameter.data.clone())
        if kept.shape == parameter.shape:
            parameter.data = kept
