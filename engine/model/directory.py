"""`read_spec`: reads the configuration of a Hugging Face model directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.engine.config.tokenizer import read_template
from weft.engine.errors import ModelError, refuse_pointer
from weft.engine.model.ends import EndTokens, end_tokens
from weft.engine.model.families import family_of
from weft.engine.model.gguf.file import INDEX
from weft.engine.model.quantization import of_modelopt_file
from weft.engine.model.spec import ModelSpec

_OFF = frozenset({"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"})  # Null means none.
WRONG_KIND = (AttributeError, OverflowError, TypeError, ValueError)
"""Errors of reading a value that is a string, a list or infinite where another kind is expected."""
MODELOPT = "hf_quant_config.json"  # File in which ModelOpt describes its quantization, if not in `config.json`.


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a model directory. Raises `ModelError`, one line."""
    if not path.parent.is_dir():
        raise ModelError(
            f"no model directory at {path.parent}: give a Hugging Face model directory, ORG/NAME, or 'demo'"
        )
    refuse_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: it is not a Hugging Face model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """Read `config.json`, with the quantization from ModelOpt's own file if needed. Raises `ModelError`, one line."""
    config = read_json(path / "config.json")
    if not config.get("quantization_config") and (path / MODELOPT).is_file():
        config["quantization_config"] = of_modelopt_file(read_json(path / MODELOPT))
    return config


def ends_of(
    path: Path, config: dict[str, Any], vocab_size: int | None = None, chat_template: str | None = None
) -> EndTokens:
    """Collect the end tokens of a model directory with this `config.json`, see `end_tokens`. chat_template: that of
    `EngineConfig`."""
    file = path / "generation_config.json"
    generation = read_json(file) if file.exists() else {}
    source = "GGUF file" if (path / INDEX).is_file() else file.name
    template = None if chat_template is None else read_template(chat_template)
    return end_tokens(path, config, generation, source, vocab_size, template)


def eos_ids(path: Path, config: dict[str, Any], vocab_size: int | None = None) -> tuple[int, ...]:
    """Return the end tokens of a model directory with this `config.json`; none outside a vocabulary of `vocab_size`."""
    return tuple(ends_of(path, config, vocab_size).sources)


def _without_nulls(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without keys that are null, which means absent except in `_OFF`."""
    return {
        key: _without_nulls(value) if isinstance(value, dict) and key.endswith("config") else value
        for key, value in config.items()
        if value is not None or key in _OFF
    }


def read_spec(path: Path) -> ModelSpec:
    """Read `config.json` and `generation_config.json` of a model directory.

    Raises `ModelError`, one line, for a missing or malformed file or an unsupported architecture or option."""
    config = read_config(path)
    try:
        family = family_of((config.get("architectures") or ["(none)"])[0])
        spec = family.spec(_without_nulls(config))
    except KeyError as error:
        raise ModelError(f"{path / 'config.json'} lacks {error.args[0]}") from None
    except WRONG_KIND as error:
        raise ModelError(f"{path / 'config.json'} has a value of the wrong kind: {error}") from None
    return replace(spec, eos_token_ids=eos_ids(path, config, spec.vocab_size))
