"""How much of a cached prefix to load; the identity of a model; host slots and copies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_tiny

from weft.engine.config import EngineConfig
from weft.engine.memory.block_allocator import BlockAllocator
from weft.engine.memory.cpu_transfer import CpuCopyEngine
from weft.engine.memory.loads import LoadSpeeds
from weft.engine.memory.model_id import model_id
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixEntry, PrefixIndex
from weft.engine.memory.tiers import Tiers
from weft.engine.model.implementation import choose_spec
from weft.engine.runner.options.resolve import resolve
from weft.engine.scheduling.fences import Fences
from weft.engine.scheduling.prefix_reuse import Prefixes
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.sampling import SamplingParams

PAGE_BYTES, PAGE_SIZE = 1000, 10


def entry(where: str) -> PrefixEntry:
    made = PrefixEntry(b"", None, b"", "")
    setattr(made, {"g": "page", "h": "host", "s": "extent"}[where], 1)
    return made


@given(
    chain=st.text("ghs", max_size=12),
    host=st.integers(1, 50),
    ssd=st.integers(1, 50),
    rate=st.integers(1, 50),
    busy=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    busy_tokens=st.integers(0, 200),
)
@settings(max_examples=300, deadline=None)
def test_the_best_cut_ends_soonest(
    chain: str, host: int, ssd: int, rate: int, busy: tuple[int, int], busy_tokens: int
) -> None:
    speeds = LoadSpeeds(PAGE_BYTES, PAGE_SIZE)
    speeds.moved("host", host, 1.0)
    speeds.moved("ssd", ssd, 1.0)
    speeds.computed(rate * PAGE_SIZE, 1.0, full=True)
    cut = speeds.worthwhile([entry(w) for w in chain], {"host": busy[0], "ssd": busy[1]}, busy_tokens)

    def seconds(k: int) -> float:
        to_load, from_ssd = sum(w != "g" for w in chain[:k]), chain[:k].count("s")
        loading = (to_load + busy[0]) / host if to_load else 0.0
        if from_ssd:
            loading = max(loading, (from_ssd + busy[1]) / ssd)
        # No token of this request is computed before its pages arrive, nor before its turn.
        return max(loading, busy_tokens / (rate * PAGE_SIZE)) + (len(chain) - k) / rate

    best = min(seconds(k) for k in range(len(chain) + 1))
    assert seconds(cut) <= best + 1e-9
    assert all(seconds(k) > best + 5e-10 for k in range(cut + 1, len(chain) + 1))


def test_everything_is_loaded_until_prefill_has_been_measured() -> None:
    speeds = LoadSpeeds(PAGE_BYTES, PAGE_SIZE)
    speeds.moved("host", 1, 1e6)
    busy = {"host": 9, "ssd": 0}
    assert speeds.worthwhile([entry("h")] * 3, busy, 0) == 3
    speeds.computed(1000, 1.0, full=False)
    assert speeds.worthwhile([entry("h")] * 3, busy, 0) == 0
    assert speeds.worthwhile([entry("g")] * 3, busy, 0) == 3


def test_a_load_that_ends_before_its_turn_costs_nothing() -> None:
    speeds = LoadSpeeds(PAGE_BYTES, PAGE_SIZE)
    speeds.moved("host", 1, 1.0)
    speeds.computed(10 * PAGE_SIZE, 1.0, full=True)
    # Loading a page takes a second, computing it a tenth of one.
    assert speeds.worthwhile([entry("h")] * 3, {"host": 0, "ssd": 0}, 0) == 0
    assert speeds.worthwhile([entry("h")] * 3, {"host": 0, "ssd": 0}, 20 * PAGE_SIZE) == 2
    assert speeds.worthwhile([entry("h")] * 3, {"host": 0, "ssd": 0}, 30 * PAGE_SIZE) == 3
    assert speeds.worthwhile([entry("h")] * 3, {"host": 0, "ssd": 0}, 28 * PAGE_SIZE) == 2


def test_prompts_computed_first_give_time_to_load() -> None:
    def request(tokens: int, order: int) -> Request:
        prompt = np.arange(tokens, dtype=np.int32)
        params, limit = SamplingParams(max_tokens=1), tokens + 1
        return Request(order, prompt, tokens, params, limit, 0, order, 0.0, salt=str(order), stop_ids=(), seed=0)

    slots, pool = SlotTable(2, 400, PAGE_SIZE), PagePool(60, PAGE_SIZE, PrefixIndex("m"))
    copies = CpuCopyEngine(torch.zeros(60, PAGE_BYTES // 4), 4)
    tiers = Tiers(pool, copies, 4, None)
    prefixes = Prefixes(slots, pool, Fences(slots, pool), tiers, enabled=True)
    requested, parent = request(3 * PAGE_SIZE + 1, 0), None
    for i, key in enumerate(pool.index.keys(requested.token_ids, PAGE_SIZE, requested.salt)):
        tokens = requested.token_ids[i * PAGE_SIZE : (i + 1) * PAGE_SIZE].tobytes()
        parent = pool.index.publish(parent, key, tokens, requested.salt)
        slot = tiers.host.take()
        assert parent is not None
        assert slot is not None
        tiers.host.settle(slot, parent)
        pool.index.set_host(parent, slot)
        tiers.host.unpin(slot)
    tiers.speeds.moved("host", 1, 1.0)
    tiers.speeds.computed(10 * PAGE_SIZE, 1.0, full=True)
    assert not prefixes.find(requested).entries
    other = slots.assign(request(30 * PAGE_SIZE, 1), np.zeros(0, np.int32), 0)
    assert len(prefixes.find(requested).entries) == 3
    slots.scheduled[other] = 10 * PAGE_SIZE  # a part of it is computed
    assert len(prefixes.find(requested).entries) == 2
    copies.close()


def test_small_iterations_only_raise_the_prefill_speed() -> None:
    speeds = LoadSpeeds(PAGE_BYTES, PAGE_SIZE)
    speeds.computed(100, 1.0, full=True)
    speeds.computed(1, 1.0, full=False)
    assert speeds._prefill_tokens_per_second == 100
    speeds.computed(200, 1.0, full=False)
    assert speeds._prefill_tokens_per_second == 200


def test_a_model_is_identified_by_its_content(tmp_path: Path) -> None:
    def identity(path: Path, **options: object) -> str:
        config = EngineConfig(model=str(path), num_pages=8, **options)  # type: ignore[arg-type]
        spec, _ = choose_spec(config)
        resolved = resolve(config, spec)
        return model_id(config, resolved.kv, spec, resolved.compute_dtype, resolved.max_model_len)

    a = save_tiny("yi", tmp_path / "a")
    first = identity(a)
    assert identity(a) == first
    assert identity(a, page_size=32) != first
    assert identity(a, dtype="bfloat16") != identity(a, dtype="float32")
    # pages of both look alike, their content does not
    small = {"kv_cache_dtype": "fp8"}
    assert identity(a, dtype="bfloat16", **small) != identity(a, dtype="float32", **small)
    assert identity(a, max_model_len=60) == first
    other = {"model_impl": "transformers"}  # its code may rotate by it
    assert identity(a, max_model_len=60, **other) != identity(a, **other)
    made_up = identity(a, load_format="dummy")
    assert made_up != first
    assert identity(a, load_format="dummy", seed=1) != made_up
    assert identity(a, load_format="dummy", dummy_skew=1.0) != made_up
    identities = {first}
    for algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        (a / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
        identities.add(identity(a))
    assert len(identities) == 3
    (a / "hf_quant_config.json").unlink()
    assert identity(a) == first
    weights = next(a.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert identity(a) != first


def test_slots_are_reused_least_recently_used_first_and_never_while_held() -> None:
    lost: list[PrefixEntry] = []
    pinned_parent = entry("h")

    def lose(victim: PrefixEntry) -> None:
        lost.append(victim)
        places.forget(victim.host)

    places = BlockAllocator(3, lambda e: e is not pinned_parent, lose)
    entries = [pinned_parent, entry("h"), entry("h")]
    for used, e in enumerate(entries):
        slot = places.take()
        assert slot is not None
        e.host, e.used = slot, used
        places.settle(slot, e)
        places.unpin(slot)
    entries[1].used = 9  # used again since
    assert places.take() == entries[2].host
    places.pin(entries[1].host)
    assert places.take() is None
    places.unpin(entries[1].host)
    assert places.take() == entries[1].host
    assert lost == [entries[2], entries[1]]
    assert places.take() is None
    places.check()


def test_copies_on_the_cpu_move_whole_pages() -> None:
    kv = torch.randn(6, 2, 2, 4, 1, 8)
    want = kv.clone()
    copies = CpuCopyEngine(kv, 4)
    out = copies.out([(3, 0), (5, 2)])
    while not out.done():
        copies.wait([out], 1.0)
    back = copies.back([(1, 2), (2, 0)])
    while not back.done():
        copies.wait([back], 1.0)
    assert torch.equal(kv[1], want[5])
    assert torch.equal(kv[2], want[3])
    assert copies.host.ctypes.data % 4096 == 0
    assert copies.host.strides[0] % 4096 == 0
    assert np.all(copies.host[1] == 0)
    copies.close()
