"""The demo model's tokenizer: 2,048 tokens, which are whole words, and bytes to spell every other word with.

It is a byte-level BPE without merges. So a word that nobody has seen is spelled letter by letter, and the model can
copy it, turn it round or sort it. Digits and punctuation marks stand alone, so that numbers line up; a word takes the
space before it. Characters outside ASCII are single bytes: the model's answers then hold characters that are split over
tokens, which is what a streaming detokenizer must survive.
"""

import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from weft.tools.demo import skills
from weft.tools.demo.functions import DESCRIPTION_CHARACTERS, offer
from weft.tools.demo.words import NAMES, WORDS

VOCAB_SIZE = 2048
BEGIN, END, PAD, SYSTEM, USER, ASSISTANT, TOOL = (
    "<|begin|>",
    "<|end|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
)
SPECIAL_TOKENS = (BEGIN, END, PAD, SYSTEM, USER, ASSISTANT, TOOL)
BEGIN_ID, END_ID, PAD_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID, TOOL_ID = range(7)

PIECE_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s+"
"""How text is cut into pieces; each is one token or its bytes (Oniguruma syntax)."""

CHAT_TEMPLATE = (
    # the functions offered, a line each: what `functions.offer` writes
    "{%- macro offer() -%}{{ 'Tools:' }}"
    "{%- for tool in tools -%}"
    "{%- set function = tool['function'] if 'function' in tool else tool -%}"
    "{%- set parameters = function['parameters'] or {} -%}"
    "{%- set properties = parameters['properties'] or {} -%}"
    "{%- set required = parameters['required'] if 'required' in parameters else properties -%}"
    "{{ '\\n' + function['name'] + '(' }}"
    "{%- set told = namespace(any=false) -%}"
    "{%- for name, schema in properties | items if name in required -%}"
    "{{ (', ' if told.any else '') + name + ': ' + (schema['type'] if schema['type'] is string else 'any') }}"
    "{%- set told.any = true -%}"
    "{%- endfor -%}"
    "{{ '): ' + (function['description'] or '').strip().split('\\n')[0][:DESCRIPTION] }}"
    "{%- endfor -%}{%- endmacro -%}"
    "{{- bos_token -}}"
    "{%- set system = messages and messages[0]['role'] in ['system', 'developer'] -%}"
    "{%- if tools and not system -%}{{ '<|system|>' + offer() + '<|end|>' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'developer', 'user', 'assistant', 'tool'] -%}"
    "{{ raise_exception('the roles of this model are system, user, assistant and tool, not ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|' + ('system' if message['role'] == 'developer' else message['role']) + '|>' + (message['content'] or '') }}"
    "{%- if tools and system and loop.first -%}{{ '\\n\\n' + offer() }}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- set function = call['function'] if 'function' in call else call -%}"
    "{%- set arguments = function['arguments'] -%}"
    "{{ '\\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\\n{\"name\": ' + function['name'] | tojson + ', \"arguments\": ' }}"
    "{{ (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
).replace("DESCRIPTION", str(DESCRIPTION_CHARACTERS))

_ASCII_PIECE = re.compile(r" ?[A-Za-z]+| ?[!-/:-@\[-`{-~]|\s+")
_SAMPLE_SIZE = 60_000


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary (as in GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in characters)
    return characters | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def vocabulary(count: int) -> list[str]:
    """The `count` pieces of text that are worth a token: words of the lists, then what the corpus says most often."""
    rng = Random("tokenizer 0")
    counts: Counter[str] = Counter()
    for i in range(_SAMPLE_SIZE):
        example = skills.draw(skills.SKILLS[i % len(skills.SKILLS)], rng)
        for text in (example.prompt, example.answer[:300], *(message["content"] for message in example.messages)):
            counts.update(_ASCII_PIECE.findall(text[-2000:]))
        if example.tools:
            counts.update(_ASCII_PIECE.findall(offer(example.tools)))
    chosen = dict.fromkeys(form for word in (*WORDS, *NAMES) for form in (word, " " + word))
    for piece, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(piece) > 1 and piece[2:].islower() | (not piece[2:]) and len(chosen) < count:
            chosen[piece] = None
    return list(chosen)


def tokenizer_json() -> dict[str, Any]:
    """The content of `tokenizer.json`."""
    characters = byte_characters()
    alphabet = sorted(characters.values())
    words = vocabulary(VOCAB_SIZE - len(SPECIAL_TOKENS) - len(alphabet))
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(characters[byte] for byte in word.encode()) for word in words)]
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
            "ignore_merges": True,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [],
        },
    }


def write_tokenizer(folder: Path, max_tokens: int) -> None:
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
    tokenizer = json.dumps(tokenizer_json(), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(tokenizer + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
