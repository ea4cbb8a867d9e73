"""The demo model's tokenizer: a byte-level BPE of at most 2,048 tokens, learned from the corpus.

Digits and punctuation marks stand alone, so that numbers line up; a word takes the space before it. Characters outside
ASCII are left as single bytes: the model's answers then hold characters that are split over tokens, which is what a
streaming detokenizer must survive.
"""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from . import skills
from .words import NAMES, WORDS

VOCAB_SIZE = 2048
BEGIN, END, PAD, SYSTEM, USER, ASSISTANT = (
    "<|begin|>",
    "<|end|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
SPECIAL_TOKENS = (BEGIN, END, PAD, SYSTEM, USER, ASSISTANT)
BEGIN_ID, END_ID, PAD_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(6)

PIECE_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s+"
"""How text is cut before BPE merges bytes inside each piece (Oniguruma syntax)."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] in ['system', 'user', 'assistant'] %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% else %}"
    "{{ raise_exception('the roles of this model are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_ASCII_PIECE = re.compile(r" ?[A-Za-z]+")
_SAMPLE_SIZE = 20_000
_RARE = 4
"""A piece seen fewer times in the sample earns no merges of its own (made-up words)."""


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary (as in GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in characters)
    return characters | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def piece_counts(seed: int = 0) -> Counter[str]:
    """How much each ASCII piece of the corpus weighs. The words of the lists weigh the most, in all their forms."""
    rng = Random(f"tokenizer {seed}")
    counts: Counter[str] = Counter()
    for i in range(_SAMPLE_SIZE):
        example = skills.draw(skills.SKILLS[i % len(skills.SKILLS)], rng)
        for text in (example.prompt, example.answer[:300], *(message["content"] for message in example.messages)):
            counts.update(_ASCII_PIECE.findall(text[-2000:]))
    weights = Counter({piece: min(n, 200) for piece, n in counts.items() if n >= _RARE})
    for word in (*WORDS, *NAMES):
        weights[word] = weights[" " + word] = 1000
    for word in WORDS:
        weights[word.upper()] = weights[" " + word.upper()] = 30
    return weights


def learn_merges(weights: Counter[str], count: int) -> list[tuple[str, str]]:
    """The `count` most useful merges, by byte-pair encoding. Ties go to the pair that sorts first."""
    characters = byte_characters()
    pieces = [([characters[byte] for byte in piece.encode()], weight) for piece, weight in sorted(weights.items())]
    pairs: Counter[tuple[str, str]] = Counter()
    homes: dict[tuple[str, str], set[int]] = {}

    def note(index: int, sign: int) -> None:
        symbols, weight = pieces[index]
        for pair in pairwise(symbols):
            pairs[pair] += sign * weight
            homes.setdefault(pair, set()).add(index)

    for index in range(len(pieces)):
        note(index, 1)
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if pairs[best] <= 0:
            break
        merges.append(best)
        for index in sorted(homes[best]):
            note(index, -1)
            pieces[index] = (_merge(pieces[index][0], best), pieces[index][1])
            note(index, 1)
        del pairs[best]
    return merges


def _merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def tokenizer_json(seed: int = 0) -> dict[str, Any]:
    """The content of `tokenizer.json`."""
    alphabet = sorted(byte_characters().values())
    merges = learn_merges(piece_counts(seed), VOCAB_SIZE - len(SPECIAL_TOKENS) - len(alphabet))
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    cut = {"type": "Split", "pattern": {"Regex": PIECE_PATTERN}, "behavior": "Isolated", "invert": False}
    begin = {"SpecialToken": {"id": BEGIN, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token} | flags for i, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, second],
            "special_tokens": {BEGIN: {"id": BEGIN, "ids": [BEGIN_ID], "tokens": [BEGIN]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(merge) for merge in merges],
        },
    }


def write_tokenizer(folder: Path, max_tokens: int, seed: int = 0) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, with the chat template."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": max_tokens,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    tokenizer = json.dumps(tokenizer_json(seed), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(tokenizer + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
