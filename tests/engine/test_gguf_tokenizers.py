"""Tokenizers of GGUF files: each name of a way to split words gives the ids that the model's `tokenizer.json` gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from weft.engine.errors import ModelError
from weft.engine.model.gguf.file import GgufFile
from weft.engine.model.gguf.splits import SPLITS, pre_tokenizer
from weft.engine.model.gguf.tokenizer import end_tokens, write_tokenizer
from weft.server.text.gguf_tokenizer import GgufTokenizer

KNOWN_TO_LLAMA_CPP = [
    "a.x-4.0", "afmoe", "bailingmoe", "bailingmoe2", "bloom", "chameleon", "chatglm-bpe", "codeshell", "cohere2moe",
    "command-r", "dbrx", "deepseek-coder", "deepseek-llm", "deepseek-r1-qwen", "deepseek-v3", "default", "exaone",
    "exaone-moe", "exaone4", "f2llmv2", "falcon", "falcon-h1", "falcon3", "gemma4", "gigachat", "glm4", "glm5",
    "gpt-2", "gpt-4o", "gpt3-finnish", "granite-docling", "granite-embed-multi-311m", "granite-embed-multi-97m",
    "grok-2", "hunyuan", "hunyuan-dense", "hy_v4", "jais", "jais-2", "jina-de", "jina-es", "jina-v1-en",
    "jina-v2-code", "jina-v2-de", "jina-v2-es", "jina-v5-nano", "joyai-llm", "kanana2", "kimi-k2", "kormo", "laguna",
    "lfm2", "llada-moe", "llama-bpe", "llama-v3", "llama3", "llama4", "megrez", "mellum", "mellum2", "midm-2.0",
    "minerva-7b", "minicpm5", "minimax-m2", "modern-bert", "mpt", "olmo", "phi-2", "pixtral", "poro-chat", "qwen2",
    "qwen35", "refact", "roberta-bpe", "sarvam-moe", "seed-coder", "smaug-bpe", "smollm", "solar-open", "spark2_5",
    "stablelm2", "starcoder", "superbpe", "talkie", "tekken", "tiny_aya", "trillion", "ufakzeka", "viking",
    "whitespace", "youtu",
]  # fmt: skip

AWKWARD = [
    "Hello world, it's 12345 o'clock; DON'T stop, we'LL see 1234567890.",
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 1,000,000.00 ½ ² ١٢٣ Ⅻ ①",
    "",
    " ",
    "  two spaces\n\n\tand a tab \r\n\r\n   three\n \n  \n\n\n end   ",
    " " * 40 + "x" + "\t" * 9 + "y" + "\n" * 7,
    "naïve café Zoë ÅNGSTRÖM ﬁ ß İstanbul",
    "cafe\u0301 n\u0303 A\u030angstro\u0308m हिन्दी में ไทย",
    "北京欢迎你！東京、ひらがなカタカナ。한국어 텍스트, 12月31日",
    "🙂👍🏽👨‍👩‍👧‍👦 🇩🇪!!! ¡¿? «»„“ … — ~~~ $€£ ^^ `code` <=> += |x|",
    "def f(x):\n    if x >= 10:\n        return x**2  # it's\n\n\nfor(;;){i++;}\n/* a//b */ http://a.b/c?d=e&f=1\n",
    "CamelCaseWord snake_case_word XMLHttpRequest iPhone15ProMax v1.2.3-rc4 a1b2c3 I'm you'Re 'tis O'Neill's",
    "\u00a0nbsp\u2003em\u3000wide\u200bzero\ufeffbom",
    "(parens)[brackets]{braces} /path/to/file\n/next \"quotes\" ''two'' --flag=value #tag @name",
    "привет мир, ёлка! Γειά σου Κόσμε שלום مرحبا",
]  # fmt: skip

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
DIGIT, DIGITS = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Digits(individual_digits=False)
PUNCTUATION = pre_tokenizers.Punctuation("contiguous")


def _splits(*patterns: Any) -> list[Any]:
    return [pre_tokenizers.Split(Regex(p), "isolated") if isinstance(p, str) else p for p in patterns] + [BYTES]


PUBLISHED: dict[str, tuple[list[Any], bool]] = {
    "gpt-2": ([WORDS], False),
    "mpt": ([WORDS], True),
    "olmo": ([WORDS], True),
    "smollm": ([DIGIT, WORDS], False),
    "starcoder": ([DIGIT, WORDS], False),
    "refact": ([DIGIT, WORDS], False),
    "command-r": ([DIGIT, WORDS], True),
    "llama-bpe": (_splits(LLAMA3), False),
    "dbrx": (_splits(LLAMA3), False),
    "smaug-bpe": (_splits(LLAMA3), False),
    "qwen2": (_splits(QWEN2), True),
    "deepseek-r1-qwen": (_splits(QWEN2), False),
    "qwen35": (_splits(QWEN35), True),
    "falcon": ([PUNCTUATION, WORDS, DIGITS, *_splits("[0-9][0-9][0-9]")[:1]], False),
    "falcon3": ([PUNCTUATION, WORDS, DIGIT], False),
    "tekken": (_splits(TEKKEN), False),
    "gpt-4o": (_splits(O200K), False),
    "llama4": (_splits(O200K), False),
    "tiny_aya": (_splits(r"\d{1,3}(?=(?:\d{3})*\b)", O200K), False),
    "deepseek-coder": (_splits("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT), False),
    "deepseek-v3": (_splits(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3), False),
    "seed-coder": (_splits(SEED), False),
    "bailingmoe": (_splits(BAILING), False),
    "superbpe": (_splits(r"\p{N}+", r"(?=(\d{3})+(?!\d))"), False),
}
"""Pre-tokenizers of published `tokenizer.json` files, and whether they normalize to NFC."""


def test_every_name_of_llama_cpp_is_known() -> None:
    assert not set(KNOWN_TO_LLAMA_CPP) - SPLITS.keys()


def _write(folder: Path, architecture: str = "llama", **keys: Any) -> GgufFile:
    """Write a file with only a vocabulary. keys: of `tokenizer.ggml.`, or whole ones with dots."""
    writer = gguf.GGUFWriter(str(folder / "it.gguf"), architecture)
    for name, value in keys.items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(folder / "it.gguf")


def _made(folder: Path, **keys: Any) -> Tokenizer:
    file = _write(folder, **keys)
    write_tokenizer(file, end_tokens(file), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _published(name: str) -> Tokenizer:
    """Train a small vocabulary with a model's own rules."""
    steps, nfc = PUBLISHED[name]
    made = Tokenizer(models.BPE())
    if nfc:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, show_progress=False, special_tokens=["<s>"]
    )
    made.train_from_iterator(AWKWARD * 3, trainer)
    return made


