"""`weft cache stats|verify|clear PATH`: the SSD store without an engine. Takes its lock: no daemon may be using it."""

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


def run(verb: str, path: Path) -> int:
    """Returns the exit status. Raises `ConfigError`, one line, when there is no store or a daemon has it."""
    try:
        file = StoreFile(expanded(path), None)
    except StoreUnavailable as error:
        raise ConfigError(str(error)) from None
    try:
        if verb == "clear":
            file.new_epoch()
            print("every page is forgotten")
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
    """Extents whose payload is not what the header's checksum says, or cannot be read."""
    geometry = file.geometry

    def holds(extent: int, record: Record) -> bool:
        try:
            if not file.read_extent(extent, view):
                return False
            parts = [view[: geometry.payload_bytes]]
            if record.rest >= 0:
                if not file.read_rest(record.rest, end):
                    return False
                parts.append(end[: geometry.rest_bytes])
            return checksum(*parts) == record.payload
        except OSError:
            return False

    rest_bytes = max(1, aligned(geometry.rest_bytes))
    with (
        mmap.mmap(-1, geometry.extent_bytes) as buffer,
        mmap.mmap(-1, rest_bytes) as other,
        memoryview(buffer) as view,
        memoryview(other) as end,
    ):
        return [extent for extent, record in records if not holds(extent, record)]


def _print(file: StoreFile, records: list[tuple[int, Record]], bad: list[int] | None) -> None:
    geometry = file.geometry
    table = Table(title=str(file.path), show_header=False)
    rows = {
        "pages": f"{len(records):,} of {geometry.num_extents:,}",
        "tokens": f"{len(records) * geometry.page_tokens:,}",
        "bytes": f"{len(records) * geometry.extent_bytes:,} of {geometry.file_bytes:,}",
        "tokens per page": str(geometry.page_tokens),
        "bytes per page": f"{geometry.payload_bytes:,}",
        "salts": f"{len({r.salt for _, r in records}):,}",
        "model and layout": geometry.owner.hex(),
        "direct I/O": "yes" if file.direct else "no",
    }
    if geometry.num_rests:
        rows["pages not packed"] = f"{sum(r.rest >= 0 for _, r in records):,}, room for {geometry.num_rests:,}"
    if bad is not None:
        rows["pages that hold"] = f"{len(records) - len(bad):,}"
        rows["pages that do not"] = f"{len(bad):,}" + (f" (extents {', '.join(map(str, bad[:8]))} …)" if bad else "")
    for key, value in rows.items():
        table.add_row(key, value)
    for_stdout().print(table)
