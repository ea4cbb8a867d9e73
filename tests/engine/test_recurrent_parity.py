"""Native families with recurrent states: tokens and log-probabilities are those of `transformers`, also if a request
starts from a state that another request left: in the pool, on the host, or on the SSD after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from safetensors.torch import load_file, save_file
from threads import of_threads
from tiny import RECURRENT
from transformers import AutoModelForCausalLM

from weft.engine.memory.kv_layout import KvLayout
from weft.engine.memory.state_layout import StateLayout
from weft.engine.model.directory import read_spec
from weft.engine.model.quantize import quantize
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights, load_weights

OPTIONS: dict[str, Any] = {"page_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 64, "num_pages": 300}
BY_DAY = ("nemotron-h", "qwen3.5", "lfm2")
EVERY = [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in RECURRENT]

Made = Callable[[str], Path]


@cache
def _reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 199, length)


def _run(harness: Harness, prompts: list[np.ndarray], max_tokens: int = 10) -> list[int]:
    """Serve them together and check every token and log-probability. Returns how many tokens of each were cached."""
    handles = [harness.add(p, max_tokens=max_tokens, logprobs=3, ignore_eos=True, **GREEDY) for p in prompts]
    harness.run()
    model = _reference(harness.engine.config.model_path)
    for handle, prompt in zip(handles, prompts, strict=True):
        tokens = harness.tokens[handle]
        with torch.inference_mode():
            logits = model(torch.from_numpy(np.concatenate((prompt, tokens)))[None]).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        values = logits.log_softmax(-1)
        for entry, row in zip(harness.logprobs[handle], values, strict=True):
            np.testing.assert_allclose(entry.values, row[torch.tensor(entry.ids, dtype=torch.int64)], atol=2e-3)
    return [harness.cached[h] for h in handles]


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.nightly), 7, 64])
def test_in_chunks(tiny_model: Made, family: str, chunk: int) -> None:
    harness = Harness(tiny_model(family), **{**OPTIONS, "max_num_batched_tokens": chunk})
    harness.poison_pages()
    _run(
        harness, [_prompt(1, 5), _prompt(2, 30)] if chunk == 1 else [_prompt(i, n) for i, n in enumerate((3, 65, 130))]
    )


@pytest.mark.parametrize("family", EVERY)
def test_from_states_at_the_end_of_a_page_and_after_it(tiny_model: Made, family: str) -> None:
    harness = Harness(tiny_model(family), **OPTIONS)
    harness.poison_pages()
    prompt = _prompt(3, 128)
    _run(harness, [prompt])
    answer = np.concatenate((prompt, harness.tokens[0]))
    later = [np.concatenate((answer[:end], _prompt(end, more))) for end, more in ((128, 1), (128, 17), (138, 70))]
    assert min(_run(harness, [prompt, *later])) >= 112
    # prompts that part earlier: K and V are found at 64, and a state there only once a prompt asked for it
    for _ in range(3):
        found = _run(harness, [np.concatenate((prompt[:70], _prompt(7, 40)))])
    assert found[0] >= 64


@pytest.mark.parametrize("family", EVERY)
def test_after_preemption(tiny_model: Made, family: str) -> None:
    spec = read_spec(tiny_model(family))
    states = StateLayout.of(spec.states, KvLayout.of(spec, 16, torch.float32).page_bytes)
    harness = Harness(tiny_model(family), **{**OPTIONS, "num_pages": 8 + 4 * states.pages})
    harness.expect_short_outputs()
    harness.poison_pages()
    _run(harness, [_prompt(20 + i, n) for i, n in enumerate((30, 11, 40, 26, 9))], 40)
    assert harness.engine.scheduler.preemptions > 0


def _evict(harness: Harness) -> None:
    assert harness.engine.tiers is not None
    harness.engine.tiers.flush(60)
    harness.engine.scheduler.pool.evict_all()
    harness.poison_pages()


@pytest.mark.parametrize("family", EVERY)
def test_from_states_on_the_host_and_on_the_ssd_after_a_restart(tiny_model: Made, tmp_path: Path, family: str) -> None:
    tiers = {"host_kv_gib": 0.02, "ssd_kv_path": str(tmp_path), "ssd_kv_gib": 0.05}
    prompts = [_prompt(30, 100), _prompt(31, 66)]
    for _ in range(2):
        harness = Harness(tiny_model(family), **OPTIONS, **tiers)
        assert harness.engine.tiers is not None
        harness.engine.tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
        harness.poison_pages()
        first = _run(harness, prompts)
        _evict(harness)
        assert min(_run(harness, prompts)) >= 64
        harness.engine.close()
    assert min(first) >= 64, "the second engine found the states of the first"


@pytest.mark.parametrize("family", EVERY)
def test_on_two_ranks(tiny_model: Made, family: str) -> None:
    harness = of_threads(tiny_model(family), 2, **OPTIONS)
    prompt = _prompt(40, 90)
    _run(harness, [prompt, _prompt(41, 20)])
    assert min(_run(harness, [np.concatenate((prompt, _prompt(42, 9)))])) >= 64
    harness.engine.close()


def _weights(spec: ModelSpec, path: Path) -> Weights:
    return load_weights(spec, path, device=torch.device("cpu"), dtype=torch.float32, max_positions=64)


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_hold_each_section_of_a_recurrence_between_them(tiny_model: Made, family: str, ranks: int) -> None:
    path = tiny_model(family)
    spec = read_spec(path)
    layer = next(i for i, state in enumerate(spec.states) if state is not None)
    whole = _weights(spec, path).layers[layer]["state_in"]
    own = [spec.shard(rank, ranks).recurrence for rank in range(ranks)]
    parts = [_weights(spec.shard(rank, ranks), path).layers[layer]["state_in"] for rank in range(ranks)]
    recurrence = spec.recurrence
    assert recurrence is not None
    assert whole.state is not None
    begin = 0
    for name, size in recurrence.sections.items():
        want = whole.weight[begin : begin + size]
        found, held = [], 0
        for rank, (mine, part) in enumerate(zip(own, parts, strict=True)):
            assert mine is not None
            first = sum(list(mine.sections.values())[: list(mine.sections).index(name)])
            rows = part.weight[first : first + mine.sections[name]]
            if name in mine.keyed and rank * mine.key_parts % ranks:
                assert torch.equal(rows, found[-1])  # the same key head as the rank before
                continue
            found.append(rows)
            held += len(rows)
        assert torch.equal(torch.cat(found), want)
        begin += size
    for name, kinds in (("scalars", len(recurrence.scalars)), ("a_log", 1), ("time_bias", 1), ("skip", 1)):
        if (want := getattr(whole.state, name)) is None:
            continue
        for kind in range(kinds):
            mine = torch.cat([getattr(part.state, name).chunk(kinds)[kind] for part in parts])
            assert torch.equal(mine, want.chunk(kinds)[kind]), name


def test_the_text_part_of_a_checkpoint_with_vision_is_served(
    tiny_model: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if it has layers that predict further tokens."""
    source = tiny_model("qwen3.5-moe")
    config = json.loads((source / "config.json").read_text())
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    more = {"model.visual.blocks.0.norm1.weight": torch.ones(4), "mtp.fc.weight": torch.ones(4, 4)}
    save_file({**renamed, **more}, tmp_path / "model.safetensors")
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": config, "vision_config": {}}))
    for file in source.glob("generation_config.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    prompt = _prompt(50, 40)
    found = []
    for path in (source, tmp_path):
        harness = Harness(path, **OPTIONS)
        harness.add(prompt, max_tokens=8, ignore_eos=True, **GREEDY)
        harness.run()
        found.append(harness.tokens[0])
    assert found[0] == found[1]
    assert "not used" not in capsys.readouterr().err


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", "nemotron-h"])
def test_in_sixteen_bits_and_in_fp8(tiny_model: Made, tmp_path: Path, family: str) -> None:
    """The likeliest token of float32 is still likely."""
    prompt, model = _prompt(60, 80), _reference(tiny_model(family))
    with torch.inference_mode():
        want = model(torch.from_numpy(prompt)[None]).logits[0, -1]
    made = quantize(tiny_model(family), tmp_path / "fp8")
    assert not any("in_proj_a" in each.name or "in_proj_ba" in each.name for each in made.errors)
    for path, options in (
        (tiny_model(family), {"dtype": "bfloat16"}),
        (tiny_model(family), {"quantization": "fp8"}),
        (tiny_model(family), {"state_dtype": "bfloat16"}),
        (made.path, {}),
    ):
        harness = Harness(path, **{**OPTIONS, **options})
        handle = harness.add(prompt, max_tokens=1, logprobs=5, ignore_eos=True, **GREEDY)
        harness.run()
        entry = harness.logprobs[handle][0]
        assert int(want.argmax()) in entry.ids
        assert abs(max(entry.values) - float(want.log_softmax(-1).max())) < 1.5


@pytest.mark.parametrize("family", ["qwen3.5", pytest.param("nemotron-h", marks=pytest.mark.nightly)])
def test_batch_invariance(tiny_model: Made, family: str) -> None:
    options = {**OPTIONS, "batch_invariant": True, "max_num_batched_tokens": 256, "dtype": "bfloat16"}
    prompts = [_prompt(70 + i, n) for i, n in enumerate((140, 3, 64, 130))]
    found = []
    for served in ([prompts[0]], prompts):
        harness = Harness(tiny_model(family), **options)
        harness.poison_pages()
        handles = [harness.add(p, max_tokens=6, logprobs=2, ignore_eos=True, **GREEDY) for p in served]
        harness.run()
        found.append([(e.ids, e.values) for e in harness.logprobs[handles[0]]])
    assert found[0] == found[1]
