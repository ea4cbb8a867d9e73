"""`write_tokenizer`: writes `tokenizer.json` and `tokenizer_config.json` from the vocabulary in a file's metadata.

A vocabulary is byte-level BPE with merges (`gpt2`), SentencePiece BPE with scores (`llama`), BPE over such pieces with
merges (`gemma4`), or a Unigram model (`t5`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weft.engine.errors import ModelError
from weft.engine.model.ends import turn_ends
from weft.engine.model.gguf.file import GgufFile
from weft.engine.model.gguf.splits import DEFAULT, SPLITS, Split, pre_tokenizer
from weft.engine.progress import notice

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
_ENDS = ("</s>", "<eos>", "[EOS]")  # End an answer if they are control tokens. Elsewhere they are text, such as HTML.
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
_DEFAULTS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "t5": {"eos": 1, "unknown": 2, "padding": 0}}
"""Ids of special tokens in files that name none, by the vocabulary's model."""
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "\u2581"
_RUN = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


class _Vocabulary(NamedTuple):
    model: str
    tokens: list[str]
    types: list[int]
    file: GgufFile

    def get(self, name: str, default: Any = None) -> Any:
        return self.file.get(f"tokenizer.ggml.{name}", default)

    def special(self, name: str) -> int | None:
        """Return the id of a special token that exists."""
        found = self.get(f"{name}_token_id", _DEFAULTS.get(self.model, {}).get(name))
        return found if isinstance(found, int) and 0 <= found < len(self.tokens) else None


def _read(file: GgufFile) -> _Vocabulary:
    """Return the vocabulary with unique tokens. Raises `ModelError`."""
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise _unusable(file, "it has no tokenizer.ggml.tokens")
    if types is None:
        types = [NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) < len(tokens):
        raise _unusable(file, "tokenizer.ggml.token_type is shorter than tokenizer.ggml.tokens")
    if len(set(tokens)) < len(tokens) or "" in tokens:
        known: set[str] = set()
        for i, token in enumerate(tokens):
            tokens[i] = token if token and token not in known else f"[UNREACHABLE_{i}]"
            known.add(tokens[i])
    return _Vocabulary(str(file.get("tokenizer.ggml.model")), tokens, types, file)


def _unusable(file: GgufFile, why: str) -> ModelError:
    return ModelError(f"cannot build a tokenizer from the metadata of {file.path}: {why}")


def end_tokens(file: GgufFile) -> list[int]:
    """Return the ids that end an answer: those that the metadata name, then those known by their text."""
    if not isinstance(file.get("tokenizer.ggml.tokens"), list):
        named = (file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        return list(dict.fromkeys(token for token in named if isinstance(token, int)))
    vocabulary = _read(file)
    named = (vocabulary.special(name) for name in ("eos", "eot", "eom"))
    there = turn_ends(set(vocabulary.tokens))
    there |= {t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=False) if kind == CONTROL and t in _ENDS}
    known = (i for i, token in enumerate(vocabulary.tokens) if token in there)
    return list(dict.fromkeys((*(token for token in named if token is not None), *known)))


def write_tokenizer(file: GgufFile, ends: Iterable[int], to: Path) -> None:
    """Write both files to the directory `to`. ends: ids that end an answer. Raises `ModelError`."""
    vocabulary = _read(file)
    if vocabulary.model == "gpt2":
        parts, begins = _byte_level(vocabulary)
    elif vocabulary.model in ("llama", "gemma4"):
        parts, begins = _sentence_piece(vocabulary)
    elif vocabulary.model == "t5":
        parts, begins = _unigram(vocabulary)
    else:
        raise _unusable(file, f"vocabularies of the kind {vocabulary.model[:40]!r} are not supported")
    special = {i for name in _NAMED.values() if (i := vocabulary.special(name)) is not None} | set(ends)
    whole: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(vocabulary, special),
    }
    whole |= {"post_processor": _post_processor(vocabulary, begins), **parts}
    (to / "tokenizer.json").write_bytes(msgspec.json.encode(whole))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, there in _NAMED.items():
        if (token := vocabulary.special(there)) is not None:
            config[f"{name}_token"] = vocabulary.tokens[token]
    templates = {"default": file.get(_TEMPLATE)}
    for key in file.keys_under(f"{_TEMPLATE}."):
        templates[key.removeprefix(f"{_TEMPLATE}.")] = file.get(key)
    known = {name: template for name, template in templates.items() if template}
    if known.keys() == {"default"}:
        config["chat_template"] = known["default"]
    elif known:
        config["chat_template"] = [{"name": name, "template": template} for name, template in known.items()]
    (to / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))


