"""`read_spec`: reads the configuration of a Hugging Face model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.engine.errors import ModelError, refuse_pointer
from weft.engine.model.families import family_of
from weft.engine.model.quantization import of_modelopt_file
from weft.engine.model.spec import ModelSpec

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
    except (OSError, ValueError) as error:
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


def eos_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the end tokens of a model directory with this `config.json`."""
    # generation_config.json has precedence: Llama 3 lists its end-of-turn token only there.
    ids = config.get("eos_token_id")
    generation = path / "generation_config.json"
    if generation.exists():
        ids = read_json(generation).get("eos_token_id", ids)
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)


def read_spec(path: Path) -> ModelSpec:
    """Read `config.json` and `generation_config.json` of a model directory.

    Raises `ModelError`, one line, for a missing or malformed file or an unsupported architecture or option."""
    config = read_config(path)
    family = family_of((config.get("architectures") or ["(none)"])[0])
    try:
        return family.spec(config, eos_ids(path, config))
    except KeyError as error:
        raise ModelError(f"{path / 'config.json'} lacks {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path / 'config.json'} has a value of the wrong kind: {error}") from None
