"""Pages packed in the tiers below the device (`--tier-kv-format packed`): those that pack and those that do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from packed_pages import of_kind
from tiny import save_tiny

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.memory.cpu_transfer import CpuCopyEngine
from weft.engine.memory.extent import Geometry, Record
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixEntry, PrefixIndex
from weft.engine.memory.ssd_store import Job, Outcome, SsdStore
from weft.engine.memory.store_file import StoreFile
from weft.engine.memory.tiers import Tiers
from weft.engine.memory.transfer import Copy, Remainders, remainders_for
from weft.engine.ranks.follower import _outcome
from weft.engine.ranks.leader import LeadingCopy
from weft.engine.ranks.operations import BROKEN, DONE, LOST
from weft.kernels.formats.packed_page import PackedPage

LAYOUT = KvLayout(3, 2, 16, 2, 32, torch.bfloat16)
PACKS, DOES_NOT = 0, 1
"""kinds of `packed_pages.of_kind`"""


def pool_of(kinds: list[int]) -> torch.Tensor:
    """A page for each kind."""
    form, rng = LAYOUT.packed, np.random.default_rng(0)
    assert form is not None
    words = np.stack([of_kind(kind, form, rng).reshape(-1) for kind in kinds])
    return LAYOUT.view(torch.from_numpy(words.view(np.uint8)).reshape(-1))


def bits(page: torch.Tensor) -> torch.Tensor:
    """NaNs are equal if their bits are."""
    return page.view(torch.int16)


def ended(copies: CpuCopyEngine, copy: Copy) -> Copy:
    while not copy.done():
        copies.wait([copy], 1.0)
    assert not copy.failed
    return copy


def ended_job(job: Job) -> Outcome:
    while job.outcome is Outcome.PENDING:
        pass
    return job.outcome


def test_layouts_of_16_bits_have_a_form() -> None:
    form = LAYOUT.packed
    assert form is not None
    assert (2 * form.values, form.rows, form.width) == (LAYOUT.page_bytes, 16, 64)
    assert KvLayout(3, 2, 16, 2, 32, torch.float32).packed is None
    assert KvLayout(3, 2, 16, 2, 32, torch.float8_e4m3fn).packed is None
    mixed = KvLayout(2, 2, 16, 2, 64, torch.bfloat16, ((2, 64), (1, 32))).packed
    assert mixed is not None
    assert (mixed.values % (16 * 32), mixed.width) == (0, 32)


def test_pages_are_restored_packed_or_not() -> None:
    kv = pool_of([PACKS, PACKS, DOES_NOT, 7, DOES_NOT, 4])
    want = kv.clone()
    copies = CpuCopyEngine(kv, 64, LAYOUT.packed)
    assert 16 * copies.sizes.packed < 13 * copies.sizes.page
    try:
        there = ended(copies, copies.out([(1, 7), (2, 3), (3, 0), (4, 1), (5, 2)]))
        assert (sorted(there.raw), there.unkept) == ([1, 3], [])
        kv.view(torch.uint8).zero_()
        back = ended(copies, copies.back([(5, 7), (4, 3), (3, 0), (2, 1), (1, 2)]))
        assert sorted(back.raw) == [1, 3]
        for page, was in ((5, 1), (4, 2), (3, 3), (2, 4), (1, 5)):
            assert torch.equal(bits(kv[page]), bits(want[was]))
    finally:
        copies.close()


def test_a_page_without_room_is_dropped_and_a_reused_slot_frees_its_remainder() -> None:
    kv = pool_of([PACKS] + [DOES_NOT] * 3 + [PACKS])
    copies = CpuCopyEngine(kv, 33, LAYOUT.packed)
    assert remainders_for(33) == 2
    try:
        copy = ended(copies, copies.out([(1, 10), (2, 11), (3, 12), (4, 13)]))
        assert (copy.raw, copy.unkept) == ([10, 11, 12], [12])
        copy = ended(copies, copies.out([(4, 10), (3, 12)]))
        assert (copy.raw, copy.unkept) == ([12], [])
    finally:
        copies.close()


class Keeper:
    """A host pool and a store, without an engine."""

    def __init__(self, path: Path, kinds: list[int]) -> None:
        form = LAYOUT.packed
        assert form is not None
        self.kv = pool_of([PACKS, *kinds])
        self.copies = CpuCopyEngine(self.kv, 96, form)
        assert self.copies.remainders is not None
        ended(self.copies, self.copies.out([(i, i) for i in range(1, len(self.kv))]))
        geometry = Geometry.fitting(16, form.nbytes, b"o" * 16, 400 << 10, 2 * form.values - form.nbytes)
        assert geometry.file_bytes <= 400 << 10
        assert geometry.num_remainders == 1
        self.store = SsdStore(StoreFile(path, geometry), self.copies.host, self.copies.remainders)

    def write(self, extent: int, slot: int) -> Outcome:
        tokens = np.full(16, slot, np.int32).tobytes()
        parent = bytes(16)
        return ended_job(self.store.write(extent, Record(PrefixIndex.chain(parent, tokens), parent, tokens, ""), slot))

    def holds(self, extent: int, page: int) -> bool:
        """Read into a slot that was never used, and from there to the dummy page."""
        if ended_job(self.store.read(extent, 60)) is not Outcome.DONE:
            return False
        ended(self.copies, self.copies.back([(0, 60)]))
        return torch.equal(bits(self.kv[0]), bits(self.kv[page]))

    def close(self) -> None:
        self.store.close()
        self.copies.close()


def test_a_store_keeps_pages_that_do_not_pack_across_restarts(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, [PACKS, DOES_NOT, DOES_NOT])
    assert [keeper.write(extent, slot) for extent, slot in ((0, 1), (5, 2))] == [Outcome.DONE] * 2
    assert keeper.write(6, 3) is Outcome.LOST, "there is one rest"
    assert [keeper.holds(*pair) for pair in ((0, 1), (5, 2), (6, 3))] == [True, True, False]
    keeper.close()
    keeper = Keeper(tmp_path, [PACKS, DOES_NOT, DOES_NOT])
    assert keeper.store.file.reset_reason is None
    assert [(extent, record.remainder) for extent, record in keeper.store.scan()] == [(0, -1), (5, 0)]
    assert [keeper.holds(*pair) for pair in ((0, 1), (5, 2))] == [True, True]
    assert keeper.write(6, 3) is Outcome.LOST, "the rest is still the other page's"
    assert keeper.write(5, 1) is Outcome.DONE
    assert keeper.write(6, 3) is Outcome.DONE
    assert [keeper.holds(*pair) for pair in ((5, 1), (6, 3))] == [True, True]
    keeper.close()


def test_a_damaged_remainder_is_a_miss(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, [DOES_NOT])
    assert keeper.write(2, 1) is Outcome.DONE
    geometry = keeper.store.file.geometry
    with keeper.store.file.path.open("r+b") as f:
        f.seek(geometry.remainder_at(0) + geometry.remainder_bytes - 1)
        byte = f.read(1)
        f.seek(-1, 1)
        f.write(bytes([byte[0] ^ 1]))
    assert ended_job(keeper.store.read(2, 60)) is Outcome.LOST
    keeper.close()


def test_two_pages_that_claim_one_remainder_do_not_both_get_it() -> None:
    remainders = Remainders(2)
    assert remainders.claim(5, 1)
    assert not remainders.claim(6, 1)
    assert remainders.of(6) is None
    assert remainders.take(7) == 0
    assert remainders.take(8) is None
    remainders.drop(5)
    remainders.drop(5)
    assert remainders.take(8) == 1
    assert remainders.take(9) is None


@pytest.mark.parametrize("raw_too", [False, True])
def test_answers_are_the_same_from_packed_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw_too: bool) -> None:
    """Compares bits: the log-probabilities too. A list of escapes that is too short makes some pages stay raw."""
    if raw_too:
        monkeypatch.setattr(PackedPage, "capacity", property(lambda _: 3))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(300, 600, 200) for _ in range(3)]
    options: dict[str, Any] = {"page_size": 16, "num_pages": 64, "dtype": "bfloat16", "batch_invariant": True}

    def answers(harness: Harness) -> list[Any]:
        handles = [harness.add(p, max_tokens=4, logprobs=3, **GREEDY) for p in prompts]
        harness.run()
        return [(harness.tokens[h], [e.values for e in harness.logprobs[h]]) for h in handles]

    plain = Harness("demo", prefix_caching=False, **options)
    want = answers(plain)
    plain.engine.close()
    harness = Harness(
        "demo", host_kv_gib=0.02, ssd_kv_path=str(tmp_path), ssd_kv_gib=0.02, tier_kv_format="packed", **options
    )
    tiers = harness.engine.tiers
    assert tiers is not None
    tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
    for _ in range(2):
        assert answers(harness) == want
        tiers.sink(60)
    stats = tiers.stats()
    assert not stats["host"].failures
    assert stats["ssd"].hit_tokens >= 3 * 192
    for tier in stats.values():
        assert tier.bytes_saved > 0
        assert bool(tier.raw_pages) == raw_too
    harness.engine.close()


def test_each_rank_packs_its_shard_of_a_page(tmp_path: Path) -> None:
    """The tokens are the same as before, from the host and from the disk; rank 1's file holds its own half."""
    model = save_tiny("qwen3", tmp_path / "model")
    harness = Harness(
        model, dtype="bfloat16", tensor_parallel_size=2, cpu_threads=1, page_size=16, num_pages=32,
        max_num_batched_tokens=128, batch_invariant=True, host_kv_gib=0.005, ssd_kv_path=str(tmp_path / "store"),
        ssd_kv_gib=0.01, tier_kv_format="packed",
    )  # fmt: skip
    tiers = harness.engine.tiers
    assert tiers is not None
    tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 120, n) for n in (40, 70, 130)]

    def answers() -> list[list[int]]:
        handles = [harness.add(p, max_tokens=6, **GREEDY) for p in prompts]
        harness.run()
        return [harness.tokens[h] for h in handles]

    want = answers()
    tiers.flush(60)
    tiers.pool.evict_all()
    assert answers() == want
    tiers.sink(60)
    assert answers() == want
    stats = tiers.stats()
    assert stats["ssd"].hit_tokens == stats["host"].hit_tokens == 32 + 64 + 128
    assert not stats["host"].failures + stats["ssd"].failures
    harness.engine.close()
    file = StoreFile(tmp_path / "store" / "rank-1-of-2", None)
    assert 2 * file.geometry.payload_bytes < 1.7 * harness.engine.resolved.kv.page_bytes
    assert len(file.headers()) == 2 + 4 + 8
    file.close()