def _vocabulary(made: Tokenizer) -> dict[str, Any]:
    state = json.loads(made.to_str())["model"]
    return {
        "model": "gpt2", "tokens": sorted(state["vocab"], key=state["vocab"].get),
        "merges": [" ".join(pair) for pair in state["merges"]], "bos_token_id": 0, "add_bos_token": False,
    }  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_are_those_of_the_models_own_rules(name: str, tmp_path: Path) -> None:
    want = _published(name)
    got = _made(tmp_path, pre=name, **_vocabulary(want))
    for text in AWKWARD:
        assert got.encode(text).ids == want.encode(text).ids, text
        pieces = [[piece for piece, _ in t.pre_tokenizer.pre_tokenize_str(text)] for t in (got, want)]
        assert pieces[0] == pieces[1], text
        assert got.decode(got.encode(text).ids) == want.decode(want.encode(text).ids)


@pytest.mark.parametrize("name", KNOWN_TO_LLAMA_CPP)
def test_every_way_to_split_keeps_all_of_a_text(name: str) -> None:
    made = Tokenizer(models.BPE({"a": 0}, []))
    state = {**json.loads(made.to_str()), "pre_tokenizer": pre_tokenizer(SPLITS[name])}
    own = Tokenizer.from_str(json.dumps(state)).pre_tokenizer
    for text in AWKWARD:
        spans = [span for _, span in own.pre_tokenize_str(text)]
        assert all(a < b for a, b in spans)
        assert {i for a, b in spans for i in range(a, b)} == set(range(len(text)))


