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
from weft.engine.errors import ModelError, one_line
from weft.engine.model.ends import turn_ends
from weft.engine.model.gguf.config import OFFSET_NORMS, to_config
from weft.engine.model.gguf.file import INDEX, GgufFile, name_of, parts_of
from weft.engine.progress import notice

FORMAT = 2  # Version of the directory's contents; a change creates directories anew.
_ENDS = frozenset(("</s>", "<eos>", "[EOS]"))  # Names that end a text if they are control tokens.
_CONTROL = 3
_TEMPLATE = "tokenizer.chat_template"
_GPT2_SPLITS = ("default", "gpt-2", "mpt", "olmo", "phi-2", "jais", "dolma", "trillion", "superbpe")
_IGNORE_MERGES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
"""These map a word that is a token to that token, ignoring merges, and begin a text with the beginning token."""


def gguf_directory(path: Path) -> Path:
    """Return the directory of a file or of one part of a split file.

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
    notice(f"reading the metadata of {path}, once")
    file = GgufFile(path)
    config = to_config(file)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as made:
            _write(file, config, parts, Path(made))
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


def _write(file: GgufFile, config: dict[str, Any], parts: list[Path], to: Path) -> None:
    for part in parts:
        (to / part.name).symlink_to(part.resolve())
    (to / "config.json").write_text(json.dumps(config, indent=2))
    if ends := _ends(file):
        (to / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    if file.get("tokenizer.ggml.model") is not None:
        _write_tokenizer(file, parts[0], to)
    architecture = file.get("general.architecture")
    index = {
        "architecture": architecture,
        "layers": config["num_hidden_layers"],
        "offset_norms": architecture in OFFSET_NORMS,
        "files": [part.name for part in parts],
        "tensors": file.tensors,
    }
    (to / INDEX).write_text(json.dumps(index))


def _ends(file: GgufFile) -> list[int]:
    named = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = file.get("tokenizer.ggml.tokens") or [], file.get("tokenizer.ggml.token_type") or []
    ends = [int(token) for token in named if token is not None]
    there = turn_ends(set(tokens))  # metadata name few of them, and some files give them the wrong type
    control = [i for i, (t, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL and t in _ENDS]
    return list(dict.fromkeys((*ends, *control, *(i for i, token in enumerate(tokens) if token in there))))


def _write_tokenizer(file: GgufFile, first: Path, to: Path) -> None:
    """Write the tokenizer as `transformers` reads it, adding what it ignores: ignored merges, all chat templates."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.set_verbosity_error()
    split = file.get("tokenizer.ggml.pre", "default")
    byte_level = file.get("tokenizer.ggml.model") == "gpt2"
    if byte_level:
        _warn_of_split(file.path, split)
    try:
        hf = PreTrainedTokenizerFast.from_pretrained(str(first.parent), gguf_file=first.name, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for unusable metadata
        reason = one_line(error, 160)
        raise ModelError(f"cannot build a tokenizer from the metadata of {file.path}: {reason}") from None
    begin = file.get("tokenizer.ggml.bos_token_id")
    ignore = byte_level and split in _IGNORE_MERGES
    if ignore:
        hf.backend_tokenizer.model.ignore_merges = True
    if begin is not None and file.get("tokenizer.ggml.add_bos_token", ignore or not byte_level):
        _begin_with(hf, int(begin))
    templates = {"default": file.get(_TEMPLATE)}
    for key in file.keys_under(f"{_TEMPLATE}."):
        templates[key.removeprefix(f"{_TEMPLATE}.")] = file.get(key)
    there = {name: template for name, template in templates.items() if template}
    hf.chat_template = (there["default"] if there.keys() == {"default"} else there) if there else None
    hf.save_pretrained(str(to))


def _begin_with(hf: Any, token: int) -> None:
    from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

    name = hf.backend_tokenizer.id_to_token(token)
    template = TemplateProcessing(
        single=f"{name}:0 $A:0", pair=f"{name}:0 $A:0 {name}:1 $B:1", special_tokens=[(name, token)]
    )
    hf.backend_tokenizer.post_processor = Sequence([ByteLevel(trim_offsets=False), template])


def _warn_of_split(path: Path, split: str) -> None:
    known: tuple[str, ...] = _GPT2_SPLITS
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return
    if split not in (*known, *GGUF_PRE_TOKENIZER_SPLITS):
        notice(
            f"{path.name} splits words like {split!r}, which is unknown here: using GPT-2's rules, so prompts "
            "may be tokenized slightly differently than in training"
        )
