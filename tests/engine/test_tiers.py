"""Whole engines with tiers below the GPU pool give the same tokens as without them, wherever the pages have been."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from conversations import Conversations
from harness import GREEDY, Harness
from tiny import save_tiny
from tokenizers import Tokenizer

from weft.engine.demo import MODEL_PATH
from weft.engine.errors import ConfigError
from weft.engine.memory.store_file import FILE_NAME, StoreFile
from weft.engine.memory.tiers import Tiers
from weft.tools.demo.corpus import prompt_ids
from weft.tools.demo.skills import held_out

PAGE = 16
PAGE_BYTES = PAGE * 7 * 2 * 2 * 64 * 4  # of the demo model in float32


def gib(pages: float) -> float:
    return pages * (PAGE_BYTES + 8192) / 2**30


def tiers_of(harness: Harness, load: bool = True) -> Tiers:
    tiers = harness.engine.tiers
    assert tiers is not None
    if load:  # even if this machine's disk is slow compared with its processor
        tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
    return tiers


def small(pages: int, host: float, ssd: Path | None = None, **options: Any) -> Harness:
    if ssd is not None:
        options |= {"ssd_kv_path": str(ssd), "ssd_kv_gib": gib(options.pop("extents", 400))}
    harness = Harness("demo", page_size=PAGE, num_pages=pages, host_kv_gib=gib(host), **options)
    tiers_of(harness)
    return harness


def sink_to_ssd(harness: Harness) -> None:
    """Put every cached page on the SSD, and nowhere else."""
    tiers_of(harness).sink(60)
    harness.engine.scheduler.check()
    entries = harness.engine.scheduler.pool.index.entries()
    assert all(e.page < 0 and e.host < 0 and e.extent >= 0 for e in entries), harness.engine.stats().scheduler.tiers


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))


def turns(tokenizer: Tokenizer, count: int, tokens: int) -> list[tuple[np.ndarray, str]]:
    return [(np.array(prompt_ids(tokenizer, e)), e.answer) for e in held_out("recall", count, 9, context_tokens=tokens)]


def ask(harness: Harness, prompts: list[np.ndarray], max_tokens: int = 24) -> tuple[list[list[int]], list[int]]:
    handles = [harness.add(p, max_tokens=max_tokens, **GREEDY) for p in prompts]
    harness.run()
    return [harness.tokens[h] for h in handles], [harness.cached[h] for h in handles]


def test_64_conversations_stay_right_after_every_page_has_been_on_the_ssd(tmp_path: Path) -> None:
    talk = Conversations(64, 100)
    # A pool for fewer than ten of them; the host holds all, so that the disk gets every page even if it is slow.
    pages = 9 * (len(max(talk.prompts, key=len)) // PAGE + 4)
    plain = Harness("demo", page_size=PAGE, num_pages=64 * pages // 9, prefix_caching=False)
    harness = small(pages, 600, tmp_path, extents=600)
    harness.poison_pages()
    kept = [0] * 64
    for _ in range(2):
        expected, answers = talk.ask(plain), talk.ask(harness)
        assert answers.tokens == expected.tokens
        assert answers.right >= 62
        assert answers.cached == kept, harness.engine.stats().scheduler.tiers
        sink_to_ssd(harness)
        # The last token of an answer is not in the KV cache.
        kept = [(len(p) + len(t) - 1) // PAGE * PAGE for p, t in zip(talk.prompts, answers.tokens, strict=True)]
        talk.go_on(answers)
    stats = harness.engine.stats().scheduler.tiers
    assert stats["gpu"].hit_tokens == stats["host"].hit_tokens == 0, stats
    assert not any(s.failures for s in stats.values()), stats


def test_a_slow_disk_costs_only_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    really = StoreFile.write_extent
    monkeypatch.setattr(StoreFile, "write_extent", lambda *a: (go_on.wait(), really(*a))[1])
    monkeypatch.setattr("weft.engine.memory.ssd_tier.IO_TIMEOUT_SECONDS", 300.0)
    talk = Conversations(16, 100)
    expected = talk.ask(Harness("demo", page_size=PAGE, num_pages=200, prefix_caching=False))
    harness = small(60, 40, tmp_path)
    handles = [harness.add(p, max_tokens=12, **GREEDY) for p in talk.prompts]
    while harness.engine.has_work:
        harness.step()
    assert [harness.tokens[h] for h in handles] == expected.tokens
    stats = harness.engine.stats().scheduler.tiers
    assert stats["host"].evictions > 0, stats
    assert stats["ssd"].bytes_in == 0, stats
    go_on.set()
    sink_to_ssd(harness)
    again = talk.ask(harness)
    assert again.tokens == expected.tokens
    stats = harness.engine.stats().scheduler.tiers
    assert 0 < stats["ssd"].hit_tokens < sum((len(p) - 1) // PAGE * PAGE for p in talk.prompts), stats
    assert stats["ssd"].up, stats
    assert not any(s.failures for s in stats.values()), stats


def test_a_restart_finds_stored_pages(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompts = [prompt for prompt, _ in turns(tokenizer, 4, 200)]
    first = small(200, 200, tmp_path)
    answers, _ = ask(first, prompts)
    first.engine.close()
    again = small(200, 200, tmp_path)
    later, cached = ask(again, prompts)
    assert later == answers
    assert cached == [(len(p) - 1) // PAGE * PAGE for p in prompts]
    again.engine.close()


def test_another_checkpoint_at_the_same_path_hits_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"page_size": 8, "num_pages": 64, "host_kv_gib": 0.01}
    prompt, cached = np.arange(3, 60), []
    for scale in (1.0, 1.0, 1.5):
        model = save_tiny("yi", tmp_path / "model") if scale == 1.0 and not cached else tmp_path / "model"
        if scale != 1.0:
            save_tiny("yi", tmp_path / "model", initializer_range=0.3)
        harness = Harness(model, ssd_kv_path=str(tmp_path / "kv"), ssd_kv_gib=0.01, **options)
        tiers_of(harness)
        handle = harness.add(prompt, max_tokens=4, **GREEDY)
        harness.run()
        cached.append(harness.cached[handle])
        harness.engine.close()
    assert cached == [0, 56, 0]


def test_keys_rotated_for_shorter_contexts_hit_nothing(tmp_path: Path) -> None:
    """Longrope uses other frequencies if contexts may be longer than the original ones."""
    positions = {"max_position_embeddings": 1024, "original_max_position_embeddings": 256}
    model, cached = save_tiny("phi4", tmp_path / "model", **positions), []
    options: dict[str, Any] = {"page_size": 8, "num_pages": 128, "host_kv_gib": 0.01, "ssd_kv_gib": 0.01}
    for longest in (200, 250, 700, 900):
        harness = Harness(model, ssd_kv_path=str(tmp_path / "kv"), max_model_len=longest, **options)
        tiers_of(harness)
        handle = harness.add(np.arange(3, 60), max_tokens=4, **GREEDY)
        harness.run()
        cached.append(harness.cached[handle])
        harness.engine.close()
    assert cached == [0, 56, 0, 56]


def test_a_preempted_request_resumes_from_the_host(tokenizer: Tokenizer) -> None:
    prompts = [prompt for prompt, _ in turns(tokenizer, 6, 120)]
    expected, _ = ask(Harness("demo", page_size=PAGE, num_pages=400, prefix_caching=False), prompts)
    harness = small(40, 200, max_num_batched_tokens=128)
    harness.expect_short_outputs()
    harness.poison_pages()
    # With a stop token its length is a guess, and the guess is short: memory runs out.
    handles = [harness.add(p, max_tokens=100, ignore_eos=True, stop_token_ids=[2], **GREEDY) for p in prompts]
    harness.run()
    for handle, tokens in zip(handles, expected, strict=True):
        assert harness.tokens[handle][: len(tokens)] == tokens
    assert harness.engine.scheduler.preemptions > 0
    assert harness.engine.stats().scheduler.tiers["host"].bytes_out > 0


def test_corrupted_pages_are_computed_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompts = [prompt for prompt, _ in turns(tokenizer, 4, 200)]
    harness = small(64, 60, tmp_path)
    answers, _ = ask(harness, prompts)
    sink_to_ssd(harness)
    store = tiers_of(harness).ssd.store
    geometry = store.file.geometry  # type: ignore[union-attr]
    rng = Random(3)
    with (tmp_path / FILE_NAME).open("r+b") as f:
        for extent in range(0, geometry.num_extents, 3):
            at = geometry.extent_at(extent) + rng.randrange(geometry.payload_bytes)
            f.seek(at)
            byte = f.read(1)
            f.seek(at)
            f.write(bytes([byte[0] ^ 4]))
    again, cached = ask(harness, prompts)
    assert again == answers
    assert all(0 <= c < len(p) for c, p in zip(cached, prompts, strict=True))
    stats = harness.engine.stats().scheduler.tiers["ssd"]
    assert stats.failures > 0
    assert stats.up


def test_a_failing_disk_disables_the_tier_with_one_line(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = [prompt for prompt, _ in turns(tokenizer, 4, 200)]
    harness = small(64, 60, tmp_path)
    answers, _ = ask(harness, prompts)
    sink_to_ssd(harness)

    def refuse(*_: object) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(StoreFile, "read_extent", refuse)
    monkeypatch.setattr(StoreFile, "write_extent", refuse)
    again, _ = ask(harness, prompts)
    assert again == answers
    assert not harness.engine.stats().scheduler.tiers["ssd"].up
    lines = [line for line in capfd.readouterr().err.splitlines() if "SSD" in line]
    assert len(lines) == 1
    assert "EIO" in lines[0]


def test_a_full_disk_disables_the_tier_with_one_line(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = [prompt for prompt, _ in turns(tokenizer, 4, 100)]
    harness = small(64, 60, tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StoreFile, "write_extent", refuse)
    answers, _ = ask(harness, prompts)
    tiers_of(harness).flush(60)
    assert not harness.engine.stats().scheduler.tiers["ssd"].up
    lines = [line for line in capfd.readouterr().err.splitlines() if "SSD" in line]
    assert len(lines) == 1
    assert "ENOSPC" in lines[0]
    again, cached = ask(harness, prompts)
    assert again == answers
    assert all(cached)


def test_a_disk_that_does_not_answer_is_given_up(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt, _), *_ = turns(tokenizer, 1, 200)
    harness = small(64, 60, tmp_path)
    answers, _ = ask(harness, [prompt])
    sink_to_ssd(harness)
    really = StoreFile.read_extent
    monkeypatch.setattr(StoreFile, "read_extent", lambda *a: (time.sleep(1.5), really(*a))[1])
    monkeypatch.setattr("weft.engine.memory.ssd_tier.IO_TIMEOUT_SECONDS", 0.2)
    again, cached = ask(harness, [prompt])
    assert (again, cached) == (answers, [0])
    assert not harness.engine.stats().scheduler.tiers["ssd"].up


def test_aborts_while_pages_load_lose_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompts = [prompt for prompt, _ in turns(tokenizer, 6, 200)]
    harness = small(64, 60, tmp_path)
    ask(harness, prompts)
    sink_to_ssd(harness)
    handles = [harness.add(p, max_tokens=24, **GREEDY) for p in prompts]
    harness.run(lambda step: harness.engine.abort(handles[step % 6]) if step % 2 else None)
    assert set(handles) <= set(harness.finish)


def test_a_second_engine_on_one_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.memory.tier_setup.LOCK_PATIENCE_SECONDS", 0.1)
    first = small(64, 60, tmp_path)
    with pytest.raises(ConfigError, match="in use"):
        small(64, 60, tmp_path)
    first.engine.close()


def test_a_reset_empties_every_tier(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompts = [prompt for prompt, _ in turns(tokenizer, 3, 200)]
    harness = small(64, 60, tmp_path)
    ask(harness, prompts)
    harness.engine.reset_prefix_cache()
    harness.engine.scheduler.check()
    _, cached = ask(harness, prompts)
    assert cached == [0, 0, 0]


def test_a_reset_that_fails_on_disk_disables_the_tier_and_restores_nothing(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = [prompt for prompt, _ in turns(tokenizer, 3, 200)]
    harness = small(64, 60, tmp_path)
    answers, _ = ask(harness, prompts)
    sink_to_ssd(harness)

    def refuse(_: StoreFile) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(StoreFile, "new_epoch", refuse)
        harness.engine.reset_prefix_cache()
    harness.engine.scheduler.check()
    assert ask(harness, prompts) == (answers, [0, 0, 0])
    assert not harness.engine.stats().scheduler.tiers["ssd"].up
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "SSD" in line]
    assert f"switched off: its pages cannot be cleared (EIO Input/output error), so {tmp_path / FILE_NAME} was" in line
    harness.engine.close()
    assert ask(small(64, 60, tmp_path), prompts) == (answers, [0, 0, 0])


@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.parametrize("broken", ["write_extent", "read_extent"])
def test_the_ssd_tier_comes_back_with_its_pages_once_its_disk_works(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, cleared: bool
) -> None:
    monkeypatch.setattr("weft.engine.memory.ssd_tier.REOPEN_SECONDS", 0.02)
    prompts = [prompt for prompt, _ in turns(tokenizer, 5, 200)]
    harness = small(64, 60, tmp_path)
    answers, _ = ask(harness, prompts[:3])
    sink_to_ssd(harness)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def up() -> bool:
        tiers_of(harness).pump()
        return harness.engine.stats().scheduler.tiers["ssd"].up

    with monkeypatch.context() as patch:
        for name in (broken, "_write_durably"):
            patch.setattr(StoreFile, name, refuse)
        assert ask(harness, prompts[:3] if broken == "read_extent" else prompts[3:])[0]
        tiers_of(harness).flush(60)
        assert not up()
        if cleared:
            harness.engine.reset_prefix_cache()
        assert ask(harness, prompts[:1])[0] == answers[:1]
    end = time.monotonic() + 240
    while not up():
        assert time.monotonic() < end
        time.sleep(0.01)
    harness.engine.scheduler.check()
    found, cached = ask(harness, prompts[1:3])
    assert found == answers[1:3]
    assert all(cached) != cleared
    sink_to_ssd(harness)
    assert ask(harness, prompts[:3])[0] == answers


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"host_kv_gib": 1e-6}, "host-kv-gib"),
        ({"host_kv_gib": 1e6}, "host-kv-gib"),
        ({"host_kv_gib": 0.01, "ssd_kv_path": "/tmp/none", "ssd_kv_gib": 1e-6}, "ssd-kv-gib"),
    ],
)
def test_impossible_tiers_are_a_one_line_error(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        Harness("demo", num_pages=8, **options)
    assert "\n" not in str(error.value)
