"""The SSD store may lose pages but never return wrong ones: torn, flipped, truncated, foreign and unwritable files."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from weft.engine.errors import ConfigError
from weft.engine.memory import ssd_store
from weft.engine.memory.extent import Geometry, Record, unpack_header
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.memory.ssd_store import Job, Outcome, SsdStore, chains
from weft.engine.memory.store_file import FILE_NAME, StoreFile, StoreUnavailable
from weft.engine.memory.transfer import aligned

TOKENS, PAYLOAD, EXTENTS = 8, 5000, 12
GEOMETRY = Geometry(TOKENS, PAYLOAD, EXTENTS, b"o" * 16)
INDEX = PrefixIndex("m")


def record_of(i: int, parent: Record | None = None, salt: str = "s") -> Record:
    tokens = np.full(TOKENS, i, np.int32).tobytes()
    parent_key = parent.key if parent else INDEX.root(salt)
    return Record(PrefixIndex.chain(parent_key, tokens), parent_key, tokens, salt)


def payload_of(record: Record) -> np.ndarray:
    """The expected content of the page of these tokens: a function of its key."""
    return np.random.default_rng(int.from_bytes(record.key, "little")).integers(0, 256, PAYLOAD).astype(np.uint8)


class Open:
    """A store with its own host pool. Every job is awaited."""

    def __init__(self, path: Path, geometry: Geometry = GEOMETRY) -> None:
        self.host = np.frombuffer(bytearray(4 * aligned(PAYLOAD) + 4096), np.uint8)
        start = -self.host.ctypes.data % 4096
        self.host = self.host[start : start + 4 * aligned(PAYLOAD)].reshape(4, -1)
        self.store = SsdStore(StoreFile(path, geometry), self.host)
        self.found = dict(self.store.scan())

    def write(self, extent: int, record: Record) -> Outcome:
        self.host[0, :PAYLOAD] = payload_of(record)
        return self._wait(self.store.write(extent, record, 0))

    def read(self, extent: int) -> tuple[Outcome, np.ndarray]:
        self.host[1] = 0
        return self._wait(self.store.read(extent, 1)), self.host[1, :PAYLOAD]

    @staticmethod
    def _wait(job: Job) -> Outcome:
        while job.outcome is Outcome.PENDING:
            time.sleep(0.001)
        return job.outcome

    def close(self) -> None:
        self.store.close()


def filled(path: Path) -> list[Record]:
    """A chain of eight pages in extents 0 … 7."""
    opened, records = Open(path), []
    for i in range(8):
        records.append(record_of(i, records[-1] if records else None))
        assert opened.write(i, records[-1]) is Outcome.DONE
    opened.close()
    return records


def keys(found: dict[int, Record]) -> list[bytes]:
    return [record.key for _, record in sorted(found.items())]


def test_written_pages_are_found_and_read_after_a_restart(tmp_path: Path) -> None:
    records = filled(tmp_path)
    opened = Open(tmp_path)
    assert keys(opened.found) == [r.key for r in records]
    assert [r.key for _, r in chains(list(opened.found.items()), INDEX.root)] == [r.key for r in records]
    for extent, record in opened.found.items():
        assert (record.tokens, record.salt) == (records[extent].tokens, "s")
        outcome, data = opened.read(extent)
        assert outcome is Outcome.DONE
        assert (data == payload_of(record)).all()
    opened.close()


def test_a_flipped_bit_anywhere_in_an_extent_or_its_header_is_a_miss(tmp_path: Path) -> None:
    records = filled(tmp_path)
    file, rng = tmp_path / FILE_NAME, Random(1)
    clean = file.read_bytes()
    header_bytes = len(records[0].tokens) + 100  # the part of the header with content
    for extent in range(8):
        for at in (
            GEOMETRY.extent_at(extent) + rng.randrange(PAYLOAD),
            GEOMETRY.header_at(extent) + rng.randrange(header_bytes),
        ):
            data = bytearray(clean)
            data[at] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
            opened = Open(tmp_path)
            for other, record in enumerate(records):
                if other == extent:
                    assert other not in opened.found or opened.read(other)[0] is Outcome.LOST
                else:
                    assert (opened.read(other)[1] == payload_of(record)).all()
            opened.close()


@pytest.mark.parametrize("keep", [0, 100, 4096 + 3, GEOMETRY.first_extent - 5000, GEOMETRY.extent_at(3) + 4500])
def test_a_truncated_file_serves_the_remaining_pages(tmp_path: Path, keep: int) -> None:
    records = filled(tmp_path)
    os.truncate(tmp_path / FILE_NAME, keep)
    opened = Open(tmp_path)
    for extent in opened.found:
        outcome, data = opened.read(extent)
        whole = GEOMETRY.extent_at(extent) + PAYLOAD <= keep
        assert outcome is (Outcome.DONE if whole else Outcome.LOST)
        assert not whole or (data == payload_of(records[extent])).all()
    assert opened.write(0, records[0]) is Outcome.DONE
    assert opened.read(0)[0] is Outcome.DONE
    opened.close()


def test_a_file_truncated_while_it_is_open_is_a_miss(tmp_path: Path) -> None:
    filled(tmp_path)
    opened = Open(tmp_path)
    os.truncate(tmp_path / FILE_NAME, GEOMETRY.extent_at(3) + 4500)
    assert [opened.read(i)[0] for i in range(5)] == [Outcome.DONE] * 3 + [Outcome.LOST] * 2
    opened.close()


@pytest.mark.parametrize(
    "other", [Geometry(TOKENS, PAYLOAD, EXTENTS, b"p" * 16), Geometry(TOKENS, PAYLOAD + 1, EXTENTS, b"o" * 16)]
)
def test_another_models_pages_are_never_found(tmp_path: Path, other: Geometry) -> None:
    filled(tmp_path)
    opened = Open(tmp_path, other)
    assert not opened.found
    opened.close()


def test_a_copied_header_is_not_valid_for_another_extent(tmp_path: Path) -> None:
    filled(tmp_path)
    file = tmp_path / FILE_NAME
    data = bytearray(file.read_bytes())
    width = GEOMETRY.header_bytes
    first = data[GEOMETRY.header_at(1) : GEOMETRY.header_at(1) + width]
    data[GEOMETRY.header_at(9) : GEOMETRY.header_at(9) + width] = first
    file.write_bytes(data)
    opened = Open(tmp_path)
    assert opened.read(9)[0] is Outcome.LOST
    opened.close()


def test_a_header_whose_key_does_not_follow_from_its_tokens_is_invalid(tmp_path: Path) -> None:
    opened = Open(tmp_path)
    good = record_of(1)
    opened.write(0, Record(good.parent_key, good.parent_key, good.tokens, good.salt))
    block = (tmp_path / FILE_NAME).read_bytes()[GEOMETRY.header_at(0) :][: GEOMETRY.header_bytes]
    assert unpack_header(GEOMETRY, 1, block) is None
    opened.close()


def test_pages_whose_parents_are_missing_are_dropped() -> None:
    a = record_of(1)
    b = record_of(2, a)
    c = record_of(3, b)
    stranger = record_of(4, a, salt="t")
    assert [r for _, r in chains([(5, c), (6, a)], INDEX.root)] == [a]
    assert [e for e, _ in chains([(5, c), (2, stranger), (6, a), (1, b)], INDEX.root)] == [6, 1, 5]
    assert [e for e, _ in chains([(1, a), (2, a)], INDEX.root)] == [2]


def test_a_reset_is_permanent(tmp_path: Path) -> None:
    records = filled(tmp_path)
    opened = Open(tmp_path)
    opened.store.reset()
    assert opened.read(0)[0] is Outcome.LOST
    opened.write(3, records[0])
    opened.close()
    again = Open(tmp_path)
    assert list(again.found) == [3]
    again.close()


def refusing_writes(store: SsdStore) -> None:
    """From now on the file is open read-only, so that writes fail with EBADF."""
    read_only = os.open(store.file.path, os.O_RDONLY)
    os.dup2(read_only, store.file.fd)
    os.close(read_only)


def test_a_reset_that_fails_on_disk_restores_no_page(tmp_path: Path) -> None:
    filled(tmp_path)
    opened = Open(tmp_path)
    refusing_writes(opened.store)
    cleared = rf"its pages cannot be cleared \(EBADF .*\), so {tmp_path}.* was removed"
    with pytest.raises(StoreUnavailable, match=cleared):
        opened.store.reset()
    assert opened.store.file.epoch == 1  # as on the disk
    assert opened.read(0)[0] is Outcome.LOST
    opened.close()
    again = Open(tmp_path)
    assert not again.found
    again.close()


@pytest.mark.parametrize("takes_flags", [True, False], ids=["per write", "whole file"])
def test_cleared_pages_do_not_return_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_flags: bool
) -> None:
    """After a power cut only durable writes remain: those complete when the call returned."""
    filled(tmp_path)
    path = tmp_path / FILE_NAME
    on_disk = path.read_bytes()
    pwritev, fdatasync = os.pwritev, os.fdatasync

    def write(fd: int, data: list[bytes], at: int, flags: int = 0) -> int:
        nonlocal on_disk
        if flags and not takes_flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        written = pwritev(fd, data, at)
        if flags & os.RWF_DSYNC:
            on_disk = on_disk[:at] + os.pread(fd, written, at) + on_disk[at + written :]
        return written

    def sync(fd: int) -> None:
        nonlocal on_disk
        fdatasync(fd)
        on_disk = path.read_bytes()

    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(os, "fdatasync", sync)
    opened = Open(tmp_path)
    assert opened.found
    opened.store.reset()
    opened.close()
    path.write_bytes(on_disk)
    again = Open(tmp_path)
    assert not again.found
    again.close()


def test_a_file_that_can_neither_be_cleared_nor_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, **_options: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    opened = Open(tmp_path)
    refusing_writes(opened.store)
    monkeypatch.setattr(Path, "unlink", refuse)
    kept = rf"and {tmp_path / FILE_NAME} cannot be removed \(EROFS .*\): remove it"
    with pytest.raises(StoreUnavailable, match=kept):
        opened.store.reset()
    opened.close()


def test_a_second_daemon_on_one_path_is_refused(tmp_path: Path) -> None:
    opened = Open(tmp_path)
    with pytest.raises(ConfigError, match="in use by another weft") as error:
        StoreFile(tmp_path, GEOMETRY)
    assert "\n" not in str(error.value)
    # The store waits for one that is about to exit.
    threading.Timer(0.1, opened.close).start()
    StoreFile(tmp_path, GEOMETRY, patience=60).close()


def test_a_disk_without_space_is_reported_at_once() -> None:
    # A file system in memory, smaller than this by far.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path, pytest.raises(StoreUnavailable, match=r"ENOSPC|EFBIG"):
        StoreFile(Path(path), Geometry(TOKENS, 1 << 20, 1 << 30, b"o" * 16))


def test_a_larger_store_without_space_leaves_the_existing_one() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        records = filled(Path(path))
        with pytest.raises(StoreUnavailable, match="ENOSPC"):
            StoreFile(Path(path), replace(GEOMETRY, num_extents=1 << 40))
        opened = Open(Path(path))
        assert keys(opened.found) == [r.key for r in records]
        assert opened.read(3)[0] is Outcome.DONE
        opened.close()


def test_a_read_only_directory_is_reported_at_once() -> None:
    path = Path(tempfile.mkdtemp())
    path.chmod(0o555)
    was = os.geteuid()
    try:
        if was == 0:
            os.seteuid(65534)
        with pytest.raises(StoreUnavailable, match=r"EACCES|EROFS"):
            StoreFile(path, GEOMETRY)
    finally:
        os.seteuid(was)
        path.rmdir()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_error_disables_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    filled(tmp_path)
    opened = Open(tmp_path)

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refuse)
    monkeypatch.setattr(os, "preadv", refuse)
    job = opened.store.write(9, record_of(9), 0)
    assert Open._wait(job) is Outcome.BROKEN
    assert errno.errorcode[code] in job.reason
    assert opened.read(0)[0] is Outcome.BROKEN
    opened.close()


def test_a_file_system_that_rejects_direct_io_late_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, records = Open(tmp_path), [record_of(1)]
    file = opened.store.file
    if not file.direct:
        pytest.skip("this file system refuses direct I/O at once")
    really = os.pwrite

    def refuse(fd: int, data: memoryview, at: int) -> int:
        if fd == file.direct_fd:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really(fd, data, at)

    monkeypatch.setattr(os, "pwrite", refuse)
    assert opened.write(0, records[0]) is Outcome.DONE
    assert not file.direct
    outcome, data = opened.read(0)
    assert outcome is Outcome.DONE
    assert (data == payload_of(records[0])).all()
    opened.close()


WRITER = """
import sys
sys.path.insert(0, {tests!r})
from test_ssd_store import *
opened, rng = Open(Path(sys.argv[1])), Random(int(sys.argv[2]))
print("open", flush=True)
while True:
    chain = [record_of(rng.randrange(50))]
    extent = rng.randrange(EXTENTS)
    assert opened.write(extent, chain[0]) is Outcome.DONE
    print(extent, chain[0].key.hex(), flush=True)