def _added(vocabulary: _Vocabulary, special: set[int]) -> list[dict[str, Any]]:
    """Return the tokens that are found in text before it is split: control tokens and user-defined ones."""
    phi3 = vocabulary.model == "llama" and vocabulary.file.get("general.architecture") == "phi3"
    plain = {"single_word": False, "lstrip": False, "normalized": False}
    return [
        {
            "id": i, "content": token, **plain,
            "rstrip": phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),  # These models lose spaces there.
            "special": kind != USER_DEFINED or i in special,
        }
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=False))
        if (kind in (CONTROL, UNKNOWN) or i in special) or (kind == USER_DEFINED and token.strip(_SPACE))
    ]  # fmt: skip


def _post_processor(vocabulary: _Vocabulary, begins: bool) -> dict[str, Any] | None:
    """Return what adds the beginning and end tokens."""
    begin = vocabulary.special("bos") if vocabulary.get("add_bos_token", begins) else None
    end = vocabulary.special("eos") if vocabulary.get("add_eos_token", vocabulary.model == "t5") else None
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    processors: list[dict[str, Any]] = [byte_level] if vocabulary.model == "gpt2" else []
    if begin is not None or end is not None:
        tokens = vocabulary.tokens

        def around(letter: str, type_id: int) -> list[dict[str, Any]]:
            made: list[dict[str, Any]] = [{"Sequence": {"id": letter, "type_id": type_id}}]
            if begin is not None:
                made.insert(0, {"SpecialToken": {"id": tokens[begin], "type_id": type_id}})
            if end is not None:
                made.append({"SpecialToken": {"id": tokens[end], "type_id": type_id}})
            return made

        used = {i for i in (begin, end) if i is not None}
        processors.append({
            "type": "TemplateProcessing", "single": around("A", 0), "pair": around("A", 0) + around("B", 1),
            "special_tokens": {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in sorted(used)},
        })  # fmt: skip
    return {"type": "Sequence", "processors": processors} if processors else None


def _bpe(vocabulary: _Vocabulary, merges: list[Any], **options: Any) -> dict[str, Any]:
    unknown = vocabulary.special("unknown") if options.get("byte_fallback") else None
    return {
        "type": "BPE", "dropout": None, "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "vocab": dict(zip(vocabulary.tokens, range(len(vocabulary.tokens)), strict=True)),
        "merges": merges, **options,
    }  # fmt: skip


def _merges(vocabulary: _Vocabulary) -> list[Any]:
    """Return the file's merges. Raises `ModelError` if one needs a token that does not exist."""
    merges = vocabulary.get("merges")
    if not isinstance(merges, list):
        raise _unusable(vocabulary.file, "it has no tokenizer.ggml.merges")
    known, pairs, joined = set(vocabulary.tokens), list[Any](), _joined(vocabulary)
    for merge in merges:
        space = merge.find(" ", 1) if isinstance(merge, str) else -1
        pair = (merge[:space], merge[space + 1 :]) if space > 0 else ("", "")
        if not (pair[0] in known and pair[1] in known and pair[0] + pair[1] in known):
            raise _unusable(vocabulary.file, f"the merge {merge!r:.80} is not of its tokens")
        pairs.append(merge if joined else pair)
    return pairs


