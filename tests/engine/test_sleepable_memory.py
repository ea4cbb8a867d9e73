"""Sleep of an engine: memory is really released, addresses stay, and it wakes unchanged."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from memory_driver import MemoryDriver
from torch import Tensor

from weft import LLM, SamplingParams
from weft.engine.config import EngineConfig, Share
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError, OutOfMemory
from weft.engine.runner.memory.cuda_arena import CudaArena, PinnedBacking
from weft.engine.runner.memory.host_arena import FileBacking, HostArena, host_sleepable_memory
from weft.engine.runner.memory.sleep import SleepableMemory
from weft.engine.wire.messages import AddRequest, Finish

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = list(range(1, 150))


def resident() -> int:
    """Bytes of this process's anonymous memory."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Made-up weights of some 50 MB."""
    path = tmp_path_factory.mktemp("big")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 2,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(path), load_format="dummy", device="cpu", dtype="bfloat16", num_pages=400, page_size=16, max_num_seqs=4,
        host_kv_gib=0.01, cache_dir=str(path / "cache"), share=Share(sleeps=True),
    )  # fmt: skip
    assert llm.engine.tiers is not None
    # even if this machine's memory is slow compared with its processor
    llm.engine.tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
    return llm


def test_weights_and_pages_in_fp8_sleep_with_their_scales() -> None:
    llm = LLM(
        "demo", device="cpu", dtype="float32", num_pages=40, page_size=16, max_num_seqs=2, quantization="fp8",
        kv_cache_dtype="fp8", share=Share(sleeps=True),
    )  # fmt: skip
    before = llm.generate([PROMPT[:40]], GREEDY, progress=False)[0].token_ids
    engine = llm.engine
    assert engine.sleep() >= engine._memory.weights + engine._memory.kv_pages
    engine.wake()
    engine.reset_prefix_cache()
    assert llm.generate([PROMPT[:40]], GREEDY, progress=False)[0].token_ids == before


def test_a_sleeping_engine_holds_neither_weights_nor_pages_and_wakes_unchanged(big: LLM) -> None:
    engine = big.engine
    weights, pool = engine._memory.weights, engine._memory.kv_pages
    before = big.generate([PROMPT], GREEDY, progress=False)[0].token_ids
    tied = engine.runner._executor.weights  # type: ignore[attr-defined]
    assert tied.embedding.data_ptr() == tied.lm_head.data_ptr()
    places = [tensor.data_ptr() for tensor in tied.tensors()]
    engine.runner.kv.fill_(1)  # type: ignore[attr-defined]  # every page is taken from the system
    engine.reset_prefix_cache()
    assert big.generate([PROMPT], GREEDY, progress=False)[0].token_ids == before
    awake = resident()
    assert engine.sleep() >= weights + pool > 40e6
    assert awake - resident() > 0.9 * (weights + pool)
    engine.add_or_refuse(AddRequest(handle=1, prompt_token_ids=np.array([1], np.int32).tobytes(), params=GREEDY))
    outputs = engine.step()
    assert outputs is not None
    assert (outputs.columns()[2].tolist(), outputs.errors) == ([Finish.BUSY], {1: "the model sleeps"})
    assert engine.sleep() == engine.wake()  # the first changes nothing
    assert [tensor.data_ptr() for tensor in tied.tensors()] == places
    again = big.generate([PROMPT], GREEDY, progress=False)[0]
    assert again.token_ids == before
    assert again.cached_tokens >= 128, "the host tier kept the prompt's pages"
    engine.sleep()  # the file is there already
    engine.wake()
    engine.reset_prefix_cache()
    assert big.generate([PROMPT], GREEDY, progress=False)[0].token_ids == before


def test_pages_in_transit_for_an_announced_turn_do_not_keep_it_awake(big: LLM) -> None:
    engine, name = big.engine, (b"n" * 16,)
    assert engine.tiers is not None
    prompt = np.array(PROMPT, np.int32).tobytes()
    engine.add(AddRequest(handle=1 << 39, prompt_token_ids=prompt, params=GREEDY, names=name))
    while engine.has_work:
        engine.step()
    engine.drain_in_flight()
    engine.scheduler.pool.evict_all()
    engine.prefetch(name)
    assert engine.tiers.num_loading
    assert engine.sleep() == engine.wake()