def test_a_page_that_one_rank_cannot_keep_is_kept_by_none() -> None:
    kv = pool_of([PACKS] + [DOES_NOT] * 2)
    copies = CpuCopyEngine(kv, 4, LAYOUT.packed)
    try:
        copy = ended(copies, copies.out([(1, 0), (2, 1), (0, 2)]))
        assert (copy.unkept, _outcome(copy)) == ([1], LOST), "a follower tells its leader"
        kept = ended(copies, copies.out([(0, 3)]))
        assert _outcome(kept) == DONE
        for own, others, unkept in ((copy, DONE, [1]), (kept, LOST, [3]), (kept, DONE, [])):
            leading = LeadingCopy(own, 0, SimpleNamespace(worst=lambda _, others=others: others), [3])  # type: ignore[arg-type]
            assert leading.done()
            assert (leading.failed, leading.unkept) == (False, unkept)
        leading = LeadingCopy(kept, 0, SimpleNamespace(worst=lambda _: BROKEN), [3])  # type: ignore[arg-type]
        assert leading.done()
        assert leading.failed
    finally:
        copies.close()


def published(tiers: Tiers, pages: list[int]) -> list[PrefixEntry]:
    """Each page is the beginning of its own prompt."""
    entries = []
    for page in pages:
        tokens = np.full(LAYOUT.page_size, page, np.int32).tobytes()
        entry = tiers.index.publish(None, PrefixIndex.chain(tiers.index.root(""), tokens), tokens, "")
        assert entry is not None
        tiers.pool.adopt(entry, page)
        entries.append(entry)
        tiers.published(entry)
    return entries


