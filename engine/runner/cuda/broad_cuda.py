"""`BroadCudaExecutor`: a `transformers` model on a GPU, its attention over our pages; as `CudaExecutor`.

It launches on the current stream alone, one nano-batch: a captured run serves every iteration of its token bucket,
where the model's code never waits for the device. `blocks_capture` finds out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.engine.errors import one_line
from weft.engine.model.broad.hook import attending
from weft.engine.model.broad.module import BroadModule
from weft.engine.model.broad.spec import BroadSpec
from weft.engine.plans.pipeline import Pipeline
from weft.engine.runner.cuda.cuda_inputs import DeviceInputs
from weft.engine.runner.device.broad_attention import PagedCalls
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.decode_workspace import decode_workspace
from weft.kernels.attention.triton_backend import TritonAttention, TritonStep
from weft.kernels.common.gpu import gpu
from weft.kernels.sampling import resident
from weft.kernels.sampling.sampler import sample, sample_scratch

T = TypeVar("T")


class BroadCudaExecutor:
    """See `CudaExecutor`, whose interface to a runner this is."""

    def __init__(self, spec: BroadSpec, model: BroadModule, inputs: DeviceInputs, config: ResolvedConfig) -> None:
        self._model, self.inputs = model, inputs
        device = inputs.slab.device
        here = gpu(device)
        assert here is not None
        sms, layout, t, s = here.sms, inputs.layout, inputs.layout.max_tokens, inputs.layout.max_sampled
        self._calls = PagedCalls(spec, config, lambda shape: TritonAttention(shape, sms))
        work = inputs.decode_work(0), *inputs.prefill_work(0)
        self._steps = [
            TritonStep(
                inputs.page_table, *work,
                decode_workspace(
                    layout.max_part_slots, layout.max_tokens, shape.num_kv_heads, shape.group, shape.head_dim, device
                ),
            )
            for shape in self._calls.shapes
        ]  # fmt: skip
        self.last_token = torch.zeros(s, dtype=torch.int64, device=device)
        """[slots] the token that each slot's request sampled last"""
        # rows of whole 16 bytes, which the copy engine asks for
        width = -(-spec.vocab_size // 4) * 4
        self.logits = torch.zeros(s, width, dtype=torch.float32, device=device)[:, : spec.vocab_size]
        self.sampled = torch.zeros(2, s, dtype=torch.int64, device=device)
        """[2, rows] what `sample` drew, and 1 for rows whose logits were no numbers"""
        self.tokens, self._bad = self.sampled
        self.gates: list[torch.cuda.Event] = []
        self.steps: list[Any] = []
        """of an attention back end that plans on the host: none does here"""
        self._candidates = sample_scratch(s, device)
        self._ids = torch.zeros(t, dtype=torch.int32, device=device)

    def forward(self, pipeline: Pipeline, kv: Tensor, num_rows: int) -> None:
        """From the slab to `logits[:num_rows]` of the rows that sample."""
        column, count = self.inputs.column, self.inputs.count
        ids = self._ids[: pipeline.tokens]
        resident.prepare(
            column["token_ids"], column["token_slots"], self.last_token, self.inputs.page_table, column["update_at"],
            column["update_page"], count["updates"], out=ids,
        )  # fmt: skip
        self.logits[:num_rows].copy_(self.logits_of(pipeline, kv, column["logit_tokens"][:num_rows]))

    def touch(self, pipeline: Pipeline, kv: Tensor, num_rows: int) -> None:
        """One such run. Computes nothing that anybody asked for."""
        self.forward(pipeline, kv, num_rows)

    def logits_of(self, pipeline: Pipeline, kv: Tensor, rows: Tensor) -> Tensor:
        """`[S, V]` of any rows of the iteration whose inputs are here; writes the same keys and values again."""
        return self._run(self._model.logits, pipeline, kv, rows)

    def hidden_of(self, pipeline: Pipeline, kv: Tensor, rows: Tensor) -> Tensor:
        """As `logits_of`: `[S, H]` states behind the final norm."""
        return self._run(self._model.logits_and_states, pipeline, kv, rows)[1]

    def _run(self, model: Callable[[Tensor, Tensor, Tensor], T], pipeline: Pipeline, kv: Tensor, rows: Tensor) -> T:
        column, tokens = self.inputs.column, pipeline.tokens
        self._calls.begin(kv, column["slot_mapping"][:tokens].long(), self._steps)
        with attending(self._calls):
            out = model(self._ids[:tokens].long(), column["positions"][:tokens].long(), rows.long())
        self._calls.end()
        return out

    def sample(self, num_rows: int) -> None:
        """A token for each of the first rows of `logits` into `tokens`; the slots' requests keep it as their last."""
        tokens = self.tokens[:num_rows]
        sample(
            self.logits[:num_rows], **self.inputs.sampler_arguments(num_rows), out=tokens, bad=self._bad[:num_rows],
            scratch=self._candidates[:num_rows],
        )  # fmt: skip
        slots = self.inputs.column["slots"][:num_rows]
        resident.remember(tokens, slots, self.inputs.count["sampled"], self.last_token)

    def blocks_capture(self, pipeline: Pipeline, kv: Tensor, num_rows: int) -> str:
        """What in the model's code waits for the device, in words; "" if nothing does. After a `touch`."""
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings(action="ignore"):  # of a mode that torch calls a prototype
                torch.cuda.set_sync_debug_mode("error")
            self.forward(pipeline, kv, num_rows)
        except RuntimeError as error:
            return one_line(error)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return ""
