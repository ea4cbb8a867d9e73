"""How byte-level vocabularies split text into words before merging, by the name in `tokenizer.ggml.pre`.

Each name has the rules of the `tokenizer.json` of the models that carry it, where they are known, else llama.cpp's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Step = str | dict[str, Any]
"""A pattern whose matches become words of their own, or a pre-tokenizer as `tokenizer.json` describes it."""

GPT2: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES: Step = {**GPT2, "use_regex": False}
_DIGIT: Step = {"type": "Digits", "individual_digits": True}
_DIGITS: Step = {"type": "Digits", "individual_digits": False}
_PUNCTUATION: Step = {"type": "Punctuation", "behavior": "Contiguous"}

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(upper: str, lower: str, short: str, rest: str) -> str:
    """Return a pattern whose words start anew at an upper-case letter after a lower-case one."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return rf"{first}{upper}*{lower}+{short}|{first}{upper}+{lower}*{short}|{rest}"


_PATH_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = _by_case(_UPPER, _LOWER, "", rf"\p{{N}}|{_PATH_SIGNS}|{_SPACES}")
_GPT4O = _by_case(_UPPER, _LOWER, f"{_SHORT}?", rf"\p{{N}}{{1,3}}|{_PATH_SIGNS}|{_SPACES}")
_YOUTU = _by_case(_UPPER, _LOWER, f"{_SHORT}?", rf"\p{{N}}|{_PATH_SIGNS}|{_SPACES}")
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = r"\p{Han}+|" + _by_case(
    _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN, f"{_SHORT}?", rf"\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
)
_ASCII_SIGN_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_MARKED_LETTERS = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = rf"{_ASCII_SIGN_WORD}|{_MARKED_LETTERS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_KANJI_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_WIDE_SIGNS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with a case, as the tokenizers of DeepSeek LLM list them."""
_EAST_ASIAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff"
)
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_GROUPS_OF_THREE = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # Counted from the right: 1, 234, 567.
_SPACE_RUNS = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))


class Split(NamedTuple):
    """How text is split."""

    steps: tuple[Step, ...]  # Applied one after another, each to the words of the one before.
    nfc: bool = False  # Text is brought to Unicode's form C first.
    ignore_merges: bool = False  # A word that is a token becomes that token, regardless of merges.
    begins: bool = False  # A text starts with the beginning token unless the file says otherwise.
    byte_level: bool = True  # The vocabulary spells bytes with GPT-2's letters, else as they are.
    marks_spaces: bool = False  # Spaces become U+2581, as in SentencePiece models.


_WORDS = Split((GPT2,))
_WORDS_NFC = Split((GPT2,), nfc=True)
_WORDS_AND_DIGITS = Split((_DIGIT, GPT2))
_LLAMA = Split((_LLAMA3,), ignore_merges=True, begins=True)
_QWEN = Split((_QWEN2,), nfc=True)
_QWEN_PLAIN = Split((_QWEN2,))
_OPENAI = Split((_GPT4O,))
_DEEPSEEK = Split((r"\p{N}{1,3}", _KANJI_KANA, _DEEPSEEK3))
_LINES = Split(("[^\n]+|[\n]+",), byte_level=False, marks_spaces=True)
_BAILING = Split(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)
_AYA = Split((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))

DEFAULT = Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
"""llama.cpp's rules for a file that does not name any."""

SPLITS: dict[str, Split] = {
    "default": DEFAULT,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon-h1", "pixtral"), _LLAMA),
    **dict.fromkeys(("midm-2.0", "lfm2", "jina-v5-nano"), _LLAMA),
    "falcon3": Split((_PUNCTUATION, GPT2, _DIGIT), ignore_merges=True, begins=True),
    "minicpm5": Split((r"\p{N}{1,3}", rf"{_SHORT}|{_LETTERS}|\p{{N}}+|{_SIGNS}|{_SPACES}"), ignore_merges=True),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Split((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), Split((_LLAMA3,), ignore_merges=True)),
    "jais-2": Split((rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_SPACE_RUNS}|\s{{1,2}}(?!\S)|\s",)),
    "deepseek-llm": Split((r"[\r\n]", rf"\s?[{_CASED}]+", _WIDE_SIGNS, r"\s+$", _CJK, _DIGIT)),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK),
    "spark2_5": Split(
        (
            r"\p{N}{1,3}",
            _KANJI_KANA,
            rf"{_ASCII_SIGN_WORD}|{_MARKED_LETTERS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "youtu": Split(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
            "|[\u3105-\u312f]+|" + _KANJI_KANA,
            _YOUTU,
        ),
        ignore_merges=True,
    ),
    "falcon": Split((_PUNCTUATION, GPT2, _DIGITS, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("mpt", "olmo"), _WORDS_NFC),
    **dict.fromkeys(
        (
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "dolma",
        ),
        _WORDS,
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _WORDS_AND_DIGITS
    ),
    "command-r": Split((_DIGIT, GPT2), nfc=True),
    **dict.fromkeys(("qwen2", "f2llmv2"), _QWEN),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "megrez", "stablelm2"), _QWEN_PLAIN),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), _QWEN_PLAIN),
    "qwen35": Split(
        (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",),
        nfc=True,
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), Split((_BLOOM,))),
    "viking": Split((_BLOOM, _DIGIT)),
    "tekken": Split((_TEKKEN,), ignore_merges=True, begins=True),
    "chameleon": Split(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            "([\\t\\n]|    |  )",
            _DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        begins=True,
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _OPENAI),
    "granite-embed-multi-97m": Split((_GPT4O,), ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _AYA),
    "kimi-k2": Split((_KIMI,)),
    "superbpe": Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": Split((rf"{_SHORT}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "ufakzeka": Split((rf"{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}",)),
    "afmoe": Split((_GROUPS_OF_THREE, f"[{_EAST_ASIAN}]+", _DEEPSEEK3)),
    "laguna": Split(("[^\n]+|[\n]+", _QWEN2)),
    "exaone-moe": Split(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m", "sarvam-moe"), _LINES),
    "whitespace": Split((r"\S+",), byte_level=False),
}


def pre_tokenizer(split: Split) -> dict[str, Any]:
    """Return the pre-tokenizer of `tokenizer.json`."""
    steps = [
        {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
        if isinstance(step, str)
        else step
        for step in split.steps
    ]
    return {"type": "Sequence", "pretokenizers": steps if GPT2 in steps or not split.byte_level else [*steps, BYTES]}
