"""The folder of `--files-dir`: whole files at any moment, one owner, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from weft.engine.errors import ConfigError
from weft.server.batches.answers import AnswerFile
from weft.server.batches.files import DAY
from weft.server.batches.folder import Folder
from weft.server.batches.lines import BatchLine, answer
from weft.server.batches.records import Batch
from weft.server.batches.runner import Reply, Runner
from weft.server.batches.work import begin
from weft.server.config import ServeConfig
from weft.server.daemon.daemon import run


def lines(count: int) -> bytes:
    each = {"url": "/v1/chat/completions", "body": {"messages": []}}
    return b"".join(json.dumps({"custom_id": f"r{i}", **each}).encode() + b"\n" for i in range(count))


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--files-dir"):
        Folder.open(str(tmp_path / "file"), 1)
    assert run(ServeConfig(files_dir=str(tmp_path / "file"), port=0)) == 2
    assert "--files-dir" in capsys.readouterr().err


def entered(folder: Folder, count: int) -> Batch:
    upload = folder.files.begin()
    upload.write(lines(count))
    upload.end()
    file = folder.files.take(upload.path, filename="f", purpose="batch", owner="")
    batch = Batch(
        id=folder.batches.new_id(), endpoint="/v1/chat/completions", input_file_id=file.id, completion_window="24h",
        created_at=int(time.time()), expires_at=int(time.time()) + 99, owner="",
    )  # fmt: skip
    folder.batches.create(batch)
    return batch


async def test_a_full_disk_is_told_once_and_every_line_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Folder.open(str(tmp_path), 1)
    work = begin(entered(folder, 9), folder.files, folder.batches)
    assert work is not None
    taken = [line for _ in range(9) if (line := work.next()) is not None]

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def ask(_line: BatchLine, _owner: str) -> Reply:
        return Reply(200, b"{}", "id", None)

    monkeypatch.setattr(AnswerFile, "add", full)
    runner = Runner(folder.files, folder.batches, ask, lambda _: 0, lambda: False)
    for line in taken:
        await runner._answer(work, line)
    assert [record.message for record in caplog.records if "cannot be written: No space left" in record.message] == [
        f"batch {work.batch.id} waits: its answers cannot be written: No space left on device"
    ]
    assert not work.exhausted
    assert [work.next() for _ in taken] == taken
    work.close()


@pytest.mark.parametrize("moment", ["states saved", "output handed over"])
def test_killed_while_it_hands_its_output_over(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_one_process_owns_the_folder_and_its_lock_goes_with_it(tmp_path: Path) -> None:
    batches = Folder.open(str(tmp_path), 1).batches
    mine = batches.own()
    assert mine is not None
    assert batches.own() is None
    os.close(mine)
    mine = batches.own()
    assert mine is not None
    os.close(mine)


def test_what_has_expired_or_was_left_behind_is_removed(tmp_path: Path) -> None:
    folder = Folder.open(str(tmp_path), 1)
    batch = entered(folder, 1)
    file = folder.files.get(batch.input_file_id, "")
    assert file is not None
    stays = entered(folder, 1).input_file_id
    old = time.time() - 40 * DAY
    left = folder.files.begin().path
    os.utime(left, (old, old))
    about = folder.files._about(file.id)
    about.write_bytes(about.read_bytes().replace(str(file.expires_at).encode(), b"1"))
    assert folder.files.get(file.id, "") is None
    folder.files.sweep()
    assert not left.exists()
    assert not folder.files.content(file.id).exists()
    assert folder.files.get(stays, "") is not None
    # Its batch fails, and is forgotten a month later.
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
