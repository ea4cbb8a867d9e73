"""Ranks on one GPU each: the demo model's answers, the same tokens each time, and the loss of a rank."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from tokenizers import Tokenizer

from weft.engine.demo import MODEL_PATH
from weft.engine.errors import RankLost
from weft.engine.model.directory import read_spec
from weft.engine.model.operations import Resource
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.choose import target_of
from weft.engine.plans.plan import Lane, NanoOperation, Period, Plan
from weft.engine.ranks.group import Ranks
from weft.engine.runner.device.collectives import MEASURED_STEPS
from weft.tools.demo.corpus import prompt_ids
from weft.tools.demo.skills import held_out

OPTIONS = {
    "dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": 512, "num_pages": 1000, "tuning_seconds": 0,
    "host_kv_gib": 0.1,
}  # fmt: skip
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 400, n) for n in (5, 40, 130, 300, 17)]
PARAMS = (
    GREEDY,
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 5, "top_k": 20, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 7, "min_p": 0.05, "allowed_token_ids": tuple(range(20, 300))},
)


LAYERS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 3,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SHARED_BY_EIGHT = {
    **LAYERS, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 2048,
}  # fmt: skip
RANKS = [n for n in (2, 4, 8) if n <= torch.cuda.device_count()]
pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.parametrize("ranks", RANKS, ids=[f"{n}_ranks" for n in RANKS], scope="module"),
]


@pytest.fixture(scope="module")
def model(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The demo model, or one with random weights if more ranks must share its heads than it has."""
    if ranks <= read_spec(MODEL_PATH).num_heads:
        return {"model": "demo"}
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(SHARED_BY_EIGHT))
    return {"model": path, "load_format": "dummy"}


@pytest.fixture
def demo(model: dict[str, Any]) -> None:
    if model["model"] != "demo":
        pytest.skip("the demo model has too few heads")


@pytest.fixture(scope="module")
def several(ranks: int, model: dict[str, Any]) -> Iterator[Harness]:
    harness = Harness(tensor_parallel_size=ranks, **model, **OPTIONS)
    yield harness
    harness.engine.close()


def served(harness: Harness) -> list[list[int]]:
    handles = [
        harness.add(prompt, max_tokens=40, ignore_eos=True, **requested)
        for prompt, requested in zip(PROMPTS, PARAMS, strict=True)
    ]
    harness.run()
    return [harness.tokens[handle] for handle in handles]


@pytest.mark.usefixtures("demo")
def test_the_demo_model_answers_as_on_one_gpu(several: Harness) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    examples = [e for skill in ("add", "subtract", "sort", "reverse", "count") for e in held_out(skill, 20, 5)]
    one = Harness("demo", **OPTIONS)
    answers = []
    for harness in (several, one):
        handles = [harness.add(prompt_ids(tokenizer, e), max_tokens=60, **GREEDY) for e in examples]
        harness.run()
        answers.append([tokenizer.decode(harness.tokens[h], skip_special_tokens=True) for h in handles])
    one.engine.close()
    assert answers[0] == answers[1]
    assert sum(a == e.answer for a, e in zip(answers[0], examples, strict=True)) >= len(examples) - 1


def test_a_run_repeats_itself(several: Harness) -> None:
    several.engine.reset_prefix_cache()
    first = served(several)
    several.engine.reset_prefix_cache()
    assert served(several) == first


@pytest.mark.timeout(400)
def test_every_way_to_make_sums_gives_the_same_bits(tmp_path: Path, ranks: int) -> None:
    """Uses layers of an 8B's sizes, so that the kernels are those of large GEMMs."""
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LAYERS))
    options = {**OPTIONS, "max_num_batched_tokens": 2048, "host_kv_gib": 0, "load_format": "dummy",
               "cache_dir": str(cache), "tuning_seconds": 5}  # fmt: skip

    def answers() -> list[Any]:
        harness = Harness(model, tensor_parallel_size=ranks, **options)
        rng = np.random.default_rng(1)
        prompts = [rng.integers(3, LAYERS["vocab_size"], n) for n in (700, 800, 500, 40, 300, 64)]
        requested = [harness.add(p, max_tokens=12, ignore_eos=True, **GREEDY, logprobs=2) for p in prompts]
        harness.run()
        harness.engine.close()
        return [(harness.tokens[handle], harness.logprobs[handle]) for handle in requested]

    first = answers()
    (file,) = cache.glob("sums-*.json")
    found = json.loads(file.read_text())
    for steps in MEASURED_STEPS:
        file.write_text(json.dumps({**found, "steps": {tokens: list(steps) for tokens in found["steps"]}}))
        assert answers() == first, steps


@pytest.mark.usefixtures("demo")
def test_a_pipeline_gives_the_serial_plans_tokens(tmp_path: Path, ranks: int) -> None:
    answers = answers_by_plan(tmp_path, ranks, MODEL_PATH)
    same = sum(a == b for a, b in zip(*answers, strict=True))
    print(f"{same} of 60 requests have the same 40 tokens")
    # the plan decides where attention splits a request and where GEMMs are split: a near tie may change
    assert same >= 54


