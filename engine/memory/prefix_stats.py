"""`PrefixStats`: how many prompt tokens were looked up, and in which tier they were found."""

from __future__ import annotations

from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import Hits
from weft.engine.memory.tiers import Tiers
from weft.engine.wire.messages import LENGTHS, LengthHits, TierStats


class PrefixStats:
    def __init__(self) -> None:
        self.queried = 0
        self.hits = Hits()
        self.by_length = {name: LengthHits() for name in (*LENGTHS, "more")}

    def add(self, prompt_tokens: int, hits: Hits) -> None:
        self.queried += prompt_tokens
        self.hits = Hits(*(a + b for a, b in zip(self.hits, hits, strict=True)))
        of = self.by_length[next((name for name, limit in LENGTHS.items() if prompt_tokens < limit), "more")]
        of.gpu, of.host, of.ssd = of.gpu + hits.gpu, of.host + hits.host, of.ssd + hits.ssd
        of.missed += prompt_tokens - sum(hits)

    def tiers(self, pool: PagePool, lower: Tiers | None) -> dict[str, TierStats]:
        gpu = TierStats(used=pool.num_held + pool.num_cached, capacity=pool.capacity, evictions=pool.evictions)
        tiers = {"gpu": gpu, **(lower.stats() if lower is not None else {})}
        missed = self.queried
        for name, stats in tiers.items():
            stats.hit_tokens = getattr(self.hits, name)
            missed -= stats.hit_tokens
            stats.missed_tokens = missed
        return tiers