def test_only_the_page_that_does_not_fit_a_tier_is_lost() -> None:
    """Its neighbours in the batch stay, and it is not reported as present."""
    form = LAYOUT.packed
    assert form is not None
    kv = pool_of([PACKS] * 2 + [DOES_NOT] * 2 + [PACKS])
    index = PrefixIndex("m")
    pool = PagePool(len(kv), LAYOUT.page_size, index)
    copies = CpuCopyEngine(kv, 8, form)
    tiers = Tiers(pool, copies, 8, None)
    entries = published(tiers, pool.allocate(4).tolist())
    tiers.drain()
    tiers.check()
    lost = [entry.page for entry in entries if entry.host < 0]
    stats = tiers.stats()["host"]
    assert len(lost) == 1 == stats.failures
    assert stats.raw_pages == 1
    assert stats.bytes_in == 2 * form.nbytes + 2 * form.values
    assert stats.bytes_saved == 2 * (2 * form.values - form.nbytes)
    tiers.close()


def test_a_page_that_does_not_fit_the_disk_stays_on_the_host(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, [PACKS, DOES_NOT, DOES_NOT])
    assert keeper.copies.remainders is not None
    for slot in range(4):
        keeper.copies.remainders.drop(slot)  # of the pages that the keeper stored
    index = PrefixIndex("m")
    pool = PagePool(len(keeper.kv), LAYOUT.page_size, index)
    tiers = Tiers(pool, keeper.copies, 64, keeper.store)
    entries = published(tiers, pool.allocate(3).tolist())
    tiers.flush(60)
    tiers.check()
    assert all(entry.host >= 0 for entry in entries)
    lost = [entry for entry in entries if entry.extent < 0]
    stats = tiers.stats()
    assert (len(lost), stats["ssd"].failures, stats["host"].failures) == (1, 1, 0)
    assert (stats["ssd"].raw_pages, stats["host"].raw_pages) == (1, 2)
    tiers.close()


