"""What computes a model: weft's own layers, or `transformers`' code with weft's attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft.engine.config import EngineConfig, ModelImpl
from weft.engine.errors import ModelError, UnknownArchitecture
from weft.engine.model.directory import eos_ids, read_config, read_spec
from weft.engine.model.gguf.file import INDEX
from weft.engine.model.known import architecture, refuse_undecodable
from weft.engine.model.parts import Quantization
from weft.engine.model.spec import ModelSpec


def choose_spec(config: EngineConfig) -> tuple[ModelSpec, str]:
    """The model, and in words what computes it and why. Raises `ModelError`, one line."""
    path = config.model_path
    if config.model_impl != "transformers":
        try:
            return in_format(read_spec(path), config.quantization), "weft's own layers"
        except UnknownArchitecture:
            if config.model_impl == "native":
                raise
    _refuse_gguf(path)
    raw = read_config(path)
    name = architecture(raw)
    if config.quantization is not None:
        raise ModelError(
            f"--quantization {config.quantization} needs weft's own layers, and transformers' code computes {name}"
        )
    refuse_undecodable(raw, trusted=config.trust_remote_code)
    from weft.engine.model.broad.reading import read_broad

    try:
        spec = read_broad(path, raw, eos_ids(path, raw), trusted=config.trust_remote_code)
    except ModelError as error:
        raise ModelError(f"transformers' code cannot serve {name} here: {error}") from None
    why = "as --model-impl asks" if config.model_impl == "transformers" else f"since weft has no layers of {name}"
    limit = f"; contexts of {spec.max_positions} at most: {spec.limit}" if spec.limit else ""
    return spec, f"transformers' code with weft's attention, {why}{limit}"


def in_format(spec: ModelSpec, quantization: str | None) -> ModelSpec:
    """What the checkpoint has in FP8 stays as it is."""
    if quantization is None or spec.quantization is not None:
        return spec
    return replace(spec, quantization=Quantization(quantization, at_load=True))


def widened(spec: ModelSpec) -> ModelSpec:
    """As a GPU computes it: matrices in FP8 whose activations are not quantised become 16 bits while they load, for its
    products quantise what they read."""
    if spec.quantization is None or spec.quantization.activations != "none":
        return spec
    return replace(spec, quantization=None, widened=True)


def check_known(path: Path, impl: ModelImpl = "auto", *, trusted: bool = False) -> None:
    """What can be told of a model without loading torch. Raises `ModelError`, one line."""
    try:
        if impl != "transformers":
            read_spec(path)
            return
    except UnknownArchitecture:
        if impl == "native":
            raise
    _refuse_gguf(path)
    refuse_undecodable(read_config(path), trusted=trusted)


def _refuse_gguf(path: Path) -> None:
    """Its configuration says what weft's layers need, and no more."""
    if (path / INDEX).is_file():
        raise ModelError(f"{path.name} is a GGUF file: weft's own layers compute it, not --model-impl transformers")
