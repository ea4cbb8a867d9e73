"""The copy engine on a GPU, and the demo model's answers when its pages have left the GPU and returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversations import Conversations
from harness import Harness
from packed_pages import of_kind

from weft.engine.memory.cuda_transfer import CudaCopyEngine
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.memory.transfer import Copy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SMALL = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": 256, "page_size": 16}


def settled(copies: CudaCopyEngine, copy: Copy) -> Copy:
    while not copy.done():
        copies.wait([copy], 1.0)
    return copy


@pytest.mark.parametrize("shape", [(12, 2, 2, 16, 2, 64), (40, 8, 2, 64, 8, 128), (9, 3, 2, 5, 1, 24)])
def test_pages_are_restored_unchanged(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    kv = torch.randn(shape, device="cuda").bfloat16()
    want = kv.clone()
    copies = CudaCopyEngine(kv, 20)
    pages = rng.choice(np.arange(1, shape[0]), 8, replace=False).tolist()
    slots = rng.choice(20, 8, replace=False).tolist()
    settled(copies, copies.out(list(zip(pages, slots, strict=True))))
    for page, slot in zip(pages, slots, strict=True):
        there = torch.from_numpy(copies.host[slot, : copies.sizes.page]).view(torch.bfloat16).view(shape[1:])
        assert torch.equal(there, want[page].cpu())
    kv.zero_()
    torch.cuda.synchronize()
    moved = pages[1:] + pages[:1]
    back = settled(copies, copies.back(list(zip(moved, slots, strict=True))))
    assert back.seconds > 0
    for page, source in zip(moved, pages, strict=True):
        assert torch.equal(kv[page], want[source])
    assert int(kv.abs().sum(dim=tuple(range(1, 6))).count_nonzero()) == 8
    copies.close()


@pytest.mark.parametrize("kinds", [[0] * 9, [0, 1, 0, 3, 1, 4, 7, 2, 0, 8, 8, 0, 0]])
def test_packed_pages_are_restored_unchanged(kinds: list[int]) -> None:
    """Whole batches of them, and some among pages that do not pack."""
    layout = KvLayout(32, 2, 64, 8, 128, torch.bfloat16)
    form, rng = layout.packed, np.random.default_rng(0)
    assert form is not None
    words = np.stack([of_kind(kind, form, rng).reshape(-1) for kind in kinds])
    want = torch.from_numpy(words.view(np.int16)).view(len(kinds), -1)
    kv = want.cuda().view(torch.bfloat16).view(layout.shape(len(kinds)))
    rows = kv.view(len(kinds), -1).view(torch.int16)
    copies = CudaCopyEngine(kv, 400, form=form)
    pages = list(range(1, len(kinds)))
    for turn in (0, 50):
        pairs = [(page, turn + 3 * page) for page in pages]
        copy = settled(copies, copies.out(pairs))
        assert not copy.unkept
        good = np.full(form.nbytes, 0, np.uint8)
        assert sorted(copy.raw) == [s for p, s in pairs if not form.pack(words[p].view(np.uint8), good)]
    kv.view(torch.int16).fill_(-1)
    torch.cuda.synchronize()
    moved = [(page, 50 + 3 * source) for page, source in zip(pages, pages[::-1], strict=True)]
    back = settled(copies, copies.back(moved))
    assert back.seconds > 0
    for page, source in zip(pages, pages[::-1], strict=True):
        assert torch.equal(rows[page].cpu(), want[source])
    assert (rows[0] == -1).all()
    copies.close()


def test_the_host_pool_is_pinned_and_copies_do_not_wait_for_compute() -> None:
    kv = torch.zeros((16, 4, 2, 64, 8, 128), device="cuda", dtype=torch.bfloat16)
    copies = CudaCopyEngine(kv, 16)
    assert torch.from_numpy(copies.host).is_pinned()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    a @ a
    torch.cuda.synchronize()
    for _ in range(200):
        a @ a  # about 0.3 s of work on the stream of computation
    computed = torch.cuda.Event()
    computed.record()
    copy = copies.out([(i, i) for i in range(1, 16)])
    settled(copies, copy)
    assert not computed.query(), "the copy waited for the computation"
    torch.cuda.synchronize()
    copies.close()


def test_a_page_leaves_after_its_gate_in_a_captured_graph() -> None:
    kv = torch.zeros((3, 4, 2, 64, 8, 128), device="cuda", dtype=torch.bfloat16)
    gates = [torch.cuda.Event(external=True) for _ in range(2)]
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def iteration() -> None:
        kv[1:] += 1
        gates[0].record(stream)
        for _ in range(200):
            a @ a  # about 0.3 s
        gates[1].record(stream)

    copies = CudaCopyEngine(kv, 4, gates)
    settled(copies, copies.out([(1, 0), (2, 1)]))  # gates without a recorded event are open
    with torch.cuda.stream(stream):
        iteration()
        settled(copies, copies.out([(1, 0), (2, 1)]))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            iteration()
        pages = torch.from_numpy(copies.host[:, : copies.sizes.page]).view(torch.bfloat16)
        for turn in (2, 3):
            graph.replay()
            end = torch.cuda.Event()
            end.record()
            copy = copies.out([(1, 0), (2, 1)])
            while pages[0, -1] != turn:
                assert not end.query(), "the first page waited for more than its gate"
            assert pages[1, -1] == turn - 1, "the second page did not wait for its gate"
            assert not copy.done()
            settled(copies, copy)
            assert pages[1, -1] == turn
            torch.cuda.synchronize()
    copies.close()


@pytest.mark.parametrize(("ssd", "form"), [(False, "raw"), (True, "raw"), (False, "packed"), (True, "packed")])
def test_recall_is_right_from_every_tier(tmp_path: Path, ssd: bool, form: str) -> None:
    talk = Conversations(64, 900, answer_tokens=30)
    options: dict[str, Any] = {"ssd_kv_path": str(tmp_path), "ssd_kv_gib": 1.0} if ssd else {}
    options["tier_kv_format"] = form
    # 64 conversations of about 60 pages; nine fit the GPU. The host holds all: a slow disk must not lose any.
    plain = Harness("demo", num_pages=4500, prefix_caching=False, **SMALL)
    harness = Harness("demo", num_pages=560, host_kv_gib=0.6, **options, **SMALL)
    harness.poison_pages()
    tiers = harness.engine.tiers
    assert tiers is not None
    tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
    kept = [0] * 64
    for _ in range(3):
        expected, answers = talk.ask(plain), talk.ask(harness)
        stats = harness.engine.stats().scheduler.tiers
        assert answers.right >= max(62, expected.right - 1), (answers.right, expected.right, stats)
        assert answers.cached == kept, stats
        tiers.sink(120)
        entries = harness.engine.scheduler.pool.index.entries()
        assert all(e.page < 0 and (e.extent >= 0 > e.host if ssd else e.host >= 0) for e in entries), stats
        kept = [(len(p) + len(t) - 1) // 16 * 16 for p, t in zip(talk.prompts, answers.tokens, strict=True)]
        talk.go_on(answers)
    stats = harness.engine.stats().scheduler.tiers
    assert not any(s.failures for s in stats.values()), stats
    assert stats["ssd" if ssd else "host"].hit_tokens > 100_000, stats
    assert (stats["host"].bytes_saved > 0) == (form == "packed")
    for used in (plain, harness):
        used.engine.close()
