"""Lists the decoders of `transformers` from its source: importing it would load torch, taking seconds and 300 MiB."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from weft.engine.errors import ModelError, UnknownArchitecture

MAPPING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def decoders() -> dict[str, str]:
    """Return the class of each `model_type` that generates text."""
    return classes(MAPPING)


@functools.cache
def classes(mapping: str) -> dict[str, str]:
    """Return the class of each `model_type` in one of `transformers`' tables."""
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    tree = ast.parse((Path(found.origin).parent / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8"))
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == mapping:
            value = getattr(node, "value", None)
            assert isinstance(value, ast.Call)
            return dict(ast.literal_eval(value.args[0]))
    raise AssertionError(f"transformers has no {mapping}")


def refuse_undecodable(raw: dict[str, Any], *, trusted: bool) -> None:
    """Raise `ModelError`, one line, for a `config.json` that `transformers` has no decoder for.

    trusted: the model directory's own code may run."""
    name, kind = architecture(raw), model_type(raw)
    known = decoders().get(kind or "")
    if "AutoModelForCausalLM" in raw.get("auto_map", {}):
        if trusted:
            _refuse_quantized(name, raw)
            return
        if known is None:
            raise ModelError(
                f"{name} comes with its own code: --trust-remote-code runs it on this machine with your rights"
            )
    if "text_config" not in raw and name not in (known, "(none)"):
        if raw.get("is_encoder_decoder") or name.endswith("ForConditionalGeneration"):
            raise ModelError(f"{name} is an encoder-decoder: weft serves only decoders")
        if known is not None:
            raise ModelError(f"architecture {name} is not supported: it does not generate text ({known} does)")
    if known is None:
        version = importlib.metadata.version("transformers")
        raise UnknownArchitecture(
            f"architecture {name} is not supported: transformers {version} has no decoder of model_type {kind} either"
        )
    _refuse_quantized(name, raw)


def _refuse_quantized(name: str, raw: dict[str, Any]) -> None:
    if given := raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config"):
        method = (given.get("quant_method") if isinstance(given, dict) else None) or "no quant_method"
        raise ModelError(f"{name} is quantized ({method}): transformers' code serves only bf16, fp16 and fp32 here")


def model_type(raw: dict[str, Any]) -> str | None:
    """Return the configuration's model type, else the one of its architecture."""
    return raw.get("model_type") or next((t for t, name in decoders().items() if name == architecture(raw)), None)


def architecture(raw: dict[str, Any]) -> str:
    return str((raw.get("architectures") or ["(none)"])[0])
