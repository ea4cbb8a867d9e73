"""Makes the tiers that the configuration asks for: the SSD's file before the model loads, the rest after."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import xxhash

from weft.engine.config import EngineConfig, expanded
from weft.engine.errors import ConfigError
from weft.engine.memory.extent import Geometry
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.memory.pages import PagePool
from weft.engine.memory.rests import SHARE, Rests
from weft.engine.memory.ssd_store import SsdStore, Store
from weft.engine.memory.store_file import StoreFile, StoreUnavailable
from weft.engine.memory.tiers import Tiers
from weft.engine.memory.transfer import GIB, Bytes, CopyEngine, PageSizes, aligned
from weft.engine.model.spec import Shard
from weft.kernels.formats.packed_page import PackedPage

LOCK_PATIENCE_SECONDS = 6.0
"""for the engine of a daemon that was killed: it stores what it can for a few seconds, then it ends"""
MEMORY_SHARE = 0.9
"""of the memory that is free, at most, for the host pool: the system dies of more"""


def open_store(
    config: EngineConfig,
    layout: KvLayout,
    model_id: str,
    shard: Shard,
    packed: PackedPage | None,
) -> StoreFile | None:
    """The file of the SSD tier, or None when it is not asked for, or cannot be had (one line says why).

    Each rank has one of its own, and its share of the space. Raises `ConfigError` when another daemon has it, or when
    it is too small for a page.
    """
    if config.ssd_kv_path is None:
        return None
    directory = expanded(config.ssd_kv_path)
    if shard.ranks > 1:
        model_id = f"{model_id}|rank {shard.rank} of {shard.ranks}"
        directory = directory / f"rank-{shard.rank}-of-{shard.ranks}"
    if packed is not None:
        model_id = f"{model_id}|packed in 12 bits"
    owner = xxhash.xxh3_128_digest(model_id.encode())
    stored = packed.nbytes if packed is not None else layout.page_bytes
    room = int(config.ssd_kv_gib * GIB / shard.ranks)
    geometry = Geometry.fitting(layout.page_size, stored, owner, room, layout.page_bytes - stored)
    if geometry.num_extents < 1:
        raise ConfigError(
            f"--ssd-kv-gib {config.ssd_kv_gib:g} has no room for one page of {layout.page_bytes / 2**20:.1f} MiB"
        )
    try:
        file = StoreFile(directory, geometry, LOCK_PATIENCE_SECONDS)
    except StoreUnavailable as error:
        print(f"weft: no SSD tier: {error}; serving goes on without it", file=sys.stderr, flush=True)
        return None
    if file.begun_anew is not None:
        print(f"weft: the KV store {file.path} begins anew: {file.begun_anew}", file=sys.stderr, flush=True)
    return file


def make_tiers(
    config: EngineConfig,
    layout: KvLayout,
    pool: PagePool,
    file: StoreFile | None,
    copy_engine: Callable[[int], CopyEngine],
    make_store: Callable[[StoreFile, Bytes, Rests | None], Store] = SsdStore,
    ranks: int = 1,
    packed: PackedPage | None = None,
) -> Tiers | None:
    """The tiers below a device's pool; None when there are none.

    copy_engine: `Runner.copy_engine`. make_store: of a file, the host pool and its rests. ranks: that share the host's
    memory. packed: how pages lie there; None: as on the device.
    Raises `ConfigError` or `OutOfMemory`.
    """
    if not config.host_kv_gib:
        return None
    sizes = PageSizes(layout.page_bytes, packed.nbytes if packed is not None else layout.page_bytes)
    slots = _slots_in(int(config.host_kv_gib * GIB / ranks), sizes)
    if slots < 2:
        raise ConfigError(
            f"--host-kv-gib {config.host_kv_gib:g} has room for {slots} pages of {sizes.packed / 2**20:.1f} MiB, "
            "it needs at least 2"
        )
    available = _available_bytes()
    if ranks * slots * aligned(sizes.packed) > MEMORY_SHARE * available:
        raise ConfigError(
            f"--host-kv-gib {config.host_kv_gib:g} is more than {MEMORY_SHARE:.0%} of the "
            f"{available / GIB:.1f} GiB of memory that are free"
        )
    copies = copy_engine(slots)
    store = make_store(file, copies.host, copies.rests) if file is not None else None
    asked = config.ssd_kv_path is not None
    tiers = Tiers(pool, copies, slots, store, asked_for_ssd=asked, idle_seconds=config.idle_spill_seconds)
    if store is not None:
        store.on_done = tiers.ssd.wake
    return tiers


def _slots_in(size: int, sizes: PageSizes) -> int:
    """Slots, and rests for them, that so many bytes have room for."""
    slot, rest = aligned(sizes.packed), aligned(sizes.page - sizes.packed)
    return max(0, size - rest) * SHARE // (slot * SHARE + rest)


def _available_bytes() -> int:
    """Memory that the system can still give: its own estimate, and what the control group leaves."""
    with open("/proc/meminfo", encoding="ascii") as f:
        fields = dict(line.split(":", 1) for line in f)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return min(available, int(limit) - used) if limit.isdigit() else available