def test_groups_of_digits_count_from_the_right() -> None:
    state = json.loads(Tokenizer(models.BPE({"a": 0}, [])).to_str())
    for name in ("afmoe", "tiny_aya", "superbpe"):
        own = Tokenizer.from_str(json.dumps({**state, "pre_tokenizer": pre_tokenizer(SPLITS[name])})).pre_tokenizer
        assert [piece for piece, _ in own.pre_tokenize_str("1234567")] == ["1", "234", "567"], name


def test_names_that_are_not_known_say_what_can_differ(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    vocabulary = _vocabulary(_published("gpt-2"))
    unknown = _made(tmp_path, pre="brand-new", **vocabulary)
    said = capfd.readouterr().err
    assert "it.gguf splits words like 'brand-new', which is unknown here: using GPT-2's rules; numbers, " in said
    assert "may become other tokens than in training" in said
    known = _made(tmp_path, pre="gpt-2", **vocabulary)
    assert capfd.readouterr().err == ""
    assert all(unknown.encode(text).ids == known.encode(text).ids for text in AWKWARD)
    absent = _made(tmp_path, **vocabulary)
    assert "does not say how it splits words (tokenizer.ggml.pre): using llama.cpp's default" in capfd.readouterr().err
    default = _made(tmp_path, pre="default", **vocabulary)
    assert all(absent.encode(text).ids == default.encode(text).ids for text in AWKWARD)
    assert absent.pre_tokenizer.pre_tokenize_str("1234")[0][0] == "123"


def test_control_tokens_are_special_and_user_defined_ones_are_whole(tmp_path: Path) -> None:
    vocabulary = _vocabulary(_published("qwen2"))
    first = len(vocabulary["tokens"])
    vocabulary["tokens"] += ["<|im_end|>", "<think>", "   ", "<｜tool▁call｜>", "[PAD1]", "<unk>"]
    types = [3] + [1] * (first - 1) + [3, 4, 4, 3, 5, 2]
    made = _made(tmp_path, pre="qwen2", token_type=types, **vocabulary)
    ids = made.encode("<think>a</think><|im_end|>x   <｜tool▁call｜>[PAD1]").ids
    assert ids.count(first + 1) == ids.count(first) == ids.count(first + 2) == ids.count(first + 3) == 1
    assert first + 4 not in ids, "an unused token is text"
    special = {i for i, token in made.get_added_tokens_decoder().items() if token.special}
    assert special == {0, first, first + 3, first + 5}
    assert made.decode([first + 1, first], skip_special_tokens=True) == "<think>"
    assert made.get_vocab_size() == first + 6


def _pieces(*more: tuple[str, float, int]) -> dict[str, Any]:
    """Return a SentencePiece vocabulary: bytes, letters, then words in the order of their scores."""
    entries = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{i:02X}>", 0.0, 6) for i in range(256))]
    words = ["he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "▁▁", "▁▁▁"]
    entries += [(word, -float(i), 1) for i, word in enumerate(words)]
    entries += [(letter, -1e3 - i, 1) for i, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz")]
    tokens, scores, types = map(list, zip(*entries, *more, strict=True))
    return {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}


def _names(made: Tokenizer, text: str) -> list[str]:
    return [str(made.id_to_token(i)) for i in made.encode(text, add_special_tokens=False).ids]


def test_pieces_merge_by_score_after_a_first_space(tmp_path: Path) -> None:
    made = _made(tmp_path, **_pieces())
    assert _names(made, "hello world") == ["▁hello", "▁world"]
    assert _names(made, " hello") == ["▁", "▁hello"]
    assert _names(made, "é!") == ["▁", "<0xC3>", "<0xA9>", "<0x21>"]
    assert _names(made, "hello</s>hello") == ["▁hello", "</s>", "▁hello"]
    assert made.encode("hello").tokens[0] == "<s>", "added without any key, as llama.cpp does"
    for text in ("hello world", "  hello", "é 北"):
        assert made.decode(made.encode(text, add_special_tokens=False).ids) == text
    made = _made(tmp_path, add_space_prefix=False, add_bos_token=False, add_eos_token=True, **_pieces())
    assert _names(made, "hello world") == ["hello", "▁world"]
    assert made.encode("hello").tokens == ["hello", "</s>"]


def test_user_defined_runs_of_spaces_merge_first(tmp_path: Path) -> None:
    runs = [("  " + " " * i, -1e9, 4) for i in range(3)]
    plain = {**_pieces(), "add_space_prefix": False}
    keep = [i for i, token in enumerate(plain["tokens"]) if token not in ("▁▁", "▁▁▁")]
    for column, name in enumerate(("tokens", "scores", "token_type")):
        plain[name] = [plain[name][i] for i in keep] + [run[column] for run in runs]
    made = _made(tmp_path, **plain)
    assert _names(made, "a    hello") == ["a", "▁▁▁▁", "hello"]
    assert _names(made, "a   hello hello") == ["a", "▁▁▁", "hello", "▁hello"]


def test_spaces_after_the_control_tokens_of_phi_3_are_lost(tmp_path: Path) -> None:
    more = ("<|user|>", 0.0, 3), ("<|endoftext|>", 0.0, 3)
    made = _made(tmp_path, **_pieces(*more))
    assert len(_names(made, "<|user|>\n")) > 1, "only of these models"
    made = _made(tmp_path, architecture="phi3", **_pieces(*more))
    assert _names(made, "<|user|> \n hello<|endoftext|> ") == ["<|user|>", "▁hello", "<|endoftext|>", "▁▁"]


def test_pieces_with_merges_of_their_own_use_these(tmp_path: Path) -> None:
    vocabulary = {**_pieces(), "model": "gemma4", "merges": ["h e", "l l", "he ll", "hell o", "▁ ▁"]}
    made = _made(tmp_path, bos_token_id=1, add_bos_token=True, **vocabulary)
    assert _names(made, "hello hello\n\n") == ["hello", "▁", "hello", "<0x0A>", "<0x0A>"]


def test_a_unigram_vocabulary_takes_the_likeliest_pieces(tmp_path: Path) -> None:
    pieces = ["<pad>", "</s>", "<unk>", "▁hello", "▁", "h", "e", "l", "o", "hell", "▁world"]
    scores = [0.0, 0.0, 0.0, -3.0, -2.0, -5.0, -5.0, -5.0, -5.0, -8.0, -4.0]
    made = _made(tmp_path, model="t5", tokens=pieces, scores=scores, token_type=[3, 3, 2] + [1] * 8)
    assert made.encode("hello world").tokens == ["▁hello", "▁world", "</s>"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": None}, "it has no tokenizer.ggml.tokens"),
        ({"merges": None}, "it has no tokenizer.ggml.merges"),
        ({"merges": ["a bc"]}, "the merge 'a bc' is not of its tokens"),
        ({"merges": ["abc"]}, "the merge 'abc' is not of its tokens"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type is shorter than tokenizer.ggml.tokens"),
        ({"model": "rwkv"}, "vocabularies of the kind 'rwkv' are not supported"),
        ({"model": "llama", "merges": None}, "neither tokenizer.ggml.merges nor enough tokenizer.ggml.scores"),
        ({"model": "t5"}, "too few tokenizer.ggml.scores"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_one_line(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"], **change}
    with pytest.raises(ModelError, match=f"cannot build a tokenizer from the metadata of .*it.gguf: .*{words}"):
        _made(tmp_path, **{name: value for name, value in keys.items() if value is not None})


def test_tokens_that_are_empty_or_there_twice_keep_their_ids(tmp_path: Path) -> None:
    made = _made(tmp_path, model="gpt2", pre="gpt-2", tokens=["a", "", "b", "a", "ab"], merges=["a b"])
    assert made.encode("ab").ids == [4]
    assert made.encode("ba").ids == [2, 0]
    assert made.get_vocab_size() == 5


# -- the server's tokenizer

TEMPLATES = [
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "{%- set ns = namespace(n=0) %}{%- for m in messages %}{%- if m.role == 'system' %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m | tojson }}{{ tools | tojson(indent=2) }}{%- endfor %}{{ dict(a=1) }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls is defined }}{% endif %}{% endfor %}",
    "{{ strftime_now('%Y') }}{{ bos_token }}{{ pad_token is defined }}{{ documents }}{{ extra }}",
]  # fmt: skip
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "  naïve 🙂 "},
    {"role": "assistant", "content": "Yes & no.", "reasoning": "hm", "tool_calls": None},
]


def _served(folder: Path, **more: Any) -> tuple[GgufTokenizer, PreTrainedTokenizerFast]:
    _made(folder, pre="qwen2", eos_token_id=1, padding_token_id=2, **_vocabulary(_published("qwen2")), **more)
    return GgufTokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_give_the_text_that_transformers_gives(template: str, tmp_path: Path) -> None:
    ours, theirs = _served(tmp_path, **{"tokenizer.chat_template": template})
    for arguments in (
        {}, {"add_generation_prompt": True}, {"tools": [{"type": "function", "function": {"name": "<f>"}}]},
        {"extra": 3, "documents": [{"title": "a", "text": "b"}]},
    ):  # fmt: skip
        texts = [t.apply_chat_template(CONVERSATION, tokenize=False, **arguments) for t in (ours, theirs)]
        assert texts[0] == texts[1]
    assert ours.chat_template == theirs.chat_template == template
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert [ours.bos_token_id, ours.eos_token, ours.pad_token, ours.unk_token] == [
        theirs.bos_token_id, theirs.eos_token, theirs.pad_token, theirs.unk_token
    ]  # fmt: skip


def test_a_final_message_is_continued_as_transformers_does(tmp_path: Path) -> None:
    ours, theirs = _served(tmp_path, **{"tokenizer.chat_template": TEMPLATES[0]})
    texts = [t.apply_chat_template(CONVERSATION, tokenize=False, continue_final_message=True) for t in (ours, theirs)]
    assert texts[0] == texts[1]
    assert texts[0].endswith("Yes & no.")


def test_one_of_several_templates_is_chosen_as_transformers_does(tmp_path: Path) -> None:
    keys = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools {{ tools | length }}"}
    ours, theirs = _served(tmp_path, **keys)
    assert ours.chat_template == theirs.chat_template
    for arguments in ({}, {"tools": [{"type": "function"}]}, {"chat_template": "default", "tools": [{}]}):
        texts = [t.apply_chat_template(CONVERSATION, tokenize=False, **arguments) for t in (ours, theirs)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "{{ namespace(_a=1) }}", "{% for %}",
    ],
)  # fmt: skip
def test_templates_that_transformers_refuses_are_refused(template: str, tmp_path: Path) -> None:
    for tokenizer in _served(tmp_path, **{"tokenizer.chat_template": template}):
        with pytest.raises(Exception, match=r"."):
            tokenizer.apply_chat_template(CONVERSATION, tokenize=False)


def test_ids_are_those_of_the_loader_of_transformers(tmp_path: Path) -> None:
    ours, theirs = _served(tmp_path, token_type=[3] + [1] * 899)
    for text in [*AWKWARD, "<s>a<s>"]:
        assert ours.backend_tokenizer.encode(text).ids == theirs.encode(text)


def test_neither_a_server_nor_the_directory_imports_transformers(tmp_path: Path) -> None:
    _served(tmp_path)
    (tmp_path / "gguf.json").write_text("{}")
    code = (
        "import sys; from pathlib import Path; import weft.server.daemon.worker, weft.engine.model.gguf.directory;"
        "from weft.server.text.tokenizer import Tokenizer; Tokenizer.load(Path(sys.argv[1]));"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_added_tokens_flags(tmp_path: Path) -> None:
    made = _made(tmp_path, **_pieces(("<tool>", 0.0, 4)))
    tool = {token.content: token for token in made.get_added_tokens_decoder().values()}["<tool>"]
    assert tool == AddedToken("<tool>", normalized=False, special=False)
