"""GGUF files: each serves like the checkpoint that it was made from; damaged or unknown files are one-line errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import Kind, ggml_tensors, tensors_of, write_gguf
from harness import GREEDY, Harness
from safetensors.torch import save_file
from tiny import save_tiny
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, ModelError
from weft.engine.llm import LLM
from weft.engine.memory.model_id import model_id
from weft.engine.model.directory import read_spec
from weft.engine.model.gguf import blocks
from weft.engine.model.gguf.file import architecture_of, choose
from weft.engine.model.hub import find_model, missing
from weft.engine.model.implementation import check_known, choose_spec
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights, load_weights

Made = Callable[..., Path]

FILES = {
    "llama2": "llama", "llama3.1": "llama", "mistral": "llama", "deepseek-llm": "llama", "mixtral": "llama",
    "qwen2": "qwen2", "qwen3": "qwen3", "qwen2-moe": "qwen2moe", "qwen3-moe": "qwen3moe", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3": "gemma3", "phi3": "phi3", "phi4": "phi3", "olmo2": "olmo2", "granite": "granite",
    "smollm3": "smollm3",
}  # fmt: skip
"""what llama.cpp calls the architecture of a family"""
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2-moe": {"mlp_only_layers": []},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 16},
}
"""of the tiny checkpoints: values that a file cannot express"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny(family, tmp_path_factory.mktemp("made"), **CHANGES.get(family, {}))
        return made[family]

    return get


def _weights(spec: ModelSpec, path: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(spec, path, device=torch.device("cpu"), dtype=dtype, max_positions=256)


def _tensors(weights: Weights) -> list[torch.Tensor]:
    products = [product for layer in weights.layers for _, product in sorted(layer.items())]
    own = (weights.embedding, weights.norm, weights.lm_head, *weights.rotary)
    return [t for t in (*own, *(t for product in products for t in product.tensors())) if t is not None]


def _rope_tensors(family: str, path: Path) -> dict[str, np.ndarray]:
    """The tensors that the converter writes in addition to the weights."""
    rope = json.loads((path / "config.json").read_text()).get("rope_parameters") or {}
    if family == "llama3.1":
        ((inv_freq, _),) = read_spec(path).rotary(256)
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, 2 * len(inv_freq), 2) / (2 * len(inv_freq)))
        return {"rope_freqs.weight": (plain / inv_freq).numpy()}
    if rope.get("rope_type") == "longrope":
        kinds = ("long", "short")
        return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in kinds}
    return {}


@pytest.mark.parametrize("family", FILES)
def test_a_file_becomes_the_model_of_its_checkpoint(
    checkpoint: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    path = checkpoint(family)
    file = write_gguf(path, tmp_path / "it.gguf", FILES[family], extra=_rope_tensors(family, path))
    directory = find_model(str(file))
    assert missing(directory) == []
    want, got = read_spec(path), read_spec(directory)
    # ropes and ends are expressed differently; frequencies are compared below
    like = {"ropes": (), "eos_token_ids": (), "dtype": "", "architecture": ""}
    if family == "mistral":  # a file of the architecture llama has no window of its own; the test's has
        assert got.windows == want.windows
    assert replace(got, **like) == replace(want, **like)
    for ours, theirs in zip(_tensors(_weights(got, directory)), _tensors(_weights(want, path)), strict=True):
        if family.startswith(("gemma", "llama3")):  # one added to norms and subtracted again; factors of frequencies
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16])
def test_tokens_are_those_of_the_checkpoint(checkpoint: Callable[[str], Path], tmp_path: Path, kind: Kind) -> None:
    path = checkpoint("llama3.1")
    if kind == Kind.F16:  # the part that the file can hold
        rounded = {n: torch.from_numpy(t).half().float() for n, t in tensors_of(path).items()}
        (tmp_path / "half").mkdir()
        (tmp_path / "half" / "config.json").write_text((path / "config.json").read_text())
        save_file(rounded, tmp_path / "half" / "model.safetensors")
    file = write_gguf(path, tmp_path / "it.gguf", "llama", kind=kind, extra=_rope_tensors("llama3.1", path))
    outputs = []
    for model in (path if kind == Kind.F32 else tmp_path / "half", find_model(str(file))):
        harness = Harness(model, num_pages=60, page_size=4)
        for n in (9, 61):
            harness.add(np.random.default_rng(n).integers(3, 199, n), max_tokens=12, ignore_eos=True, **GREEDY)
        harness.run()
        outputs.append(harness.tokens)
        harness.engine.close()
    assert outputs[0] == outputs[1]


BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_have_the_values_of_the_library(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, size = blocks.block_of(kind)
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (6, 2, size), dtype=np.uint8)
    # Every half-precision scale of a block is a small number: the last byte of one is its exponent.
    places = {"Q2_K": (81, 83), "Q3_K": (109,), "Q6_K": (209,), "Q4_1": (1, 3), "Q5_1": (1, 3)}
    for place in places.get(kind, (1, 3) if kind in ("Q4_K", "Q5_K") else (1,)):
        raw[..., place] = rng.integers(0x20, 0x30, raw.shape[:2])
    want = torch.from_numpy(gguf.dequantize(raw.reshape(6, -1), Kind[kind]))
    assert want.isfinite().all()
    monkeypatch.setattr(blocks, "CPU_CHUNK", 3 * numbers)  # several rounds, the last one smaller
    for dtype in (torch.float32, torch.bfloat16):
        got = blocks.dequantize(torch.from_numpy(raw.reshape(6, -1)), kind, dtype)
        assert torch.equal(got, want.to(dtype))
        assert got.shape == (6, 2 * numbers)


def test_a_rank_reads_its_rows_and_the_blocks_of_its_columns(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = checkpoint("llama2")
    kinds = {n: Kind.Q8_0 for n, t in ggml_tensors(path, "llama").items() if t.ndim > 1 and t.shape[-1] % 32 == 0}
    directory = find_model(str(write_gguf(path, tmp_path / "it.gguf", "llama", kinds=kinds)))
    spec = read_spec(directory)
    whole = _weights(spec, directory).layers[1]
    parts = [_weights(spec.shard(rank, 4), directory).layers[1] for rank in range(4)]  # half a block of o's columns
    for name, dim in (("o", 1), ("down", 1), ("gate_up", 0)):
        assert torch.equal(torch.cat([part[name].weight for part in parts], dim), whole[name].weight)
    assert not torch.equal(whole["o"].weight, _weights(read_spec(path), path).layers[1]["o"].weight)


def test_staging_gives_the_same_numbers(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = find_model(str(write_gguf(checkpoint("mixtral"), tmp_path / "it.gguf", "llama", kinds={
        "blk.1.ffn_up_exps.weight": Kind.Q8_0, "token_embd.weight": Kind.Q4_0, "blk.0.attn_q.weight": Kind.BF16,
    })))  # fmt: skip
    spec, options = read_spec(directory), {"device": torch.device("cpu"), "max_positions": 8}
    plain, staged = (
        load_weights(spec, directory, dtype=torch.bfloat16, staged=staged, **options) for staged in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(_tensors(plain), _tensors(staged), strict=True))


def test_a_split_file_is_named_by_any_of_its_parts(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = checkpoint("qwen3")
    write_gguf(path, tmp_path / "big.gguf", "qwen3", parts=3)
    parts = sorted(tmp_path.glob("big-0000?-of-00003.gguf"))
    assert len(parts) == 3
    found = {find_model(str(part)) for part in parts}
    (directory,) = found
    assert directory.name == "big"
    want = _tensors(_weights(read_spec(path), path))
    assert all(
        torch.equal(a, b) for a, b in zip(_tensors(_weights(read_spec(directory), directory)), want, strict=True)
    )
    parts[1].unlink()
    assert "missing: big-00002-of-00003.gguf" in _refusal(parts[0])
    assert missing(directory) == [parts[1].name]


def _load(file: Path) -> None:
    directory = find_model(str(file))
    _weights(read_spec(directory), directory)


def _refusal(file: Path) -> str:
    with pytest.raises(ModelError) as error:
        _load(file)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("left", [0, 3, 30, 1000, -100_000, -1])
def test_a_truncated_file_is_a_one_line_error(checkpoint: Callable[[str], Path], tmp_path: Path, left: int) -> None:
    file = write_gguf(checkpoint("qwen2"), tmp_path / "it.gguf", "qwen2")
    file.write_bytes(file.read_bytes()[:left])
    assert "it.gguf is not a complete GGUF file" in _refusal(file)


def test_a_damaged_header_is_a_one_line_error(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    file = write_gguf(checkpoint("qwen2"), tmp_path / "it.gguf", "qwen2")
    whole, rng = file.read_bytes(), np.random.default_rng(5)
    for i in range(60):
        spoilt = bytearray(whole)
        for place in rng.integers(0, 600, 3):
            spoilt[place] = rng.integers(256)
        other = tmp_path / f"{i}.gguf"
        other.write_bytes(spoilt)
        with suppress(ModelError):  # anything else would be a traceback
            _load(other)


def test_unsupported_features_are_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = checkpoint("qwen2")
    writer = gguf.GGUFWriter(str(tmp_path / "rwkv.gguf"), "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = _refusal(tmp_path / "rwkv.gguf")
    assert "architecture rwkv7 are not supported; supported: gemma, gemma2" in message
    assert architecture_of(tmp_path / "rwkv.gguf") == "rwkv7"
    file = write_gguf(path, tmp_path / "it.gguf", "qwen2", extra={"blk.3.attn_norm.weight": np.ones(64, np.float32)})
    directory = find_model(str(file))
    index = json.loads((directory / "gguf.json").read_text())
    (directory / "gguf.json").write_text(json.dumps({**index, "tensors": {}}))
    assert "no tensor for model.embed_tokens.weight" in _refusal(file)
    with pytest.raises(ConfigError, match="no model directory at"):
        find_model(str(tmp_path / "nowhere.gguf"))


def test_a_file_does_not_run_through_other_code(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = find_model(str(write_gguf(checkpoint("qwen2"), tmp_path / "it.gguf", "qwen2")))
    check_known(directory)
    for refusing in (
        lambda: check_known(directory, "transformers"),
        lambda: choose_spec(EngineConfig(model=str(directory), model_impl="transformers")),
    ):
        with pytest.raises(ModelError, match="it is a GGUF file: weft's own layers compute it"):
            refusing()


def test_unused_tensors_are_reported(
    checkpoint: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    extra = {"blk.3.attn_norm.weight": np.ones(64, np.float32)}
    directory = find_model(str(write_gguf(checkpoint("qwen2"), tmp_path / "it.gguf", "qwen2", extra=extra)))
    _weights(read_spec(directory), directory)
    assert "1 tensor(s) of the checkpoint are not used" in capfd.readouterr().err


def test_an_inspected_file_needs_no_tokenizer(
    checkpoint: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    metadata = _metadata(_byte_level(), **{"ggml.model": "gpt2", "ggml.pre": "llama-bpe", "ggml.eos_token_id": 1})
    file = write_gguf(checkpoint("llama2"), tmp_path / "it.gguf", "llama", tokenizer=metadata)
    bare = find_model(str(file), tokenizer=False)
    assert not (bare / "tokenizer.json").exists()
    assert find_model(str(file), tokenizer=False) == bare
    assert capfd.readouterr().err.count("reading the metadata of") == 1
    whole = find_model(str(file))
    assert (whole / "tokenizer.json").exists()
    assert (whole.name, read_spec(whole)) == (bare.name, read_spec(bare))
    assert find_model(str(file), tokenizer=False) == whole


def test_a_file_is_read_once_and_again_when_it_changes(
    checkpoint: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(checkpoint("qwen2"), tmp_path / "it.gguf", "qwen2")
    first = find_model(str(file))
    assert "reading the metadata of" in capfd.readouterr().err
    assert find_model(str(file)) == first
    assert capfd.readouterr().err == ""
    harness = Harness(first, num_pages=8)
    engine, resolved = harness.engine, harness.engine.resolved
    assert engine.config.model_name == "it"
    of = (engine.config, resolved.kv, engine.spec, resolved.compute_dtype, resolved.max_model_len)
    before = model_id(*of)
    write_gguf(checkpoint("qwen2"), file, "qwen2", kind=Kind.F16)
    assert find_model(str(file)) != first
    assert model_id(*of) != before, "pages of the old weights are not those of the new"


# -- tokenizers

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "Hello world, it's 12345 o'clock.", "  two spaces\n\n\tand a tab ", "naïve café 北京 🙂", "<|eot_id|> in the text",
    "", " ", "The the THE", "don't stop; hello hello",
]  # fmt: skip
CORPUS = ["hello world it's the clock and the naïve café", "don't stop hello the world 12345"] * 4
SPECIAL = ["<|begin|>", "<|eot_id|>"]


def _byte_level() -> Tokenizer:
    from tokenizers.trainers import BpeTrainer

    made = Tokenizer(models.BPE(ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet))
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return made


def _sentence_piece() -> Tokenizer:
    from tokenizers.trainers import BpeTrainer

    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    made.train_from_iterator(CORPUS, BpeTrainer(vocab_size=330, special_tokens=pieces, show_progress=False))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def _metadata(made: Tokenizer, **more: Any) -> dict[str, Any]:
    state = json.loads(made.to_str())["model"]
    vocab = sorted(state["vocab"], key=state["vocab"].get)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in state["merges"]]
    return {"ggml.tokens": vocab, "ggml.merges": merges, **more}


def _served(checkpoint: Callable[[str], Path], tmp_path: Path, metadata: dict[str, Any]) -> Path:
    return find_model(str(write_gguf(checkpoint("llama2"), tmp_path / "it.gguf", "llama", tokenizer=metadata)))


def test_a_byte_level_vocabulary_gives_the_same_ids(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    made = _byte_level()
    types = [3 if i < len(SPECIAL) else 1 for i in range(made.get_vocab_size())]
    metadata = _metadata(made, **{
        "ggml.model": "gpt2", "ggml.pre": "llama-bpe", "ggml.token_type": types, "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 0, "chat_template": "plain {{ messages }}", "chat_template.tool_use": "tools {{ tools }}",
    })  # fmt: skip
    path = _served(checkpoint, tmp_path, metadata)
    read = PreTrainedTokenizerFast.from_pretrained(path)
    for text in TEXTS:
        assert read.encode(text) == made.encode(text).ids, text
        assert read.decode(read.encode(text), skip_special_tokens=True) == made.decode(made.encode(text).ids)
    assert read.chat_template == {"default": "plain {{ messages }}", "tool_use": "tools {{ tools }}"}
    assert read.bos_token == "<|begin|>"
    ends = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [0, 1], "what is called an end is one, whatever the metadata name"


def test_a_sentence_piece_vocabulary_gives_the_same_ids(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    made = _sentence_piece()
    types = [2, 3, 3, *([6] * 256)] + [1] * (made.get_vocab_size() - 259)
    scores = [-float(i) for i in range(made.get_vocab_size())]
    metadata = _metadata(made, **{
        "ggml.model": "llama", "ggml.token_type": types, "ggml.scores": scores, "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0,
    })  # fmt: skip
    read = PreTrainedTokenizerFast.from_pretrained(_served(checkpoint, tmp_path, metadata))
    for text in TEXTS[:3] + TEXTS[6:]:
        if not text.startswith(" "):  # the mark of a first space differs between versions of the original
            assert read.encode(text) == made.encode(text).ids, text


def test_the_demo_answers_from_a_file(tmp_path: Path) -> None:
    """Its own pre-tokenizer has no name; for plain questions Llama 3's is the same."""
    from weft.engine.demo import MODEL_PATH

    made = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    special = {i for i, token in made.get_added_tokens_decoder().items() if token.special}
    template = json.loads((MODEL_PATH / "tokenizer_config.json").read_text())["chat_template"]
    metadata = _metadata(made, **{
        "ggml.model": "gpt2", "ggml.pre": "llama-bpe", "ggml.bos_token_id": 0, "ggml.eos_token_id": 1,
        "ggml.token_type": [3 if i in special else 1 for i in range(made.get_vocab_size())], "chat_template": template,
    })  # fmt: skip
    metadata["ggml.merges"] = ["Ġ a"]  # not required, but a file has some
    file = write_gguf(MODEL_PATH, tmp_path / "demo-Q8_0.gguf", "llama", kind=Kind.Q8_0, tokenizer=metadata)
    llm = LLM(str(file), progress=False, num_pages=20, dtype="float32")
    answers = llm.chat([[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in ((123, 456), (12, 30))])
    assert ["579" in answers[0].text, "42" in answers[1].text] == [True, True]
    llm.engine.close()


# -- repositories

LIST = [
    "README.md", "mmproj-F16.gguf", "It-Q4_K.gguf", "It-Q4_K_M.gguf", "It-Q8_0-00001-of-00002.gguf",
    "It-Q8_0-00002-of-00002.gguf", "old/It-F16.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        ("It-Q4_K_M.gguf", ["It-Q4_K_M.gguf"]),
        ("q4_k_m", ["It-Q4_K_M.gguf"]),
        ("Q4_K", ["It-Q4_K.gguf"]),
        ("Q8_0", ["It-Q8_0-00001-of-00002.gguf", "It-Q8_0-00002-of-00002.gguf"]),
        ("old/It-F16.gguf", ["old/It-F16.gguf"]),
        ("F16", ["old/It-F16.gguf"]),
    ],
)
def test_a_file_of_a_repository_is_found_by_its_name_or_a_word_of_it(wanted: str, files: list[str]) -> None:
    assert choose("acme/it", LIST, wanted) == files


def test_an_ambiguous_choice_lists_the_files() -> None:
    assert choose("acme/it", ["a.gguf", "mmproj.gguf", "x.txt"]) == ["a.gguf"]
    with pytest.raises(ModelError, match=r"acme/it has 4 GGUF files; there are It-Q4_K.gguf, .*: give acme/it:FILE"):
        choose("acme/it", LIST)
    with pytest.raises(ModelError, match=r"no GGUF file that 'Q5' names; there are It-Q4_K.gguf"):
        choose("acme/it", LIST, "Q5")
    with pytest.raises(ModelError, match="has no GGUF file"):
        choose("acme/it", ["README.md"])
