"""The response store: limits, processes that share it, and its state after a restart."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from weft.engine.errors import ConfigError
from weft.server.api.responses import store as store_module
from weft.server.api.responses.store import FILE, Store
from weft.server.config import ServeConfig
from weft.server.daemon.daemon import run
from weft.server.errors import ApiError


def opened(folder: Path | None = None, max_bytes: int = 2**20, max_seconds: float = 3600) -> Store:
    return Store(None if folder is None else str(folder), max_bytes=max_bytes, max_seconds=max_seconds)


async def ids(store: Store) -> list[str]:
    return await store.run(lambda: [id for (id,) in store._db.execute("select id from documents order by used")])


@pytest.mark.asyncio
async def test_the_least_recently_used_is_removed_first() -> None:
    store = opened(max_bytes=1000)
    for i in range(9):
        await store.run(store.put, str(i), "", {"text": "x" * 189})
        await store.run(store.get, "0", "")
    assert await ids(store) == ["5", "6", "7", "8", "0"]
    assert not await store.run(store.put, "large", "", {"text": "x" * 1000})
    assert await ids(store) == ["5", "6", "7", "8", "0"]
    await store.run(store.add_items, "8", [{"id": "i", "text": "x" * 500}], 10)
    assert await ids(store) == ["0", "8"]
    assert await store.run(store.delete_item, "8", "i")
    (totals,) = await store.run(lambda: store._db.execute("select count, bytes from totals").fetchall())
    assert totals == (2, 400)
    store.close()


@pytest.mark.asyncio
async def test_the_number_of_responses_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_COUNT", 3)
    store = opened()
    for i in range(5):
        await store.run(store.put, str(i), "", {})
    assert await ids(store) == ["2", "3", "4"]
    store.close()


@pytest.mark.asyncio
async def test_unused_responses_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(max_seconds=100)
    await store.run(store.put, "old", "", {})
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 200)
    await store.run(store.put, "new", "", {})
    assert await ids(store) == ["new"]
    store.close()


@pytest.mark.asyncio
async def test_processes_share_a_folder_and_it_outlives_them(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "new" / "folder"), opened(tmp_path / "new" / "folder")
    await one.run(one.put, "a", "me", {"n": 1})
    await one.run(one.add_events, "a", b"event")
    found = await other.run(other.get, "a", "me")
    assert found is not None
    assert found.body == {"n": 1}
    assert await other.run(other.events, "a", -1) == ([b"event"], 0)
    assert await other.run(other.get, "a", "you") is None
    assert await other.run(other.cancel, "a", "me")
    assert not await one.run(one.heartbeat, "a")
    one.close()
    other.close()
    assert (tmp_path / "new" / "folder" / FILE).stat().st_mode & 0o77 == 0
    third = opened(tmp_path / "new" / "folder")
    assert await third.run(third.delete, "a", "me")
    assert await third.run(third.events, "a", -1) == ([], -1)
    third.close()


@pytest.mark.asyncio
async def test_a_failed_write_leaves_nothing_behind() -> None:
    store = opened()

    def half() -> None:
        store.put("a", "", {})
        raise KeyError

    with pytest.raises(KeyError):
        await store.run(half)
    assert await ids(store) == []
    await store.run(lambda: store._db.execute("select 1"))
    with pytest.raises(ApiError, match="response store"):
        await store.run(lambda: store._db.execute("select nothing from nowhere"))
    store.close()


@pytest.mark.asyncio
async def test_an_unusable_folder_is_reported_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--responses-dir"):
        opened(tmp_path / "file")
    (tmp_path / FILE).write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="--responses-dir"):
        opened(tmp_path)


def test_the_daemon_reports_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run(ServeConfig(responses_dir=str(tmp_path / "file"), port=0)) == 2
    assert "--responses-dir" in capsys.readouterr().err


def test_no_folder_shared_by_api_processes_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert run(ServeConfig(api_workers=2, port=0)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "set TMPDIR" in line
