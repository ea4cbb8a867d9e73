"""A system clock that is wrong for a while, in either direction, deletes nothing and ages nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from stub import serving

from weft.server.api.responses.store import Store
from weft.server.batches.files import DAY, LEFT_OVER_SECONDS
from weft.server.batches.records import Batch, Folder
from weft.server.observe import steady_clock
from weft.server.observe.steady_clock import LASTING, STEP, SteadyClock

YEAR = 365 * DAY
WRONG = [-30 * YEAR, -2 * STEP, 2 * STEP, DAY, 31 * YEAR]


class Clocks:
    """The system clock and the time since the machine started, in seconds after their real values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.up, self.machine = 0.0, 0.0, "one"
        begun, up = time.time(), steady_clock.boottime()
        monkeypatch.setattr(time, "time", lambda: begun + self.wall)
        monkeypatch.setattr(steady_clock, "boottime", lambda: up + self.up)
        monkeypatch.setattr(steady_clock, "_machine", lambda: self.machine)

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.up += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def stored(store: Store, id: str) -> bool:
    return store._db.execute("select 1 from documents where id = ?", (id,)).fetchone() is not None


def opened(folder: Path | None) -> Store:
    return Store(None if folder is None else str(folder), max_bytes=2**20, max_seconds=30 * DAY)


@pytest.mark.parametrize("jump", WRONG)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_response_outlives_a_wrong_clock(tmp_path: Path, clocks: Clocks, jump: float, restarted: bool) -> None:
    store = opened(tmp_path)
    store.put("old", "", {})
    clocks.wall += jump
    if restarted:  # an API process that starts while the clock is wrong
        store.close()
        store = opened(tmp_path)
    assert store.get("old", "") is not None
    store.put("meanwhile", "", {})
    store.add_items("meanwhile", [{"id": "a"}], 9)
    clocks.wall -= jump
    clocks.passes(10)
    store.put("new", "", {})
    assert [stored(store, id) for id in ("old", "meanwhile", "new")] == [True] * 3
    clocks.passes(20 * DAY)
    assert store.get("old", "") is not None
    clocks.passes(20 * DAY)
    store.put("last", "", {})
    assert stored(store, "old")
    clocks.passes(31 * DAY)
    store.put("later", "", {})
    assert not stored(store, "old"), "a use in the future does not keep it for ever"
    store.close()


def test_a_start_that_cannot_read_the_clock_file_deletes_nothing(tmp_path: Path, clocks: Clocks) -> None:
    """Chaos found it: an API process started while the disk failed and the system clock was wrong."""
    store = opened(tmp_path)
    store.put("old", "", {})
    file, away = tmp_path / "clock.json", tmp_path / "away.json"
    file.rename(away)
    file.mkdir()  # reading it is an error now
    clocks.wall += 31 * YEAR
    other = opened(tmp_path)
    other.put("meanwhile", "", {})
    assert stored(other, "old")
    file.rmdir()
    away.rename(file)
    clocks.passes(100)
    other.put("later", "", {})
    assert stored(other, "old")
    clocks.wall -= 31 * YEAR
    clocks.passes(100)
    other.put("last", "", {})
    assert stored(other, "old")
    store.close()
    other.close()


@pytest.mark.parametrize("jump", WRONG)
def test_files_and_batches_outlive_a_wrong_clock(tmp_path: Path, clocks: Clocks, jump: float) -> None:
    folder = Folder.open(str(tmp_path), 1)

    def add() -> str:
        upload = folder.files.begin()
        upload.path.write_bytes(b"{}")
        return folder.files.take(upload.path, filename="f", purpose="batch", owner="").id

    now = int(time.time())
    about = {"endpoint": "/v1/completions", "completion_window": "24h", "owner": "", "status": "completed"}
    batch = Batch(id=folder.batches.new_id(), input_file_id="", created_at=now, expires_at=now + DAY, **about)
    folder.batches.save(batch)
    old = add()
    clocks.wall += jump
    folder = Folder.open(str(tmp_path), 1)
    during, uploading = add(), folder.files.begin()
    created = int(time.time())
    later = Batch(id=folder.batches.new_id(), input_file_id="", created_at=created, expires_at=created + DAY, **about)
    folder.batches.save(later)
    for _ in range(2):
        folder.files.sweep()
        folder.batches.sweep()
        assert folder.files.get(old, "") is not None
        assert folder.files.get(during, "") is not None
        assert folder.batches.get(batch.id, "") is not None
        assert folder.batches.get(later.id, "") is not None
        assert uploading.path.exists()
        clocks.wall -= jump
        jump = 0.0
    uploading.close()
    clocks.passes(31 * DAY)
    folder.files.sweep()
    folder.batches.sweep()
    assert folder.files.get(old, "") is None
    assert folder.files.get(during, "") is None, "a clock that was ahead does not keep it for ever"
    assert folder.batches.get(batch.id, "") is None
    assert folder.batches.get(later.id, "") is None
    assert LEFT_OVER_SECONDS < 31 * DAY


def test_a_clock_follows_small_steps_at_once_and_others_once_they_last(clocks: Clocks) -> None:
    clock = SteadyClock()
    clocks.wall += STEP - 1
    assert clock.latest() == clock.earliest() == time.time()
    clocks.wall += YEAR
    before = clock.earliest()
    assert clock.latest() == time.time()
    clocks.passes(LASTING - 1)
    assert clock.earliest() == pytest.approx(before + LASTING - 1)
    clocks.passes(1)
    assert clock.latest() == clock.earliest() == time.time()


def test_two_wrong_clocks_are_not_one_that_lasts(clocks: Clocks) -> None:
    clock = SteadyClock()
    before = clock.earliest()
    for _ in range(4):
        clocks.wall += YEAR
        clock.earliest()
        clocks.passes(LASTING / 2)
        assert clock.earliest() <= before + 4 * LASTING


def test_the_time_is_kept_over_a_restart_of_process_and_machine(tmp_path: Path, clocks: Clocks) -> None:
    file = tmp_path / "clock.json"
    begun = SteadyClock(file).earliest()
    clocks.wall += YEAR
    clocks.up += 100
    assert SteadyClock(file).earliest() == pytest.approx(begun + 100)
    clocks.machine, clocks.up = "two", -1e6
    assert SteadyClock(file).earliest() == pytest.approx(begun, abs=101)
    file.write_bytes(b"\0")
    assert SteadyClock(file).earliest() == time.time()
    SteadyClock(tmp_path / "missing" / "clock.json").save()


@pytest.mark.asyncio
async def test_a_models_last_use_does_not_move_back_with_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that was used longest ago is the first to sleep."""
    async with serving(admin_api_key="root") as server:
        shared_state = server.service.shared_state
        await server.complete()
        before = float(shared_state.used[0])
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now - 30 * YEAR)
        await server.complete()
        assert float(shared_state.used[0]) >= before
        monkeypatch.undo()
        headers = {"Authorization": "Bearer root"}
        shown = (await server.http.get("/admin/models", headers=headers)).json()["models"][0]["last_used"]
        assert now - 1 <= shown <= time.time()
