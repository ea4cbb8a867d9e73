"""`weft cache stats|verify|clear PATH`: inspects an SSD store. It takes the lock, so no daemon may use it."""

from __future__ import annotations

import mmap
from pathlib import Path

from rich.table import Table

from weft.engine.config import expanded
from weft.engine.errors import ConfigError
from weft.engine.memory.extent import Record, checksum
from weft.engine.memory.store_file import StoreFile, StoreUnavailable, reason_of
from weft.engine.memory.transfer import aligned
from weft.engine.progress import for_stdout
from weft.engine.wire.page_keys import of_state


def run(verb: str, path: Path) -> int:
    """Return the exit status. Raises `ConfigError`, with one line, if there is no store or a daemon uses it."""
    try:
        file = StoreFile(expanded(path), None)
    except StoreUnavailable as error:
        raise ConfigError(str(error)) from None
    try:
        if verb == "clear":
            file.new_epoch()
            print("all pages cleared")
            return 0
        records = file.headers()
        bad = _bad(file, records) if verb == "verify" else None
        _print(file, records, bad)
        return 1 if bad else 0
    except OSError as error:
        raise ConfigError(f"cannot use {file.path}: {reason_of(error)}") from None
    finally:
        file.close()


def _bad(file: StoreFile, records: list[tuple[int, Record]]) -> list[int]:
    """Return extents whose payload does not match the header's checksum, or cannot be read."""
    geometry = file.geometry

    def holds(extent: int, record: Record) -> bool:
        try:
            if not file.read_extent(extent, view):
                return False
            parts = [view[: geometry.payload_bytes]]
            if record.remainder >= 0:
                if not file.read_remainder(record.remainder, end):
                    return False
                parts.append(end[: geometry.remainder_bytes])
            return checksum(*parts) == record.payload
        except OSError:
            return False

    remainder_bytes = max(1, aligned(geometry.remainder_bytes))
    with (
        mmap.mmap(-1, geometry.extent_bytes) as buffer,
        mmap.mmap(-1, remainder_bytes) as other,
        memoryview(buffer) as view,
        memoryview(other) as end,
    ):
        return [extent for extent, record in records if not holds(extent, record)]


def _print(file: StoreFile, records: list[tuple[int, Record]], bad: list[int] | None) -> None:
    geometry = file.geometry
    states = sum(of_state(record.tokens) for _, record in records)
    table = Table(title=str(file.path), show_header=False)
    rows = {
        "pages": f"{len(records):,} of {geometry.num_extents:,}",
        "tokens": f"{(len(records) - states) * geometry.page_tokens:,}",
        "bytes": f"{len(records) * geometry.extent_bytes:,} of {geometry.file_bytes:,}",
        "tokens per page": str(geometry.page_tokens),
        "bytes per page": f"{geometry.payload_bytes:,}",
        "salts": f"{len({r.salt for _, r in records}):,}",
        "model and layout": geometry.owner.hex(),
        "direct I/O": "yes" if file.direct else "no",
    }
    if states:
        rows["pages of recurrent states"] = f"{states:,}"
    if geometry.num_remainders:
        rows["pages not packed"] = f"{sum(r.remainder >= 0 for _, r in records):,} of {geometry.num_remainders:,}"
    if bad is not None:
        rows["intact pages"] = f"{len(records) - len(bad):,}"
        rows["damaged pages"] = f"{len(bad):,}" + (f" (extents {', '.join(map(str, bad[:8]))} …)" if bad else "")
    for key, value in rows.items():
        table.add_row(key, value)
    for_stdout().print(table)