@pytest.mark.timeout(300)
def test_a_batch_invariant_pipeline_gives_the_serial_plans_tokens_and_logprobs(tmp_path: Path, ranks: int) -> None:
    """Compares bits, with layers of an 8B's sizes: here no split follows the plan."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LAYERS))
    options = {"load_format": "dummy", "host_kv_gib": 0, "batch_invariant": True}
    serial, pipelined = answers_by_plan(tmp_path, ranks, tmp_path / "model", **options)
    assert serial == pipelined


def test_with_batch_invariance_neighbours_never_change_a_token(ranks: int, model: dict[str, Any]) -> None:
    """Compares tokens and logprobs of the same requests in batches and in iterations of other sizes."""
    found = []
    for seqs, tokens in ((64, 512), (8, 512), (64, 256)):
        options = {**OPTIONS, "max_num_seqs": seqs, "max_num_batched_tokens": tokens, "host_kv_gib": 0}
        harness = Harness(tensor_parallel_size=ranks, batch_invariant=True, prefix_caching=False, **model, **options)
        found.append(results(harness, logprobs=1))
    assert found[1] == found[0]
    assert found[2] == found[0]


def answers_by_plan(tmp_path: Path, ranks: int, model: Path, **options: Any) -> list[list[Any]]:
    """Answers of the serial plan, and of one with two nano-batches."""
    spec = read_spec(model).shard(0, ranks)
    target = target_of(spec, torch.device("cuda", 0), torch.bfloat16)
    periods = tuple(two_nano_batches(spec, tokens, target.sms) for tokens in (512, 256))
    for period in periods:
        period.check(spec, target.sms)
    Plan(target, "test", periods).save(tmp_path / "plan.json")
    answers = []
    for plan in ("serial", str(tmp_path / "plan.json")):
        harness = Harness(model, tensor_parallel_size=ranks, plan=plan, **{**OPTIONS, **options})
        assert (harness.engine.resolved.plan is not None) == (plan != "serial")
        answers.append(results(harness, **({"logprobs": 1} if options else {})))
    return answers


def results(harness: Harness, **options: Any) -> list[Any]:
    """Tokens and the requested logprobs of 60 requests. Closes the engine."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(6, 2000, n) for n in rng.integers(1, 300, 60)]
    requested = [harness.add(prompt, max_tokens=40, ignore_eos=True, **GREEDY, **options) for prompt in prompts]
    harness.run()
    stats = harness.engine.stats()
    print(f"{stats.iterations_pipelined} of {stats.iterations} iterations in nano-batches")
    assert (stats.iterations_pipelined > 0) == (harness.engine.resolved.plan is not None)
    harness.engine.close()
    return [(harness.tokens[h], harness.logprobs[h]) if options else harness.tokens[h] for h in requested]


def two_nano_batches(spec: ModelSpec, tokens: int, sms: int) -> Period:
    """Attention and sums of one nano-batch overlap with the GEMMs of the other."""
    lanes: dict[Resource, tuple[Lane, int]] = {Resource.MEMORY: ("memory", 32), Resource.NETWORK: ("network", 8)}
    operations = []
    for own, ahead in (((tokens // 2, tokens), False), ((0, tokens // 2), True)):
        for op in spec.layer_operations():
            lane, share = lanes.get(op.resource, ("compute", sms - 40))
            operations.append(NanoOperation(op.name, *own, share, lane, ahead))
    # the first range's operations precede the second's: a layer ahead of them
    half = len(operations) // 2
    own, other = operations[:half], operations[half:]
    return Period(tokens, tuple(op for both in zip(own, other, strict=True) for op in both))


def test_pages_leave_and_return_during_iterations_of_a_slow_rank(ranks: int, model: dict[str, Any]) -> None:
    """Rank 0 may order copies of pages that rank 1, whose GPU another program keeps busy, has yet to compute."""
    rng = np.random.default_rng(11)
    prompts = [rng.integers(6, 2000, 700) for _ in range(24)]
    answers: list[list[list[int]]] = []
    for few in (False, True):
        pages = {"num_pages": 60, "host_kv_gib": 0.2, "max_num_seqs": 6} if few else {"num_pages": 2000}
        harness = Harness(tensor_parallel_size=ranks, **{**OPTIONS, **model, "page_size": 64, **pages})
        stop = threading.Event()
        busy = threading.Thread(target=_keep_busy, args=(1, stop))
        if few:
            assert harness.engine.tiers is not None
            # even if the card is quick compared with its bus
            harness.engine.tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
            busy.start()
        for _ in range(3):
            requested = [harness.add(prompt, max_tokens=8, ignore_eos=True, **GREEDY) for prompt in prompts]
            harness.run()
            answers.append([harness.tokens[handle] for handle in requested])
        if few:
            assert harness.engine.stats().scheduler.tiers["host"].bytes_out > 0
            stop.set()
            busy.join()
        harness.engine.close()
    for found in answers[1:]:
        # a near tie may change if attention splits a request elsewhere; a wrong page changes most of them
        assert sum(a == b for a, b in zip(found, answers[0], strict=True)) >= len(prompts) - 2


def _keep_busy(device: int, stop: threading.Event) -> None:
    a = torch.randn(4096, 4096, device=f"cuda:{device}", dtype=torch.bfloat16)
    while not stop.is_set():
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize(device)


def test_a_killed_rank_ends_the_engine_at_once(ranks: int, model: dict[str, Any]) -> None:
    # no host pool: lost pinned memory stays pinned in this process, where the next pool may be placed
    harness = Harness(tensor_parallel_size=ranks, **{**OPTIONS, **model, "host_kv_gib": 0})
    for prompt in PROMPTS:
        harness.add(prompt, max_tokens=1700, ignore_eos=True, **GREEDY)
    for _ in range(20):
        harness.step()
    assert isinstance(harness.engine.ranks, Ranks)
    os.kill(harness.engine.ranks._processes[ranks - 1].pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RankLost, match=f"rank {ranks - 1}: its process ended"):
        _to_the_end(harness)
    assert time.monotonic() - begun < 10


def _to_the_end(harness: Harness) -> None:
    while harness.engine.has_work:
        harness.engine.check()
        harness.step()
