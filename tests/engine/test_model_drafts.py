"""Models that draft: a small model, and EAGLE-3 heads. They change no token, and draft what the paper says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import draft_heads
import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from hypothesis import given, settings
from hypothesis import strategies as st
from list_device import VOCAB, ListEngine, next_token
from noted_drafts import noted_drafts
from safetensors.torch import load_file, save_file

from weft.engine.config import EngineConfig, Share
from weft.engine.config.speculation import DraftOptions
from weft.engine.demo import MODEL_PATH
from weft.engine.errors import WeftError
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.directory import read_spec
from weft.engine.runner.iteration.batch import UNDRAFTED, Batch, StepResult
from weft.engine.runner.options import footprint
from weft.engine.runner.options.resolve import resolve
from weft.engine.scheduling.model_drafter import ModelDrafter
from weft.engine.scheduling.slots import SlotTable
from weft.tools.demo.network import Network, Shape

SAMPLED = {"temperature": 1.0, "seed": 3}
PROMPTS = [[5, 9, 300, 41, 7, 7, 12], list(range(60, 101)), [1999, 3], [800] * 25]
REQUESTS: list[dict[str, Any]] = [
    {**GREEDY, "logprobs": 2}, {**SAMPLED, "logprobs": 1}, {**SAMPLED, "repetition_penalty": 1.3, "logprobs": 0},
    {**GREEDY, "frequency_penalty": 0.8, "logit_bias": {50: 3.0}},
]  # fmt: skip


def drafting(method: str, model: Path, depth: int = 3, **more: Any) -> str:
    """Options for a fixed number of drafts, if possible."""
    fixed = {"num_speculative_tokens": depth, "enable_adaptive_verification": False}
    return json.dumps({"method": method, "model": str(model), **fixed, **more})


def make(config: str | None = None, **options: Any) -> Harness:
    options = {"max_num_seqs": 4, "num_pages": 120, "page_size": 8, "batch_invariant": True, **options}
    return Harness(MODEL_PATH, speculative_config=config, **options)


def ask(harness: Harness, length: int = 20) -> None:
    for prompt, params in zip(PROMPTS, REQUESTS, strict=True):
        harness.add(prompt, max_tokens=length, min_tokens=length, **params)
    harness.run()


@pytest.fixture(scope="module")
def plain() -> Harness:
    harness = make()
    ask(harness)
    return harness


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    kinds = {"plain": {}, "llama": {}, "qwen3": {"norm_before_residual": False}}
    return {kind: draft_heads.random_head(folder / kind, kind, **changed) for kind, changed in kinds.items()}


def counted(harness: Harness) -> tuple[int, int]:
    stats = harness.engine.stats().speculation
    return stats.draft_tokens["model"], stats.accepted_tokens["model"]


def same(one: Harness, other: Harness) -> bool:
    return (one.tokens, one.finish, one.logprobs) == (other.tokens, other.finish, other.logprobs)


def test_a_draft_model_changes_no_bit_and_the_model_itself_is_always_right(plain: Harness) -> None:
    harness = make(drafting("draft_model", MODEL_PATH, 4))
    ask(harness)
    assert same(harness, plain)
    drafted, accepted = counted(harness)
    assert 0 < accepted < drafted  # sampled tokens are not the likeliest
    alone = make(drafting("draft_model", MODEL_PATH, 4), max_num_seqs=1)
    alone.add(PROMPTS[0], max_tokens=21, min_tokens=20, **GREEDY)
    alone.run()
    assert counted(alone) == (16, 16)
    assert alone.tokens[0][:20] == plain.tokens[0]


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("llama", "qwen3"))]
)
def test_a_head_drafts_what_the_paper_says_and_changes_no_bit(
    kind: str, heads: dict[str, Path], plain: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(drafting("eagle3", heads[kind]))
    seen = noted_drafts(harness, monkeypatch)
    ask(harness)
    assert same(harness, plain)
    config = json.loads((heads[kind] / "config.json").read_text())
    tensors, model = load_file(heads[kind] / "model.safetensors"), target()
    for handle, known, tokens in seen[::7]:
        text = [*PROMPTS[handle], *harness.tokens[handle]][:known]
        with torch.no_grad():
            given = [stream[:-1] for stream in streams(model, text)]
            embedding = model.model.embed_tokens.weight
            expected = draft_heads.drafted(config, tensors, embedding, given, text, len(tokens))
        assert tokens == expected, f"after {known} tokens of request {handle}"
    assert len(seen) > 40


@cache
def target() -> Network:
    """The model in plain torch."""
    network = Network(Shape(), 0)
    tensors = load_file(MODEL_PATH / "model.safetensors")
    network.load_state_dict({name: tensor.float() for name, tensor in tensors.items() if name != "lm_head.weight"})
    return network


def streams(network: Network, text: list[int]) -> list[torch.Tensor]:
    """The stream that enters each layer, `[T, H]`."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0][0])) for layer in network.model.layers
    ]
    network(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("method", ["eagle3", pytest.param("draft_model", marks=pytest.mark.nightly)])
def test_preemption_and_prefix_hits_change_no_token(method: str, heads: dict[str, Path], plain: Harness) -> None:
    harness = make(drafting(method, heads["plain"] if method == "eagle3" else MODEL_PATH), num_pages=16)
    harness.expect_short_outputs()
    harness.poison_pages()
    ask(harness)
    assert harness.engine.scheduler.preemptions > 0
    assert harness.tokens == plain.tokens
    again = harness.add([*PROMPTS[1], *plain.tokens[1][:10]], max_tokens=5, min_tokens=5, **REQUESTS[1])
    harness.run()
    assert harness.cached[again] >= 40
    assert harness.tokens[again] == plain.tokens[1][10:15]


def test_a_grammar_and_a_limit_of_zero_have_no_drafts_of_the_model() -> None:
    harness = make(drafting("draft_model", MODEL_PATH))
    harness.add(PROMPTS[0], max_tokens=20, allowed_token_ids=tuple(range(50)), **GREEDY)
    harness.run()
    harness.add(PROMPTS[1], max_tokens=3, min_tokens=3, max_drafts=0, **GREEDY)
    harness.run()
    assert counted(harness) == (0, 0)
    harness.add(PROMPTS[1], max_tokens=9, min_tokens=9, max_drafts=2, **GREEDY)
    harness.run()
    assert counted(harness) == (5, 5)


@pytest.mark.nightly
def test_sleep_keeps_the_drafter() -> None:
    config = EngineConfig(
        model=str(MODEL_PATH), dtype="float32", num_pages=60, max_num_seqs=2, page_size=8,
        speculative_config=drafting("draft_model", MODEL_PATH, 4),
    )  # fmt: skip
    config = config.model_copy(update={"share": config.share.model_copy(update={"sleeps": True})})
    harness = Harness.__new__(Harness)
    from weft.engine.engine import Engine

    harness.engine = Engine(config)
    harness.tokens, harness.finish, harness.cached, harness.logprobs = {}, {}, {}, {}
    harness.prompt_logprobs, harness.pooled, harness.steps = {}, {}, 0
    harness.add(PROMPTS[0], max_tokens=31, ignore_eos=True, **GREEDY)
    harness.run()
    harness.engine.sleep()
    harness.engine.wake()
    harness.add(PROMPTS[0], max_tokens=31, ignore_eos=True, **GREEDY)
    harness.run()
    assert harness.tokens[0] == harness.tokens[1]
    assert counted(harness) == (48, 48)


@given(
    requests=st.lists(st.tuples(st.lists(st.integers(2, 3), min_size=1, max_size=9), st.integers(1, 14)), max_size=4),
    depth=st.integers(1, 5), right=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    page_size=st.sampled_from([1, 2, 4]), capacity=st.sampled_from([24, 80]),
)  # fmt: skip
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_order_of_right_and_wrong_drafts_of_the_runner_leaves_what_no_drafts_leave(
    requests: list[tuple[list[int], int]], depth: int, right: list[int], page_size: int, capacity: int
) -> None:
    plain, drafted = (
        left_by(requests, page_size, capacity, drafts, chain(right, repeat(0))) for drafts in (None, depth)
    )
    if capacity == 80:
        assert drafted == plain
    assert drafted[0] == plain[0]


def left_by(
    requests: list[tuple[list[int], int]], page_size: int, capacity: int, depth: int | None, rights: Iterator[int]
) -> tuple[dict[int, list[int]], set[bytes]]:
    """Run requests, with drafts of which the runner gets the first ones right. Return the outputs and cached pages."""

    def drafter(slots: SlotTable) -> ModelDrafter:
        assert depth is not None
        return ModelDrafter(slots, DraftOptions("eagle3", depth, measured=False))

    engine = ListEngine(capacity, page_size=page_size, drafter=None if depth is None else drafter)
    execute, slots = engine.device.execute, engine.scheduler.slots

    def drafting_first(batch: Batch) -> StepResult:
        ids, at = batch.token_ids.copy(), 0
        for slot, length in zip(batch.slots.tolist(), batch.query_len.tolist(), strict=True):
            text, correct = slots.token_ids[slot, : slots.known[slot]].tolist(), 0
            for i in range(at, at + length):
                if ids[i] == UNDRAFTED:
                    correct = next(rights) if i == at + 1 else correct - 1
                    ids[i] = next_token(text) if correct > 0 else (next_token(text) + 1) % VOCAB
                    text.append(int(ids[i]))
            at += length
        return execute(batch._replace(token_ids=ids))

    engine.device.execute = drafting_first  # type: ignore[method-assign]
    for prompt, max_tokens in requests:
        engine.add(prompt, min(max_tokens, engine.max_len - len(prompt)))
    engine.run()
    assert (slots.drafts == 0).all()
    return engine.output, {entry.key for entry in engine.pool.index.entries()}


@pytest.mark.parametrize("shape", [(1, 2, 64), (3, 1, 16), (2, 3, 40), (1, 8, 128)])
def test_the_drafters_part_of_a_page_is_after_the_layers_and_overlaps_nothing(shape: tuple[int, int, int]) -> None:
    layout = KvLayout(7, 2, 8, 2, 64, torch.float32, drafts=shape)
    pool = torch.zeros(layout.shape(3))
    view = layout.draft_view(pool)
    view[:, layout.first_draft_layer : layout.first_draft_layer + shape[0]] = 1.0
    assert not pool[:, :7].any()
    assert pool.sum() == 3 * shape[0] * 2 * 8 * shape[1] * shape[2]
    assert layout.id != KvLayout(7, 2, 8, 2, 64, torch.float32).id


def test_pages_of_another_drafter_are_not_used(heads: dict[str, Path], tmp_path: Path) -> None:
    config = draft_heads.config_of()
    other = draft_heads.write(tmp_path, config, draft_heads.tensors_of(config, seed=1))
    configs = [None, drafting("eagle3", heads["plain"]), drafting("eagle3", other)]
    ids = {make(config).engine.scheduler.pool.index.model_id for config in configs}
    assert len(ids) == 3


def test_engines_that_share_weights_leave_memory_for_a_drafter_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "memory_bytes", lambda _: 2**30)
    spec = read_spec(MODEL_PATH)

    def pool_bytes(engines: int) -> int:
        share = Share(sharers=engines, weight_sharers=engines)
        found = resolve(EngineConfig(
            model=str(MODEL_PATH), device="cpu", dtype="float32", page_size=8, max_num_seqs=4096, share=share,
            speculative_config=drafting("draft_model", MODEL_PATH),
        ), spec)  # fmt: skip
        assert found.num_pages is not None
        return engines * found.num_pages * found.kv.page_bytes

    less = pool_bytes(1) - pool_bytes(3)
    assert less == pytest.approx(2 * spec.weight_bytes(4), rel=0.05)


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": 2049}, "vocabulary of 2049 tokens, the model has 2048"),
    "width": ({"target_hidden_size": 512}, "states of 512 values, the model has 256"),
    "taps": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "layers [1, 2, 9], but the model has 7"),
    "layers": ({"num_hidden_layers": 2}, "it has 2 layers"),
    "switch": ({"norm_before_fc": True}, "norm_before_fc is not supported"),
    "kind": ({"speculators_model_type": "dflash"}, "dflash is not an EAGLE-3 head"),
    "lacking": ({"hidden_size": None}, "lacks hidden_size"),
    "wrong": ({"hidden_size": "big"}, "value of the wrong kind"),
    "text": ({"eagle_config": "big"}, "value of the wrong kind"),
    "endless": ({"draft_vocab_size": float("inf")}, "value of the wrong kind"),
    "bias": ({"attention_bias": True}, "heads with biases"),
}