"""


def kill_a_writer(path: Path, seed: int) -> None:
    """Start a process that writes pages forever, kill it in the middle, and check the file."""
    code = WRITER.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-P", "-c", code, str(path), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(Random(seed).uniform(0.0, 0.1))
        writer.send_signal(signal.SIGKILL)
        lines = [line.split() for line in writer.stdout.read().splitlines()]
    written = {int(line[0]): line[1] for line in lines if len(line) == 2 and len(line[1]) == 32}
    opened = Open(path)
    # All pages reported as written are there, except the extent that was being overwritten at the end.
    lost = [e for e, key in written.items() if e not in opened.found or opened.found[e].key.hex() != key]
    assert len(lost) <= 1
    for extent, record in opened.found.items():
        outcome, data = opened.read(extent)
        assert outcome is Outcome.DONE
        assert (data == payload_of(record)).all()
    opened.close()


@pytest.mark.slow
def test_a_killed_writer_leaves_only_whole_pages(tmp_path: Path) -> None:
    for seed in range(int(os.environ.get("TEST_KILLS", "4"))):
        kill_a_writer(tmp_path, seed)


def test_a_second_store_is_kept_out_even_if_other_files_are_removed(tmp_path: Path) -> None:
    opened = Open(tmp_path)
    for other in tmp_path.iterdir():
        if other.name != FILE_NAME:
            other.unlink()
    with pytest.raises(ConfigError, match="in use by another weft"):
        StoreFile(tmp_path, GEOMETRY)
    opened.close()
    StoreFile(tmp_path, GEOMETRY).close()


def test_the_path_of_a_removed_store_is_free_for_another(tmp_path: Path) -> None:
    opened = Open(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    other = Open(tmp_path)
    record = record_of(1)
    assert other.write(0, record) is Outcome.DONE
    opened.close()
    assert (other.read(0)[1] == payload_of(record)).all()
    other.close()


@pytest.mark.parametrize("removed", ["file", "directory", "replaced", "truncated", "nothing"])
def test_a_file_moved_from_its_path_is_detected(tmp_path: Path, removed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_store, "WATCH_SECONDS", 0.01)
    opened = Open(tmp_path / "store")
    noticed = threading.Event()
    opened.store.on_done = noticed.set
    if removed == "directory":
        shutil.rmtree(tmp_path / "store")
    elif removed == "file":
        (tmp_path / "store" / FILE_NAME).unlink()
    elif removed == "replaced":
        (tmp_path / "new").write_bytes(b"x")
        (tmp_path / "new").replace(tmp_path / "store" / FILE_NAME)
    elif removed == "truncated":
        os.truncate(tmp_path / "store" / FILE_NAME, GEOMETRY.file_bytes - 1)
    assert noticed.wait(0.3 if removed == "nothing" else 240) == (removed != "nothing")
    what = removed if removed == "truncated" else "removed"
    assert opened.store.gone == (None if removed == "nothing" else f"{tmp_path / 'store' / FILE_NAME} was {what}")
    opened.close()


@pytest.mark.parametrize(
    ("geometry", "why"),
    [
        (Geometry(4, PAYLOAD, EXTENTS, b"o" * 16), "its pages have 8 tokens, not 4"),
        (replace(GEOMETRY, owner=b"p" * 16), "its pages belong to another model, dtype, rope or --tier-kv-format"),
        (Geometry(TOKENS, PAYLOAD, 7, b"o" * 16), "its size is 12 pages, not 7"),
        (GEOMETRY, None),
    ],
)
def test_a_store_that_restarts_empty_reports_why(tmp_path: Path, geometry: Geometry, why: str | None) -> None:
    new = StoreFile(tmp_path, GEOMETRY)
    assert new.reset_reason is None
    new.close()
    file = StoreFile(tmp_path, geometry)
    assert file.reset_reason == why
    file.close()


def test_a_store_of_another_version_restarts_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    monkeypatch.setattr("weft.engine.memory.extent.VERSION", 99)
    file = StoreFile(tmp_path, GEOMETRY)
    assert (file.reset_reason, file.headers()) == ("another version of weft made it", [])
    file.close()
