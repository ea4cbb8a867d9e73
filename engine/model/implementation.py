"""Chooses what computes a model: weft's own layers, or `transformers`' code with weft's attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft.engine.config import EngineConfig, ModelImpl
from weft.engine.errors import ModelError, UnknownArchitecture
from weft.engine.model.directory import eos_ids, read_config, read_spec
from weft.engine.model.encoders import is_encoder
from weft.engine.model.gguf.file import INDEX
from weft.engine.model.parts import Quantization
from weft.engine.model.spec import ModelSpec
from weft.engine.model.transformers_impl.decoders import architecture, refuse_undecodable
from weft.engine.model.vision import vision_of

OWN_LAYERS = "weft's own layers"


def choose_spec(config: EngineConfig) -> tuple[ModelSpec, str]:
    """Return the model's spec and a phrase on what computes it and why. Raises `ModelError`, one line."""
    path, lacking = config.model_path, ""
    if config.model_impl != "transformers":
        try:
            own = in_format(read_spec(path), config.quantization)
            if not (lacking := _lacking_on_gpu(own, config)):
                return own, OWN_LAYERS + _text_only(path, native=True)
        except UnknownArchitecture:
            if config.model_impl == "native":
                raise
    _refuse_gguf(path)
    raw = read_config(path)
    if is_encoder(raw):
        raise ModelError(f"{architecture(raw)} is an encoder: it does not generate text")
    name = architecture(raw)
    if config.quantization == "fp8":
        raise ModelError(
            f"--quantization {config.quantization} needs weft's own layers, but transformers' code computes {name}"
        )
    refuse_undecodable(raw, trusted=config.trust_remote_code)
    from weft.engine.model.transformers_impl.reading import read_transformers

    try:
        spec = read_transformers(path, raw, trusted=config.trust_remote_code)
    except ModelError as error:
        raise ModelError(f"transformers' code cannot serve {name} here: {error}") from None
    spec = replace(spec, eos_token_ids=eos_ids(path, raw, spec.vocab_size) or spec.eos_token_ids)
    why = lacking or f"as weft has no layers for {name}"
    if config.model_impl == "transformers":
        why = "as --model-impl requests"
    limit = f"; context limited to {spec.max_positions}: {spec.limit}" if spec.limit else ""
    how = f"one request at a time ({spec.single})" if spec.single else "with weft's attention"
    return spec, f"transformers' code {how}, {why}{limit}{_text_only(path)}"


def _lacking_on_gpu(spec: ModelSpec, config: EngineConfig) -> str:
    """Return why `transformers`' code computes a model on a GPU although weft has layers for it, or ""."""
    if spec.latent is None or config.device == "cpu" or config.model_impl == "native":
        return ""
    from weft.kernels.common.gpu import gpu  # imports torch

    return "" if gpu() is None else "as weft's layers of latent attention run on a CPU only so far"


def _text_only(path: Path, *, native: bool = False) -> str:
    """Return a phrase on the parts of a model that are not loaded, or "". native: weft's own layers compute it, which
    take images too (`runner.start.vision`)."""
    raw = {} if (path / INDEX).is_file() else read_config(path)
    if native and vision_of(raw) is not None:
        return ""
    other = {"vision_config", "audio_config"} & set(raw)
    return "; its text part alone, so requests with images or audio are refused" if other else ""


def in_format(spec: ModelSpec, quantization: str | None) -> ModelSpec:
    """Return the spec with `--quantization` applied; an FP8 checkpoint stays as it is."""
    if quantization != "fp8" or spec.quantization is not None:
        return spec
    return replace(spec, quantization=Quantization(quantization, at_load=True))


def widened(spec: ModelSpec) -> ModelSpec:
    """Return the spec for a GPU, where FP8 matrices with unquantized activations become 16 bits while loading, because
    FP8 GEMMs quantize their input."""
    if spec.quantization is None or spec.quantization.activations != "none":
        return spec
    return replace(spec, quantization=None, widened=True)


def check_known(path: Path, impl: ModelImpl = "auto", *, trusted: bool = False) -> None:
    """Check what can be checked without loading torch. Raises `ModelError`, one line."""
    try:
        if impl != "transformers":
            read_spec(path)
            return
    except UnknownArchitecture:
        if impl == "native":
            raise
    _refuse_gguf(path)
    if not is_encoder(raw := read_config(path)):
        refuse_undecodable(raw, trusted=trusted)


def _refuse_gguf(path: Path) -> None:
    """Raise `ModelError` for a GGUF file: its configuration is enough only for weft's layers."""
    if (path / INDEX).is_file():
        raise ModelError(f"{path.name} is a GGUF file: weft's own layers compute it, not --model-impl transformers")
