"""A follower of a prefix index's news has its pages, whenever it started."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.config import EngineConfig, Share
from weft.engine.errors import OutOfMemory
from weft.engine.memory.index_events import PageLedger
from weft.engine.memory.prefix_index import NOWHERE, PrefixIndex
from weft.engine.model.directory import read_spec
from weft.engine.runner.options import footprint
from weft.engine.runner.options.resolve import resolve
from weft.engine.wire.messages import PageChanges
from weft.engine.wire.page_keys import BRIEF

STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "tell", "join", "clear"]), st.integers(0, 7)), max_size=60
)


def split(pages: bytes) -> set[bytes]:
    return {pages[i : i + BRIEF] for i in range(0, len(pages), BRIEF)}


@given(STEPS)
def test_news_from_any_moment_lead_to_the_current_pages(steps: list[tuple[str, int]]) -> None:
    index = PrefixIndex("m")
    ledger = PageLedger(index)
    followers: list[set[bytes]] = []

    def tell() -> None:
        news = ledger.take()
        assert isinstance(news, PageChanges)
        for follower in followers:
            follower |= split(news.entered)
            follower -= split(news.left)

    for what, i in [*steps, ("tell", 0)]:
        key = index.chain(index.root(""), bytes([i]))
        entry = index.find(key)
        if what == "enter" and entry is None:
            index.publish(None, key, bytes([i]), "")
            index.set_page(index.find(key), i + 1)
        elif what == "leave" and entry is not None:
            index.set_page(entry, NOWHERE)
        elif what == "clear":
            index.clear()
        elif what == "join":
            followers.append(split(ledger.all()))  # unreported news are reported again
        elif what == "tell":
            tell()
    assert all(follower == {entry.key[:BRIEF] for entry in index.entries()} for follower in followers)


def test_engines_that_share_a_machine_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = EngineConfig(device="cpu", max_num_seqs=4096, page_size=64, dtype="float32")
    spec = read_spec(alone.model_path)
    monkeypatch.setattr(footprint, "memory_bytes", lambda _: 2**30)

    def pages(sharers: int, **more: object) -> int:
        found = resolve(alone.model_copy(update={"share": Share(sharers=sharers), **more}), spec)
        assert found.num_pages is not None
        return found.num_pages

    assert 3 * pages(3) < pages(1)
    assert pages(1, num_pages=1000) == pages(2, num_pages=1000) == 1000
    with pytest.raises(OutOfMemory, match=r"4 engines need .* --kv-cache-gib, --num-pages or --host-kv-gib"):
        pages(4, kv_cache_gib=0.3)
    with pytest.raises(OutOfMemory, match="for each of 100 engines"):
        pages(100)
    in_common = {"share": Share(sharers=3, weight_sharers=3)}
    assert 3 * pages(3, **in_common) <= pages(1) < 3 * pages(3, **in_common) + 3
    assert pages(100, share=Share(sharers=100, weight_sharers=100)) > 1