def _byte_level(vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """Return the parts of `tokenizer.json`, and whether texts begin with the beginning token unless the file says."""
    split = _split(vocabulary)
    model = _bpe(vocabulary, _merges(vocabulary), ignore_merges=split.ignore_merges)
    if not split.byte_level:
        return _pieces(vocabulary, model, split), split.begins
    return {
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": pre_tokenizer(split),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }, split.begins


def _split(vocabulary: _Vocabulary) -> Split:
    name, file = vocabulary.get("pre"), vocabulary.file.path.name
    if name is None:
        notice(
            f"{file} does not say how it splits words (tokenizer.ggml.pre): using llama.cpp's default rules; numbers, "
            "punctuation and runs of spaces may become other tokens than in training"
        )
        return DEFAULT
    if name in SPLITS:
        return SPLITS[name]
    notice(
        f"{file} splits words like {name!r}, which is unknown here: using GPT-2's rules; numbers, punctuation, "
        "contractions, runs of spaces and text without spaces may become other tokens than in training"
    )
    return SPLITS["gpt-2"]


def _pieces(vocabulary: _Vocabulary, model: dict[str, Any], split: Split, *, prefix: bool = False) -> dict[str, Any]:
    """Return the parts of `tokenizer.json` for a vocabulary that is not byte-level. prefix: text gets a first space."""
    model |= {"fuse_unk": True, "byte_fallback": BYTE in vocabulary.types}
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    decoders: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if split.marks_spaces:
        steps.append(_RUN)
        decoders.insert(0, {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "})
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": pre_tokenizer(split) if split.steps else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _sentence_piece(vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """See `_byte_level`."""
    tokens, types = vocabulary.tokens, vocabulary.types
    for i, kind in enumerate(types):  # Files spell runs of spaces as spaces, unlike all other pieces.
        if kind == USER_DEFINED and " " in tokens[i] and not tokens[i].strip(" "):
            tokens[i] = _SPACE * len(tokens[i])
    model = _bpe(
        vocabulary,
        _merges(vocabulary) if vocabulary.get("merges") else _merges_by_score(vocabulary),
        byte_fallback=True,
    )
    if vocabulary.model == "gemma4":
        return _pieces(vocabulary, model, SPLITS["gemma4"]), False  # The chat template writes the beginning token.
    prefix = bool(vocabulary.get("add_space_prefix", True))
    return _pieces(vocabulary, model, Split((), byte_level=False, marks_spaces=True), prefix=prefix), True


def _joined(vocabulary: _Vocabulary) -> bool:
    """Return whether merges can be strings with a space in the middle, which are read faster than pairs."""
    return not any(" " in token for token in vocabulary.tokens)


def _merges_by_score(vocabulary: _Vocabulary) -> list[Any]:
    """Return every pair of pieces that form a piece, in the order of these: user-defined ones, then by score."""
    tokens, types, scores = vocabulary.tokens, vocabulary.types, vocabulary.get("scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise _unusable(vocabulary.file, "it has neither tokenizer.ggml.merges nor enough tokenizer.ggml.scores")
    formed = [i for i, kind in enumerate(types[: len(tokens)]) if kind in (NORMAL, USER_DEFINED) and len(tokens[i]) > 1]
    formed.sort(key=lambda i: (types[i] != USER_DEFINED, -scores[i] if types[i] != USER_DEFINED else 0))
    known, pairs, joined = set(tokens), list[Any](), _joined(vocabulary)
    for i in formed:
        token = tokens[i]
        for cut in range(len(token) - 1, 0, -1):
            if (left := token[:cut]) in known and (right := token[cut:]) in known:
                pairs.append(f"{left} {right}" if joined else (left, right))
    return pairs


def _unigram(vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """See `_byte_level`."""
    scores = vocabulary.get("scores")
    if not isinstance(scores, list) or len(scores) < len(vocabulary.tokens):
        raise _unusable(vocabulary.file, "it has too few tokenizer.ggml.scores")
    spaces = {
        "replacement": _SPACE,
        "prepend_scheme": "always" if vocabulary.get("add_space_prefix", True) else "never",
    }
    metaspace = {"type": "Metaspace", **spaces, "split": True}
    map_of_characters = vocabulary.get("precompiled_charsmap")
    steps: list[dict[str, Any]] = []
    if map_of_characters:
        table = base64.b64encode(bytes(n & 0xFF for n in map_of_characters)).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if vocabulary.get("remove_extra_whitespaces", False):
        steps += [
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    pieces = [[token, float(score)] for token, score in zip(vocabulary.tokens, scores, strict=False)]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "model": {
            "type": "Unigram", "unk_id": vocabulary.special("unknown"), "vocab": pieces,
            "byte_fallback": BYTE in vocabulary.types,
        },
    }, False  # fmt: skip
