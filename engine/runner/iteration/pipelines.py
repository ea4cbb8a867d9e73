"""`Pipelines`: the pipelines that a GPU runner captures, and which one serves an iteration."""

from __future__ import annotations

from collections.abc import Iterator

from weft.engine.model.spec import ModelSpec
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import Plan, serial_period
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.iteration.nano import whole_counts

DECODE_ONLY_TOKENS = 256
"""Largest token bucket with a pipeline without prefill attention, where even an empty launch costs time."""


def token_buckets(max_tokens: int) -> list[int]:
    """Return the sizes of the captured graphs: powers of two and 192, then steps of 128, 256 or an eighth."""
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
    while sizes[-1] < max_tokens:
        step = 128 if sizes[-1] < 1024 else max(256, sizes[-1] // 8 // 256 * 256)
        sizes.append(sizes[-1] + step)
    return sorted({min(s, max_tokens) for s in sizes})


class Pipelines:
    """The serial plan of every token bucket, and the plan's pipelines.

    max_tokens: token limit of an iteration. undivided: prompt tokens that nano-batches must keep together."""

    def __init__(
        self, spec: ModelSpec, max_tokens: int, num_sms: int, plan: Plan | None, undivided: int = 1,
    ) -> None:  # fmt: skip
        sizes = token_buckets(max_tokens)
        self._plan, self._undivided = plan, undivided
        self._serial = [Pipeline(serial_period(spec, size, num_sms), spec) for size in sizes]
        self._decoding = [
            Pipeline(serial_period(spec, size, num_sms, decode_only=True), spec)
            for size in sizes
            if size <= DECODE_ONLY_TOKENS
        ]
        self._planned = {id(p): Pipeline(p, spec) for p in (plan.periods if plan is not None else ())}
        self._enabled = {id(pipeline) for pipeline in self._planned.values()}
        self.nano_batches = max((len(p.nano_batches) for p in self._planned.values()), default=1)
        """Maximum over all pipelines."""

    def __iter__(self) -> Iterator[Pipeline]:
        """Yield the largest first: memory for their graphs is then enough for the others."""
        yield from self.serial
        yield from self.planned

    def __len__(self) -> int:
        return len(self._serial) + len(self._decoding) + len(self._planned)

    @property
    def serial(self) -> list[Pipeline]:
        return [*reversed(self._serial), *self._decoding]

    @property
    def decoding(self) -> list[Pipeline]:
        """Serial pipelines of iterations of decodes only."""
        return list(self._decoding)

    @property
    def planned(self) -> list[Pipeline]:
        """Pipelines in the order of the plan file."""
        return list(self._planned.values())

    def disable_planned(self) -> None:
        """Use none of the plan's pipelines until `enable` is called for it."""
        self._enabled.clear()

    def enable(self, pipeline: Pipeline) -> None:
        self._enabled.add(id(pipeline))

    def of(self, batch: Batch) -> Pipeline:
        """Return the plan's pipeline for this iteration, or the serial one if the plan has none that is faster, it is
        not enabled, it would divide tokens that must stay together, or the iteration has LoRA adapters."""
        # Drafts of a request and tokens of an image must not lie in several nano-batches, which do not see each other's
        # keys.
        together = batch.drafted or batch.adapters is not None or batch.until is not None
        if self._plan is not None and self._enabled and not together:
            kv_tokens = int(batch.kv_len[: batch.num_decodes].sum())
            period = self._plan.period_for(batch.num_tokens, kv_tokens)
            if period is not None and id(planned := self._planned[id(period)]) in self._enabled:
                undivided = self._undivided
                if undivided == 1 or whole_counts(batch, planned.nano_batches, undivided) is not None:
                    return planned
        if batch.num_decodes == batch.num_requests and batch.num_tokens <= self._decoding[-1].tokens:
            return next(p for p in self._decoding if p.tokens >= batch.num_tokens)
        return next(p for p in self._serial if p.tokens >= batch.num_tokens)