def test_a_store_of_the_other_format_is_not_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    resets = []
    for form in ("raw", "packed", "packed"):
        harness = Harness(
            "demo", dtype="bfloat16", num_pages=8, host_kv_gib=0.02, ssd_kv_path=str(tmp_path), ssd_kv_gib=0.02,
            tier_kv_format=form,
        )  # fmt: skip
        harness.engine.close()
        resets.append("its pages belong to another model, dtype, rope or --tier-kv-format" in capfd.readouterr().err)
    assert resets == [False, True, False]


def test_nearly_a_third_more_pages_fit(tmp_path: Path) -> None:
    capacity = {}
    for form in ("raw", "packed"):
        harness = Harness(
            "demo", dtype="bfloat16", num_pages=8, host_kv_gib=0.05, ssd_kv_path=str(tmp_path / form), ssd_kv_gib=0.05,
            tier_kv_format=form,
        )  # fmt: skip
        tiers = harness.engine.tiers
        assert tiers is not None
        capacity[form] = [tier.capacity for tier in tiers.stats().values()]
        harness.engine.close()
    host, ssd = (b / a for a, b in zip(capacity["raw"], capacity["packed"], strict=True))
    assert host > 1.24
    assert ssd > 1.22


def test_unsupported_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match="they are float32"):
        Harness("demo", dtype="float32", host_kv_gib=0.1, tier_kv_format="packed")
    with pytest.raises(ValueError, match="tier_kv_format needs host_kv_gib"):
        EngineConfig(model="demo", tier_kv_format="packed")