def test_without_a_lower_tier_the_pages_are_dropped(tmp_path: Path) -> None:
    llm = LLM("demo", device="cpu", num_pages=40, page_size=16, cache_dir=str(tmp_path), share=Share(sleeps=True))
    (first,) = llm.generate([PROMPT], GREEDY, progress=False)
    assert llm.generate([PROMPT], GREEDY, progress=False)[0].cached_tokens
    llm.engine.sleep()
    llm.engine.wake()
    llm.engine.scheduler.check()
    (again,) = llm.generate([PROMPT], GREEDY, progress=False)
    assert (again.token_ids, again.cached_tokens) == (first.token_ids, 0)


def test_an_engine_without_sleep_support_reports_so() -> None:
    engine = Engine(EngineConfig(device="cpu", num_pages=16, cpu_threads=1))
    with pytest.raises(ConfigError, match="sleep was not enabled"):
        engine.sleep()
    engine.close()


def test_if_the_weights_cannot_be_saved_the_model_stays_awake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sleepable = host_sleepable_memory(tmp_path / "file" / "below")
    weight = torch.arange(5000.0)
    sleepable.adopt_weights([weight])
    with pytest.raises(OSError, match="file"):
        sleepable.sleep()
    assert not sleepable.asleep
    assert weight.sum() == torch.arange(5000.0).sum()


def test_tensors_keep_their_shapes_views_and_values(tmp_path: Path) -> None:
    base = torch.randn(40, 30, dtype=torch.bfloat16)
    views = [base, base[3:7], base.T, base[:, 5:6], torch.arange(7), torch.randn(3).double(), torch.empty(0)]
    values = [view.clone() for view in views]
    sleepable = SleepableMemory(HostArena, FileBacking(tmp_path))
    sleepable.adopt_weights([*views, base])
    sleepable.sleep()
    sleepable.wake()
    for view, value in zip(views, values, strict=True):
        assert torch.equal(view, value)
    base[3, 5] = 9
    assert views[1][0, 5] == views[2][5, 3] == views[3][3, 0] == 9


def test_on_a_gpu_memory_is_unmapped_released_and_mapped_at_the_same_addresses() -> None:
    driver = MemoryDriver(2**20)
    weights = [torch.randn(100, 30), torch.randn(50)]
    values = [weight.clone() for weight in weights]
    sleepable = driver.sleepable()
    sleepable.adopt_weights(weights)
    pool = sleepable.allocate(10_000)
    places = [tensor.data_ptr() for tensor in (*weights, pool)]
    for _ in range(2):
        sleepable.sleep()
        assert not driver.created
        assert not driver.mapped
        assert pool[0] == 0xDD
        sleepable.wake()
        assert [tensor.data_ptr() for tensor in (*weights, pool)] == places
        assert all(map(torch.equal, weights, values))
    sleepable.wake()  # awake already
    assert sum(driver.created.values()) == sum(-(-n // 4096) * 4096 for n in (12288 + 512, 10_000))


def test_a_gpu_without_enough_free_memory_reports_so() -> None:
    driver = MemoryDriver(2**20)
    sleepable = driver.sleepable()
    sleepable.adopt_weights([torch.randn(1000)])
    sleepable.sleep()
    driver.size = 0
    with pytest.raises(OutOfMemory, match="memory_share"):
        sleepable.wake()
    with pytest.raises(OutOfMemory, match="do not fit the GPU"):
        sleepable.allocate(5000)


def test_host_memory_that_cannot_be_pinned_leaves_the_model_awake() -> None:
    def refuse(_: int) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    driver = MemoryDriver(2**20)
    sleepable = SleepableMemory(lambda size: CudaArena(size, driver, driver.view, driver.settle), PinnedBacking(refuse))
    sleepable.adopt_weights([torch.randn(1000)])
    with pytest.raises(OutOfMemory, match="pinned"):
        sleepable.sleep()
    assert driver.created
