"""`EncoderRunner`: computes whole sequences with a `transformers` encoder, in groups of nearly the same length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.engine.runner.memory.sleep import SleepableMemory, Sleepless
from weft.engine.wire.sampling import Pooling

PADDING = {"cpu": 48, "cuda": 2048}
"""Padding tokens that a group may have: what the overhead of another forward pass costs."""


@dataclass(frozen=True, slots=True)
class Job:
    """A sequence to compute."""

    token_ids: npt.NDArray[np.int32]
    segment: int  # Tokens before the second text of a pair; 0: no pair.
    pooling: Pooling
    unwanted: Callable[[], bool]  # Whether its request has ended meanwhile.


class EncoderBatch:
    """Sequences that are computed together."""

    num_decodes = 0

    def __init__(self, step: int, sequences: Sequence[Job]) -> None:
        self.step, self.sequences = step, sequences
        self.num_requests, self.num_tokens = len(sequences), sum(len(s.token_ids) for s in sequences)


class Encoding:
    """A batch in flight. The result has an array for each sequence: `[H]`, `[labels]`, or `[T, H]` for all states."""

    nano_batches = 1

    def __init__(self, batch: EncoderBatch, future: Future[tuple[list[npt.NDArray[np.float32] | None], float]]) -> None:
        self.batch, self._future = batch, future

    def ends_within(self, seconds: float) -> bool:
        return bool(wait([self._future], seconds).done)

    def wait(self) -> tuple[list[npt.NDArray[np.float32] | None], float]:
        """Return the arrays, None for unwanted sequences, and the seconds that the batch took."""
        return self._future.result()


class EncoderRunner:
    """Owns the module, and a thread that computes batches in the order of their launch."""

    def __init__(
        self, module: Any, device: torch.device, threads: int, sleepable: SleepableMemory | Sleepless, *,
        classifies: bool,
    ) -> None:  # fmt: skip
        self._module, self._device, self.sleepable, self._classifies = module, device, sleepable, classifies
        if device.type == "cpu":
            _use_onednn(module)
        # The thread count applies to the calling thread.
        self._thread = ThreadPoolExecutor(1, "weft-encoder", torch.set_num_threads, (threads,))
        self._takes_segments = getattr(module.config, "type_vocab_size", 0) > 1

    def launch(self, batch: EncoderBatch) -> Encoding:
        return Encoding(batch, self._thread.submit(self.run, batch))

    def close(self) -> None:
        self._thread.shutdown()

    @torch.inference_mode()
    def run(self, batch: EncoderBatch) -> tuple[list[npt.NDArray[np.float32] | None], float]:
        """Compute a batch. Raises errors of torch, after which the engine cannot continue."""
        begin = time.perf_counter()
        out: list[npt.NDArray[np.float32] | None] = [None] * batch.num_requests
        for rows in groups([len(s.token_ids) for s in batch.sequences], PADDING[self._device.type]):
            wanted = [row for row in rows if not batch.sequences[row].unwanted()]
            if wanted:
                for row, value in zip(wanted, self._compute([batch.sequences[row] for row in wanted]), strict=True):
                    out[row] = value
        return out, time.perf_counter() - begin

    def _compute(self, sequences: Sequence[Job]) -> list[npt.NDArray[np.float32]]:
        lengths = [len(s.token_ids) for s in sequences]
        n, longest = len(lengths), max(lengths)
        ids = np.full((n, longest), getattr(self._module.config, "pad_token_id", None) or 0, np.int64)
        for row, s in enumerate(sequences):
            ids[row, : lengths[row]] = s.token_ids
        given: dict[str, Tensor] = {"input_ids": self._up(ids)}
        mask = None
        if min(lengths) < longest:
            mask = given["attention_mask"] = self._up(
                (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int64)
            )
        if self._takes_segments and any(s.segment for s in sequences):
            starts = np.array([s.segment or longest for s in sequences])[:, None]
            ends = np.array(lengths)[:, None]
            at = np.arange(longest)
            given["token_type_ids"] = self._up(((at >= starts) & (at < ends)).astype(np.int64))
        out = self._module(**given, return_dict=True)
        if self._classifies:
            return list(out.logits.float().cpu().numpy())
        return list(self._pooled(out.last_hidden_state, sequences, lengths, mask))

    def _pooled(
        self, states: Tensor, sequences: Sequence[Job], lengths: list[int], mask: Tensor | None
    ) -> Iterator[npt.NDArray[np.float32]]:
        """Yield each sequence's result. states: `[N, L, H]`; mask: `[N, L]`, None if nothing is padded."""
        modes, found = {s.pooling for s in sequences}, {}
        if "mean" in modes:
            there = states.float() if mask is None else states.float() * mask[:, :, None]
            found["mean"] = (there.sum(1) / self._up(np.array(lengths, np.float32))[:, None]).cpu().numpy()
        if "max" in modes:
            there = states if mask is None else states.masked_fill(mask[:, :, None] == 0, -torch.inf)
            found["max"] = there.amax(1).float().cpu().numpy()
        if modes - found.keys():
            every = states.float().cpu().numpy()
            for name in modes - found.keys():
                found[name] = every
        for row, s in enumerate(sequences):
            value = found[s.pooling][row]
            cut = {"cls": 0, "last": lengths[row] - 1, "all": slice(lengths[row])}.get(s.pooling)
            yield value if cut is None else value[cut]

    def _up(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def groups(lengths: Sequence[int], padding: int) -> Iterator[list[int]]:
    """Yield the rows of each forward pass, sorted by length, with at most `padding` padding tokens each."""
    group: list[int] = []
    added = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        grows = len(group) * (lengths[row] - lengths[group[-1]]) if group else 0
        if group and added + grows > padding:
            yield group
            group, added, grows = [], 0, 0
        group.append(row)
        added += grows
    if group:
        yield group


def _use_onednn(module: nn.Module) -> None:
    """Let oneDNN compute linear layers in float32: torch uses MKL, which is half as fast on AMD CPUs with AVX-512."""
    for part in module.modules():
        if type(part) is nn.Linear and part.weight.dtype == torch.float32:
            part.forward = _linear_of(part)  # type: ignore[method-assign,assignment]


def _linear_of(part: nn.Linear) -> Callable[[Tensor], Tensor]:
    linear = torch.ops.mkldnn._linear_pointwise

    def forward(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return F.linear(x, part.weight, part.bias)
        out: Tensor = linear(x, part.weight, part.bias, "none", [], "")
        return out

    return forward
