"""Creates the configured KV tiers: the SSD's file before the model loads, the rest afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash

from weft.engine.config import EngineConfig, expanded
from weft.engine.errors import ConfigError
from weft.engine.memory.extent import Geometry
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.memory.pages import PagePool
from weft.engine.memory.ssd_store import SsdStore, Store
from weft.engine.memory.store_file import StoreFile, StoreUnavailable
from weft.engine.memory.tiers import Tiers
from weft.engine.memory.transfer import GIB, SHARE, Bytes, CopyEngine, PageSizes, Remainders, aligned
from weft.engine.model.spec import Shard
from weft.engine.progress import notice
from weft.kernels.formats.packed_page import PackedPage

LOCK_PATIENCE_SECONDS = 6.0
"""Seconds to wait for the lock: the engine of a killed daemon keeps storing pages for a few seconds."""
MEMORY_SHARE = 0.9  # Maximum share of free memory for the host pool. More can crash the system.


def open_store(
    config: EngineConfig, layout: KvLayout, model_id: str, shard: Shard, packed: PackedPage | None
) -> StoreFile | None:
    """Open the file of the SSD tier. Returns None if it is not configured, or cannot be used, which is logged. Raises
    `ConfigError` if another daemon uses the file, or if it is too small for a page."""
    if config.ssd_kv_path is None:
        return None
    try:
        file = reopened(config, layout, model_id, shard, packed, LOCK_PATIENCE_SECONDS)
    except StoreUnavailable as error:
        notice(f"no SSD tier: {error}; serving continues without it")
        return None
    if file.reset_reason is not None:
        notice(f"the KV store {file.path} was reset: {file.reset_reason}")
    return file


def reopened(
    config: EngineConfig, layout: KvLayout, model_id: str, shard: Shard, packed: PackedPage | None,
    patience: float = 0.0,
) -> StoreFile:  # fmt: skip
    """Open the file of the configured SSD tier. Each rank has its own file and its share of the space. Raises
    `ConfigError` as `open_store` does, and `StoreUnavailable`."""
    assert config.ssd_kv_path is not None
    directory = expanded(config.ssd_kv_path)
    if shard.ranks > 1:
        model_id = f"{model_id}|rank {shard.rank} of {shard.ranks}"
        directory = directory / f"rank-{shard.rank}-of-{shard.ranks}"
    if packed is not None:
        model_id = f"{model_id}|packed in 12 bits"
    owner = xxhash.xxh3_128_digest(model_id.encode())
    stored = packed.nbytes if packed is not None else layout.page_bytes
    size = int(config.ssd_kv_gib * GIB / shard.ranks)
    geometry = Geometry.fitting(layout.page_size, stored, owner, size, layout.page_bytes - stored)
    if geometry.num_extents < 1:
        raise ConfigError(
            f"--ssd-kv-gib {config.ssd_kv_gib:g} is too small for one page of {layout.page_bytes / 2**20:.1f} MiB"
        )
    return StoreFile(directory, geometry, patience)


def make_tiers(
    config: EngineConfig, layout: KvLayout, pool: PagePool, file: StoreFile | None,
    copy_engine: Callable[[int], CopyEngine],
    make_store: Callable[[StoreFile, Bytes, Remainders | None], Store] = SsdStore, ranks: int = 1,
    packed: PackedPage | None = None, *, reopen: Callable[[], StoreFile],
) -> Tiers | None:  # fmt: skip
    """Create the tiers below a device's pool; None if none are configured. `copy_engine` is `Runner.copy_engine`.
    `ranks` share the host's memory. `packed` is the form of pages in the tiers; None for the device's form. `reopen`
    opens the file again after its disk failed. Raises `ConfigError` or `OutOfMemory`."""
    if not config.host_kv_gib:
        return None
    sizes = PageSizes(layout.page_bytes, packed.nbytes if packed is not None else layout.page_bytes)
    slots = _slots_in(int(config.host_kv_gib * GIB / ranks), sizes)
    if slots < 2:
        raise ConfigError(
            f"--host-kv-gib {config.host_kv_gib:g} holds {slots} pages of {sizes.packed / 2**20:.1f} MiB; "
            "at least 2 are needed"
        )
    available = _available_bytes()
    if ranks * slots * aligned(sizes.packed) > MEMORY_SHARE * available:
        raise ConfigError(
            f"--host-kv-gib {config.host_kv_gib:g} is more than {MEMORY_SHARE:.0%} of the "
            f"{available / GIB:.1f} GiB of free memory"
        )
    copies = copy_engine(slots)
    store = make_store(file, copies.host, copies.remainders) if file is not None else None

    def again() -> Store:
        return make_store(opened_again(file, reopen), copies.host, copies.remainders)

    configured = config.ssd_kv_path is not None
    return Tiers(
        pool, copies, slots, store, ssd_configured=configured, idle_seconds=config.idle_spill_seconds,
        reopen=again if configured else None,
    )  # fmt: skip


def opened_again(earlier: StoreFile | None, reopen: Callable[[], StoreFile]) -> StoreFile:
    """Return the file of a disk that works again. `earlier` is the file that failed, if any could be opened. Raises
    `ConfigError`, `StoreUnavailable` or `OSError` while that fails."""
    if earlier is not None and not earlier.path.exists():
        raise StoreUnavailable(f"{earlier.path} was removed")  # and another disk may be there now
    opened = reopen()
    opened.prove_writable()
    return opened


def _slots_in(size: int, sizes: PageSizes) -> int:
    """Return how many slots, with remainders for them, fit in `size` bytes."""
    slot, remainder = aligned(sizes.packed), aligned(sizes.page - sizes.packed)
    return max(0, size - remainder) * SHARE // (slot * SHARE + remainder)


def _available_bytes() -> int:
    """Return the available memory: the system's estimate, limited by the control group."""
    with open("/proc/meminfo", encoding="ascii") as f:
        fields = dict(line.split(":", 1) for line in f)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return min(available, int(limit) - used) if limit.isdigit() else available