def refused(config: str, **options: Any) -> str:
    with pytest.raises(WeftError) as error:
        make(config, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_head_whose_configuration_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    changed, line = HOSTILE[name]
    config = {key: value for key, value in draft_heads.config_of(**changed).items() if value is not None}
    draft_heads.write(tmp_path, config, {})
    assert line in refused(drafting("eagle3", tmp_path))


@pytest.mark.parametrize(
    ("name", "damage", "line"),
    [
        ("midlayer.self_attn.k_proj.weight", lambda t: t[:-1].clone(), "has shape"),
        ("fc.weight", lambda t: t.T.contiguous(), "has shape"),
        ("norm.weight", lambda t: t.fill_(torch.nan), "not finite"),
        ("lm_head.weight", lambda _: None, "has no tensor lm_head.weight"),
        ("d2t", lambda t: t + 1600, "outside the model's vocabulary"),
        ("d2t", lambda _: None, "has no tensor d2t"),
    ],
)
def test_a_head_whose_tensors_do_not_fit_is_refused(name: str, damage: Any, line: str, tmp_path: Path) -> None:
    config = draft_heads.config_of()
    tensors = draft_heads.tensors_of(config)
    tensors[name] = damage(tensors[name])
    draft_heads.write(tmp_path, config, {key: t for key, t in tensors.items() if t is not None})
    assert line in refused(drafting("eagle3", tmp_path))


def test_a_draft_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    def model(name: str, **changed: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = json.loads((MODEL_PATH / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changed}))
        return folder

    def line(folder: Path, **options: Any) -> str:
        return refused(drafting("draft_model", folder), **options)

    assert "vocabulary of 4096 tokens, the model 2048" in line(model("other", vocab_size=4096))
    assert "lower --max-model-len" in line(model("short", max_position_embeddings=64))
    assert "has no model.safetensors" in line(model("empty"))
    assert "no model directory" in line(tmp_path / "none")
    tokenizer = json.loads((MODEL_PATH / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {token: 2047 - i for token, i in tokenizer["model"]["vocab"].items()}
    (model("words") / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "another vocabulary" in line(tmp_path / "words")
    save_file({"model.norm.weight": torch.ones(3)}, model("damaged") / "model.safetensors")
    assert "has no tensor" in line(tmp_path / "damaged")
    fine = drafting("draft_model", MODEL_PATH)
    assert "leave out --kv-cache-dtype" in refused(fine, kv_cache_dtype="fp8")
    assert "--tensor-parallel-size" in refused(fine, tensor_parallel_size=2)
    assert "--load-format dummy" in refused(fine, load_format="dummy")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"method": "eagle3"}, "model is missing"),
        ({"method": "draft_model", "model": "a", "prompt_lookup_max": 3}, "does not search text"),
        ({"method": "draft_model", "model": "a", "quantization": "fp8"}, "not supported for models that draft"),
        ({"method": "medusa", "model": "a"}, "choose suffix, ngram, draft_model, eagle3 or mtp"),
        ({"method": "mtp", "model": "a"}, "a layer of the served model"),
    ],
)
def test_vllms_keys_that_do_not_fit_models_are_refused(config: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        EngineConfig(speculative_config=json.dumps(config))


@pytest.mark.nightly
def test_the_depth_follows_the_number_of_requests() -> None:
    depths: Sequence[Any] = [[1, 1, 4], [2, 9, 0]]
    harness = make(drafting("draft_model", MODEL_PATH, 4, num_speculative_tokens_per_batch_size=depths))
    ask(harness, 12)
    assert counted(harness)[0] == 0
    harness.add(PROMPTS[0], max_tokens=12, ignore_eos=True, **GREEDY)
    harness.run()
    assert counted(harness)[0] > 0
    assert np.all(harness.engine.scheduler.slots.drafts == 0)
