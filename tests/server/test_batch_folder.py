"""The folder of `--files-dir`: whole files at any moment, one owner, nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.engine.errors import ConfigError
from weft.server.batches import runner as runner_module
from weft.server.batches.files import DAY
from weft.server.batches.lines import AnswerFile, BatchLine, answer
from weft.server.batches.records import Batch, Folder
from weft.server.batches.runner import Reply, Runner
from weft.server.batches.work import begin
from weft.server.config import ServeConfig
from weft.server.daemon.daemon import run


def lines(count: int) -> bytes:
    each = {"url": "/v1/chat/completions", "body": {"messages": []}}
    return b"".join(json.dumps({"custom_id": f"r{i}", **each}).encode() + b"\n" for i in range(count))


def test_an_unusable_folder_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--files-dir"):
        Folder.open(str(tmp_path / "file"), 1)
    assert run(ServeConfig(files_dir=str(tmp_path / "file"), port=0)) == 2
    assert "--files-dir" in capsys.readouterr().err


def entered(folder: Folder, count: int, owner: str = "") -> Batch:
    upload = folder.files.begin()
    upload.write(lines(count))
    upload.end()
    file = folder.files.take(upload.path, filename="f", purpose="batch", owner=owner)
    batch = Batch(
        id=folder.batches.new_id(), endpoint="/v1/chat/completions", input_file_id=file.id, completion_window="24h",
        created_at=int(time.time()), expires_at=int(time.time()) + 99, owner=owner,
    )  # fmt: skip
    folder.batches.create(batch)
    return batch


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def settle(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("where", "end"),
    [("states", "completed"), *itertools.product(("answers", "all"), ("completed", "cancelled", "expired"))],
)
async def test_a_full_disk_is_waited_out_and_no_request_is_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str, where: str
) -> None:
    for name in ("POLL_SECONDS", "SAVE_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(runner_module, name, 0.01)
    folder, requested, closing = Folder.open(str(tmp_path), 1), list[str](), list[bool]()
    batch, beside = entered(folder, 40), entered(folder, 1, "other")
    is_full, is_free = asyncio.Event(), asyncio.Event()

    async def ask(line: BatchLine, owner: str) -> Reply:
        requested.append(owner + line.custom_id)
        if owner:  # it runs all the time
            await is_free.wait()
        elif len(requested) > 12:
            await is_full.wait()
        return Reply(200, b"{}", "id", None)

    runner = Runner(folder.files, folder.batches, ask, lambda own: 6 - own, lambda: bool(closing))
    running = asyncio.create_task(runner.run())
    await settle(lambda: len(requested) > 12)
    with monkeypatch.context() as full:
        if where != "states":
            full.setattr(AnswerFile, "add", no_space)
        if where != "answers":
            full.setattr(Path, "write_bytes", no_space)
        work = runner._works[batch.id]
        is_full.set()
        await settle(lambda: any("waits for the disk" in record.message for record in caplog.records))
        if end == "cancelled":
            (folder.batches.root / f"{batch.id}.cancel").touch()
        elif end == "expired":
            work.batch.expires_at = 0
        await asyncio.sleep(0.1)
        before = len(requested)
        await asyncio.sleep(0.1)
        assert len(requested) == before, "nothing more is asked"
        assert before < 41 or where == "states"
        assert len(list(tmp_path.rglob("*.new"))) == 0, "nothing is left behind"
    is_free.set()
    await settle(lambda: not folder.batches.open())
    closing.append(True)
    await running
    assert len(requested) == len(set(requested))
    ended, other = folder.batches.get(batch.id, ""), folder.batches.get(beside.id, "other")
    assert ended is not None
    assert other is not None
    assert (ended.status, other.status) == (end, "completed")
    written = [json.loads(line) for id in (ended.output_file_id, ended.error_file_id) if id is not None
               for line in folder.files.content(id).read_bytes().splitlines()]  # fmt: skip
    assert sorted(line["custom_id"] for line in written) == sorted(f"r{i}" for i in range(40))
    assert sum(line["response"] is not None for line in written) == len(requested) - 1
    reported = [record.message for record in caplog.records if "waits for the disk" in record.message]
    assert sorted(reported) == sorted(set(reported)), "once a minute and batch"


async def test_a_batch_that_cannot_start_for_lack_of_space_starts_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.open(str(tmp_path), 1)
    batch = entered(folder, 2)
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", no_space)
        for _ in range(2):  # it holds no lock that it would find
            with pytest.raises(OSError, match="No space"):
                begin(batch, folder.files, folder.batches)
    work = begin(batch, folder.files, folder.batches)
    assert work is not None
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        with pytest.raises(OSError, match="No space"):
            work.finish("completed", folder.files, folder.batches)
    assert begin(batch, folder.files, folder.batches) is not None


@pytest.mark.parametrize("moment", ["states saved", "output handed over"])
def test_a_kill_while_the_output_is_published(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder.open(str(tmp_path), 1)
    batch = entered(folder, 2)
    work = begin(batch, folder.files, folder.batches)
    assert work is not None
    while (line := work.next()) is not None:
        work.add(line, answer(line, "id", 200, b"{}"), failed=False)

    def kill(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "states saved":
            patch.setattr(folder.files, "take", kill)
        else:
            patch.setattr(Batch, "enter", lambda b, s: kill() if s == "completed" else setattr(b, "status", s))
        with pytest.raises(KeyboardInterrupt):
            work.finish("completed", folder.files, folder.batches)
    (again,) = Folder.open(str(tmp_path), 1).batches.open()
    assert again.status == "finalizing"
    assert begin(again, folder.files, folder.batches) is None
    ended = folder.batches.get(batch.id, "")
    assert ended is not None
    assert (ended.status, ended.error_file_id) == ("completed", None)
    assert folder.files.content(str(ended.output_file_id)).read_bytes().count(b"\n") == 2
    assert not [p for p in folder.batches.root.iterdir() if p.suffix in (".out", ".err")]


def test_one_process_owns_the_folder_and_its_lock_is_released_with_it(tmp_path: Path) -> None:
    batches = Folder.open(str(tmp_path), 1).batches
    mine = batches.try_own()
    assert mine is not None
    assert batches.try_own() is None
    os.close(mine)
    mine = batches.try_own()
    assert mine is not None
    os.close(mine)


def test_expired_and_orphaned_files_are_removed(tmp_path: Path) -> None:
    folder = Folder.open(str(tmp_path), 1)
    batch = entered(folder, 1)
    file = folder.files.get(batch.input_file_id, "")
    assert file is not None
    stays = entered(folder, 1).input_file_id
    old = time.time() - 40 * DAY
    left = folder.files.begin().path
    os.utime(left, (old, old))
    about = folder.files._description(file.id)
    about.write_bytes(about.read_bytes().replace(str(file.expires_at).encode(), b"1"))
    assert folder.files.get(file.id, "") is None
    folder.files.sweep()
    assert not left.exists()
    assert not folder.files.content(file.id).exists()
    assert folder.files.get(stays, "") is not None
    # Its batch fails, and is deleted a month later.
    assert begin(batch, folder.files, folder.batches) is None
    assert batch.status == "failed"
    batch.created_at = int(old)
    folder.batches.save(batch)
    path = folder.batches.root / f"{batch.id}.json"
    os.utime(path, (old, old))
    folder.batches.sweep()
    assert not path.exists()
    assert len(folder.batches.open()) == 1


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AnswerFile(tmp_path / "out")
    line = BatchLine("a", "", {})
    file.add("a", answer(line, "id", 200, b"{}"), failed=False)
    size, write = (tmp_path / "out").stat().st_size, os.write
    calls = iter([lambda fd, data: write(fd, data[:10]), lambda *_: (_ for _ in ()).throw(OSError(28, "full"))])
    monkeypatch.setattr(os, "write", lambda fd, data: next(calls)(fd, data))
    with pytest.raises(OSError, match="full"):
        file.add("b", answer(line, "id", 200, b"{}"), failed=False)
    assert (tmp_path / "out").stat().st_size == size
    assert file.done == {"a"}
