"""One architecture computed by transformers' code, in every condition, compared with its own `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import GREEDY, Harness
from transformers import AutoModelForCausalLM, GenerationConfig

from weft.engine.wire.messages import TokenLogprobs

VOCABULARY = 199
OPTIONS: dict[str, Any] = {"model_impl": "transformers", "page_size": 4, "max_num_seqs": 8, "num_pages": 400}
LOGPROB_TOLERANCE = 2e-3
JITTER, DRAWS = 1e-5, 16
"""Relative change of the embeddings that stands for float32's rounding (1.2e-7 in each of about 100 operations),
and how often a random one is tried."""


def prompts(seed: int, *lengths: int) -> list[np.ndarray]:
    """Random prompts; the longer ones exceed the windows (24)."""
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCABULARY, length) for length in lengths]


def agrees(token: int, entry: TokenLogprobs, row: torch.Tensor) -> bool:
    """Whether the reference's log-probabilities `row` [vocabulary] are those of `entry` and allow `token`."""
    values, ids = np.asarray(entry.values), torch.as_tensor(np.asarray(entry.ids, np.int64))
    near = np.allclose(values, row[ids].numpy(), atol=LOGPROB_TOLERANCE, rtol=1e-3)
    return bool(near and row.max() - row[token] <= 2 * LOGPROB_TOLERANCE)


class Parity:
    """The model as `transformers` runs it alone, the reference of `serve`.

    A model may have cliffs: two tokens that are equally likely, or a router that drops an expert below a threshold. A
    value within rounding of a cliff makes two correct computations differ by any amount. `serve` therefore accepts a
    difference, and counts it in `ties`, if the reference gives weft's result once its embeddings change by `JITTER`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ties = 0
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.model.generation_config = GenerationConfig()

    def alone(self, prompt: np.ndarray, new: int) -> tuple[list[int], torch.Tensor]:
        """Its tokens, and the log-probabilities that each was taken from: [new, vocabulary]."""
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        with torch.inference_mode():
            reported = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new,
                pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        return reported.sequences[0, len(prompt) :].tolist(), torch.cat(reported.logits).float().log_softmax(-1)

    def _jittered(self, prompt: np.ndarray) -> Iterator[torch.Tensor]:
        """The log-probabilities after the prompt [vocabulary] for each of `DRAWS` random changes by `JITTER`."""
        generator = torch.Generator().manual_seed(0)

        def jitter(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output * (1 + JITTER * torch.randn(output.shape, generator=generator))

        hook = self.model.get_input_embeddings().register_forward_hook(jitter)
        try:
            for _ in range(DRAWS):
                yield self.alone(prompt, 1)[1][0]
        finally:
            hook.remove()

    def compare(self, got: list[int], entries: list[TokenLogprobs], prompt: np.ndarray, new: int) -> None:
        """Compare with `generate`, which goes on after weft's token where the two tokens differ at a tie."""
        at = 0
        while at < len(got):
            for expected, row in zip(*self.alone(np.concatenate((prompt, got[:at])), new - at), strict=True):
                token, entry = got[at], entries[at]
                if token != expected or not agrees(token, entry, row):
                    self.ties += 1
                    rows = self._jittered(np.concatenate((prompt, got[:at])))
                    assert any(agrees(token, entry, r) for r in rows), f"token {at} of {new} is wrong, not at a tie"
                at += 1
                if token != expected or at == len(got):
                    break

    def serve(self, harness: Harness, requested: list[np.ndarray], new: int, *, ends: bool = False) -> list[int]:
        """Serve the prompts together and compare tokens and log-probabilities. Return how many tokens of each were
        cached."""
        handles = [harness.add(p, max_tokens=new, ignore_eos=not ends, logprobs=3, **GREEDY) for p in requested]
        harness.run()
        for handle, prompt in zip(handles, requested, strict=True):
            got = harness.tokens[handle]
            assert len(got) == new or (ends and got[-1] in harness.engine.spec.eos_token_ids)
            self.compare(got, harness.logprobs[handle], prompt, new)
        return [harness.cached[h] for h in handles]

    def engine(self, **options: Any) -> Harness:
        harness = Harness(self.path, **{**OPTIONS, **options})
        harness.poison_pages()
        return harness

    # -- the conditions

    def chunks_and_reuse(self) -> None:
        """Chunks of 7 with decodes, then a prefix that was computed before."""
        harness = self.engine(max_num_batched_tokens=7)
        first = prompts(2, 3, 19, 40)
        self.serve(harness, first, 8)
        longer = np.concatenate((first[2], prompts(4, 5)[0]))
        assert min(self.serve(harness, [longer, first[2]], 4)) >= 36

    def single_tokens(self) -> None:
        self.serve(self.engine(max_num_batched_tokens=1), prompts(1, 5, 30), 6)

    def preemption(self) -> None:
        own = self.engine().engine.resolved.states.pages
        # Two states for each of four requests; fewer pages if answers end early.
        for pages in (8 * own + 30, 8 * own + 24) if own else (22, 17):
            harness = self.engine(max_num_batched_tokens=64, num_pages=pages, prefix_caching=False)
            harness.expect_short_outputs()
            # Requests with an open end are admitted by their expected length.
            self.serve(harness, prompts(5, 30, 11, 40, 26, 9), 20, ends=True)
            if harness.engine.scheduler.preemptions:
                return
        raise AssertionError("nobody was preempted")

    def host_tier(self) -> None:
        """Chunks of 64, pages that return from the host, contexts longer than the windows."""
        harness = self.engine(max_num_batched_tokens=64, host_kv_gib=0.03)
        tiers, pool = harness.engine.tiers, harness.engine.scheduler.pool
        assert tiers is not None
        tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
        requested = prompts(6, 75, 33)
        self.serve(harness, requested, 8)
        tiers.flush(60)
        pool.evict_all()
        harness.poison_pages()
        cached = self.serve(harness, requested, 8)
        # If all layers have windows, pages before them are freed.
        assert cached[1] >= 32 or harness.engine.spec.kv_window is not None

    CONDITIONS = ("chunks_and_reuse", "single_tokens", "preemption", "host_tier")
