"""`weft cache stats|verify|clear PATH` on stores in every state: its output, its exit status, and that it ends."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from test_ssd_store import EXTENTS, GEOMETRY, TOKENS, Open, filled

from weft.engine.memory.extent import Record
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.memory.store_file import FILE_NAME, StoreFile
from weft.engine.wire.page_keys import state_tokens
from weft.server.daemon.cli import main

VERBS = pytest.mark.parametrize("verb", ["stats", "verify", "clear"])


def refused(verb: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The single line of an answer with status 2."""
    assert main(["cache", verb, str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"weft cache {verb}: ")
    assert err.count("\n") == 1
    return err


def table(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    rows = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    return {key.strip(): value.strip() for key, value in rows}


def flip(path: Path, at: int) -> None:
    with (path / FILE_NAME).open("r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 16]))


def test_a_whole_store_is_counted_verified_and_cleared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    assert main(["cache", "stats", str(tmp_path)]) == 0
    assert table(capsys)["pages"] == f"8 of {EXTENTS}"
    assert main(["cache", "verify", str(tmp_path)]) == 0
    rows = table(capsys)
    assert (rows["intact pages"], rows["damaged pages"]) == ("8", "0")
    assert main(["cache", "clear", str(tmp_path)]) == 0
    assert "cleared" in capsys.readouterr().out
    assert main(["cache", "verify", str(tmp_path)]) == 0
    assert table(capsys)["pages"] == f"0 of {EXTENTS}"


def test_pages_of_recurrent_states_are_no_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, opened = filled(tmp_path)[-1], Open(tmp_path)
    (tokens,) = state_tokens(1, TOKENS)
    opened.write(8, Record(PrefixIndex.chain(record.key, tokens), record.key, tokens, "s"))
    opened.close()
    assert main(["cache", "verify", str(tmp_path)]) == 0
    rows = table(capsys)
    assert (rows["pages"], rows["tokens"]) == (f"9 of {EXTENTS}", str(8 * TOKENS))
    assert rows["pages of recurrent states"] == "1"


def test_verify_counts_and_names_invalid_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    for extent in (2, 5):
        flip(tmp_path, GEOMETRY.extent_at(extent) + 77)
    assert main(["cache", "verify", str(tmp_path)]) == 1
    rows = table(capsys)
    assert rows["intact pages"] == "6"
    assert rows["damaged pages"].startswith("2 (extents 2, 5")
    flip(tmp_path, GEOMETRY.header_at(3) + 60)  # without its header a page does not exist
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert table(capsys)["pages"] == f"7 of {EXTENTS}"


def test_verify_of_a_truncated_file_counts_the_missing_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path)
    os.truncate(tmp_path / FILE_NAME, GEOMETRY.extent_at(3) + 4500)
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert table(capsys)["intact pages"] == "3"
    assert (tmp_path / FILE_NAME).stat().st_size == GEOMETRY.extent_at(3) + 4500


@VERBS
def test_a_path_without_a_store_is_refused_and_unchanged(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    for path in (tmp_path / "nowhere", tmp_path, file):
        assert "holds no KV store" in refused(verb, path, capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@VERBS
def test_a_file_that_is_not_a_store_is_refused_and_unchanged(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in (b"", b"something else" * 1000):
        (tmp_path / FILE_NAME).write_bytes(content)
        assert "not a KV store of this version" in refused(verb, tmp_path, capsys)
        assert (tmp_path / FILE_NAME).read_bytes() == content


@VERBS
def test_a_store_in_use_is_refused(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    file = StoreFile(tmp_path, GEOMETRY)
    assert "in use by another weft" in refused(verb, tmp_path, capsys)
    file.close()


@VERBS
def test_a_store_of_another_user_is_refused(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, was = Path(tempfile.mkdtemp()), os.geteuid()
    filled(path)
    for mode in (0o555, 0):
        path.chmod(mode)
        try:
            if was == 0:
                os.seteuid(65534)
            assert "EACCES" in refused(verb, path, capsys)
        finally:
            os.seteuid(was)
            path.chmod(0o755)


def test_a_disk_error_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path)

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        assert "EIO" in refused("clear", tmp_path, capsys)
    monkeypatch.setattr(os, "preadv", refuse)
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert table(capsys)["intact pages"] == "0"
    monkeypatch.setattr(os, "pread", refuse)
    assert "EIO" in refused("stats", tmp_path, capsys)
    monkeypatch.undo()
    assert main(["cache", "verify", str(tmp_path)]) == 0


def test_the_path_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["cache", "verify"])
    assert end.value.code == 2
    assert "PATH" in capsys.readouterr().err
