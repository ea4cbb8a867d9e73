"""Hybrid batches of attention from the POD-Attention paper (arXiv 2410.18038), most informative first.

Plain arithmetic, no torch. Times are estimates for an H200, used only to choose and order batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

HEADS, HEAD_DIM = 32, 128
KV_HEADS = {"llama-3-8b": 8, "yi-6b": 4}
SMS = 132
READ_BYTES_US = 4.25e6
"""Bytes that decodes read in a microsecond on all SMs."""
READ_BYTES_US_SM = 0.122e6
"""Bytes that one SM reads in a microsecond while few SMs read."""
FLOP_US_SM = 4.9e6
"""FLOPs of chunks that one SM does in a microsecond."""
MIN_SHARE = 0.2
"""Share of the sequential time that either half must have (paper, 5.1)."""
CHUNKS = (128, 256, 512, 1024, 1536, 2048)
"""Chunk sizes in tokens; the paper's begin at 512."""
SMALL_CHUNKS = (128, 256)
CONTEXTS = tuple(range(4096, 20481, 1024))
DECODES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192)
SPLITS = (16, 32, 48, 64, 96)
"""SMs that two streams assign to decodes."""


class Hybrid(NamedTuple):
    """A batch: a chunk of queries after a context, and decodes with their length in tokens. Either may be 0."""

    model: str
    chunk: int
    context: int
    decodes: int
    length: int

    @property
    def kv_heads(self) -> int:
        return KV_HEADS[self.model]

    @property
    def key(self) -> str:
        return "/".join(map(str, self))

    @property
    def flop(self) -> float:
        """FLOPs of the chunk."""
        return 4.0 * HEADS * HEAD_DIM * self.chunk * (self.context + (self.chunk + 1) / 2)

    @property
    def read_bytes(self) -> float:
        """Bytes of K and V of the decodes."""
        return 4.0 * self.kv_heads * HEAD_DIM * self.decodes * self.length

    @property
    def prefill_us(self) -> float:
        return self.flop / (FLOP_US_SM * SMS)

    @property
    def decode_us(self) -> float:
        return self.read_bytes / READ_BYTES_US


class Planned(NamedTuple):
    """A batch and the table or figure it belongs to."""

    part: str
    batch: Hybrid


def split_us(batch: Hybrid, sms: int) -> float:
    """Return the time of the longer half if decodes have `sms` SMs and the chunk the others."""
    return max(batch.read_bytes / min(READ_BYTES_US, sms * READ_BYTES_US_SM), batch.flop / (FLOP_US_SM * (SMS - sms)))


def best_splits(batch: Hybrid) -> tuple[int, ...]:
    """Return the two of `SPLITS` with the shortest predicted time."""
    return tuple(sorted(SPLITS, key=lambda sms: split_us(batch, sms))[:2])


def share_of_decodes(batch: Hybrid, sms: int) -> int:
    """Return SMs in proportion to the halves' work: the paper's proportional policy, which assigns an SM to a task."""
    whole = batch.prefill_us + batch.decode_us
    return min(sms, max(1, round(sms * batch.decode_us / whole))) if whole else 0


def balanced(batch: Hybrid) -> bool:
    return min(batch.prefill_us, batch.decode_us) >= MIN_SHARE * (batch.prefill_us + batch.decode_us)


def spread(batches: Iterable[Hybrid]) -> list[Hybrid]:
    """Reorder the batches so that every prefix covers all models and chunks, small and large; small chunks count twice.

    A sweep that is stopped early has then measured a little of everything; small chunks gain most from one launch.
    """
    strata: dict[tuple[str, int], list[Hybrid]] = defaultdict(list)
    for batch in batches:
        strata[batch.model, batch.chunk].append(batch)
    ranked = []
    for name, members in sorted(strata.items()):
        for i, batch in enumerate(sorted(members)):
            place = _reversed_bits(i, len(members)) * (0.5 if name[1] in SMALL_CHUNKS else 1.0)
            ranked.append((place, name, batch))
    return [batch for *_, batch in sorted(ranked)]


def _reversed_bits(number: int, count: int) -> float:
    """Return a position in [0, 1) that puts 0, 1, 2 … of `count` in van der Corput order."""
    width = max(1, (count - 1).bit_length())
    return int(f"{number:0{width}b}"[::-1], 2) / (1 << width)


def sweep(models: Sequence[str]) -> list[Hybrid]:
    """Return over a thousand batches: 5.1's chunks and contexts plus smaller chunks, if each half matters."""
    found = [
        Hybrid(model, chunk, context, decodes, context)
        for model, chunk, context, decodes in product(models, CHUNKS, CONTEXTS, DECODES)
    ]
    return spread(filter(balanced, found))


def figures(models: Sequence[str]) -> list[Planned]:
    """Return the batches of the paper's Tables 1 and 8 and Figures 6, 10 and 14 for these models."""
    found = []
    for model in models:
        for name, chunk, decodes in (("C0", 1024, 80), ("C1", 12288, 220), ("C2", 16384, 250)):
            context = 12288 - chunk if name == "C0" else 0
            found.append(Planned(f"table 1 {name}", Hybrid(model, chunk, context, decodes, 12288)))
        for decodes in (8, 16, 32):
            found.append(Planned("figure 10", Hybrid(model, 0, 0, decodes, 8192)))
        for decodes in (16, 32, 64, 96, 128):
            found.append(Planned("figure 14", Hybrid(model, 1024, 8192, decodes, 8192)))
    if "llama-3-8b" in models:
        found += [
            Planned(f"table 8 chunk {i}", Hybrid("llama-3-8b", 512, 512 * i, 64, 16384)) for i in range(28, 32)
        ]  # fmt: skip
    if "yi-6b" in models:
        found += [
            Planned("figure 6", Hybrid("yi-6b", 512, 512 * i, decodes, 16384))
            for i, decodes in product(range(32), (54, 55))
        ]
    return found


def paper(models: Sequence[str]) -> list[Planned]:
    """Return all batches: the small tables, the sweep's first batches, Figure 6, the remainder of the sweep."""
    small = [planned for planned in figures(models) if planned.part != "figure 6"]
    prompt = [planned for planned in figures(models) if planned.part == "figure 6"]
    swept = [Planned("sweep", batch) for batch in sweep(models)]
    return [*small, *swept[:400], *prompt, *swept[400:]]
