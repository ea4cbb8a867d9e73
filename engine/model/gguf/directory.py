"""`gguf_directory`: creates a model directory for a GGUF file, with configuration and tokenizer from its metadata.

The directory is created once, in the cache; it links to the weights.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import xxhash

from weft.engine.config import cache_home
from weft.engine.errors import ModelError
from weft.engine.model.gguf.config import OFFSET_NORMS, to_config
from weft.engine.model.gguf.file import INDEX, GgufFile, name_of, parts_of
from weft.engine.model.gguf.tokenizer import end_tokens, write_tokenizer
from weft.engine.progress import notice

FORMAT = 3  # Version of the directory's contents; a change creates directories anew.


def gguf_directory(path: Path, *, tokenizer: bool = True) -> Path:
    """Return the directory of a file or of one part of a split file.

    tokenizer: False for a directory that may lack the tokenizer, which takes most of the time.

    Raises `ModelError`, one line, for a damaged, incomplete or unsupported file."""
    parts = [part.absolute() for part in parts_of(path)]
    digest = xxhash.xxh3_64(str(FORMAT).encode())
    for part in parts:
        status = part.stat()
        digest.update(f"{part} {status.st_size} {status.st_mtime_ns}".encode())
    home = cache_home() / "gguf" / digest.hexdigest()
    directory = home / name_of(path)
    if (directory / INDEX).is_file():
        return directory
    if not tokenizer:
        home /= "bare"
        directory = home / directory.name
        if (directory / INDEX).is_file():
            return directory
    notice(f"reading the metadata of {path}, once")
    file = GgufFile(path)
    config = to_config(file)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as made:
            _write(file, config, parts, Path(made), tokenizer)
            try:
                Path(made).rename(directory)
            except OSError:
                if not (directory / INDEX).is_file():  # else another process created it meanwhile
                    raise
            else:
                Path(made).mkdir()  # for the context to remove
                directory.chmod(0o755)
    except OSError as error:
        raise ModelError(
            f"cannot write {error.filename or home} ({error.strerror}): set XDG_CACHE_HOME to a writable folder"
        ) from None
    return directory


def _write(file: GgufFile, config: dict[str, Any], parts: list[Path], to: Path, tokenizer: bool) -> None:
    for part in parts:
        (to / part.name).symlink_to(part.resolve())
    (to / "config.json").write_text(json.dumps(config, indent=2))
    if ends := end_tokens(file):
        (to / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    if tokenizer and file.get("tokenizer.ggml.model") is not None:
        write_tokenizer(file, ends, to)
    architecture = file.get("general.architecture")
    index = {
        "architecture": architecture,
        "layers": config["num_hidden_layers"],
        "offset_norms": architecture in OFFSET_NORMS,
        "files": [part.name for part in parts],
        "tensors": file.tensors,
    }
    (to / INDEX).write_text(json.dumps(index))
