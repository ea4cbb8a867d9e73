"""Every part of weft loads a tokenizer by its `tokenizer.json`, so prompts have the same ids everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weft.engine.config.tokenizer import load_tokenizer
from weft.engine.demo import MODEL_PATH
from weft.engine.llm import LLM
from weft.engine.scheduling.grammars import load_tokenizer as load_vocabulary
from weft.server.text.tokenizer import Tokenizer as ServerTokenizer

TEXTS = ("Hello world, it's 12345 o'clock.", "  two\n\nlines", "naïve 😀", "<think>a</think>", "<|im_end|>")
ADDED = [AddedToken("<|endoftext|>", special=True), AddedToken("<|im_end|>", special=True)]
ADDED += [AddedToken("<think>", special=False, normalized=False), AddedToken("</think>", special=False)]


def _byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # Digits one at a time, as some models do; the class of a model's name would build another rule.
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_piece() -> Tokenizer:
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    vocabulary |= {token: 257 + i for i, token in enumerate(("▁", "H", "e", "l", "o", "▁w", "w", "r", "d"))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "w")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


@pytest.fixture(params=[_byte_level, _sentence_piece], ids=["byte-level", "sentence-piece"])
def made(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.param()
    tokenizer.add_tokens(ADDED)
    return tokenizer


@pytest.mark.parametrize(
    "name",
    ["LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer", "T5Tokenizer", None],
)
def test_the_class_in_the_config_changes_no_id(made: Tokenizer, name: str | None, tmp_path: Path) -> None:
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": name, "eos_token": "<|im_end|>", "model_max_length": 100}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    read, server = load_tokenizer(tmp_path), ServerTokenizer.load(tmp_path)
    vocabulary = load_vocabulary(tmp_path, made.get_vocab_size(), ())
    for text in TEXTS:
        want = made.encode(text).ids
        assert (read.encode(text), server.encode(text)) == (want, want), text
        assert read.decode(want) == made.decode(want, skip_special_tokens=False)
        if "<|" not in text:  # llguidance spells special tokens its own way
            assert vocabulary.decode_str(want) == made.decode(want)


def test_the_offline_class_reads_the_same_rules(tmp_path: Path) -> None:
    for file in MODEL_PATH.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((MODEL_PATH / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "GemmaTokenizer"}))
    llm = LLM(str(tmp_path), num_pages=8, progress=False)
    try:
        made = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
        assert llm.tokenizer.encode("12 words") == made.encode("12 words").ids
    finally:
        llm.engine.close()
