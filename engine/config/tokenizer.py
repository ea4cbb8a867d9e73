"""`load_tokenizer`: loads a model's tokenizer for every part of weft, so that all give the same ids.

`read_template`: reads the chat template of `--chat-template`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.engine.config.paths import TOKENIZER_FILES
from weft.engine.errors import ConfigError, ModelError, one_line, refuse_pointer


def require_tokenizer(path: Path) -> None:
    """Raise `ModelError` if a model directory has no tokenizer, or a Git LFS pointer in its place."""
    files = [path / name for name in TOKENIZER_FILES if (path / name).exists()]
    if not files:
        raise ModelError(f"{path} has no tokenizer: it needs {TOKENIZER_FILES[0]} or {TOKENIZER_FILES[1]}")
    for file in files:
        refuse_pointer(file)


def load_tokenizer(path: Path) -> Any:
    """Return the `PreTrainedTokenizerFast` of a model directory, or a compatible object. Takes a second.

    Raises `ModelError`, one line."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    # AutoTokenizer builds the tokenizer of the class that `tokenizer_config.json` names, with other rules than those in
    # `tokenizer.json` if the name is wrong, and imports torch (2 s, 200 MB).
    if (path / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader
    try:
        hf = Loader.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises many types for broken directories
        raise ModelError(f"{path} has no usable tokenizer: {one_line(error)}") from error
    if getattr(hf, "backend_tokenizer", None) is None:
        raise ModelError(f"the tokenizer in {path} has no tokenizer.json and cannot be converted to one")
    return hf


def read_template(given: str) -> str:
    """Return the text of a chat template: of the file `given`, or `given` itself if it has Jinja's braces or several
    lines. Raises `ConfigError`."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--chat-template {given}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {given}: not UTF-8 at byte {error.start}") from None
