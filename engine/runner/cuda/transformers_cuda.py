"""`TransformersCudaExecutor`: runs a `transformers` model on a GPU, with attention over weft's pages.

It launches one nano-batch on the current stream. A captured run serves every iteration of its token bucket, unless the
model's code waits for the device, which `blocks_capture` detects.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from weft.engine.errors import one_line
from weft.engine.model.transformers_impl.hook import attending
from weft.engine.model.transformers_impl.module import TransformersModule
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.plans.pipeline import Pipeline
from weft.engine.runner.cuda.cuda_inputs import DeviceInputs
from weft.engine.runner.cuda.sample_buffers import SampleBuffers
from weft.engine.runner.device.transformers_attention import PagedCalls
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.decode_workspace import decode_workspace
from weft.kernels.attention.triton_backend import TritonAttention, TritonStep
from weft.kernels.common.gpu import gpu

T = TypeVar("T")


class TransformersCudaExecutor(SampleBuffers):
    """Has the interface of `CudaExecutor` to a runner."""

    def __init__(
        self, spec: TransformersSpec, model: TransformersModule, inputs: DeviceInputs, config: ResolvedConfig
    ) -> None:
        super().__init__(inputs, spec.vocab_size)
        self._model = model
        device, layout = inputs.slab.device, inputs.layout
        here = gpu(device)
        assert here is not None
        sms = here.sms
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
        self.gates: list[torch.cuda.Event] = []

    def forward(self, pipeline: Pipeline, kv: Tensor, num_rows: int) -> None:
        """Compute `logits[:num_rows]` of the rows that sample, from the slab."""
        self._prepare(pipeline.tokens)
        rows = self.inputs.column["logit_tokens"][:num_rows]
        self.logits[:num_rows].copy_(self.logits_of(pipeline, kv, rows))

    def touch(self, pipeline: Pipeline, kv: Tensor, num_rows: int) -> None:
        """Run once to load kernels. The results are not used."""
        self.forward(pipeline, kv, num_rows)

    def logits_of(self, pipeline: Pipeline, kv: Tensor, rows: Tensor) -> Tensor:
        """Return logits `[S, V]` of any rows of the current inputs. Writes the same keys and values again."""
        return self._run(self._model.logits, pipeline, kv, rows)

    def hidden_of(self, pipeline: Pipeline, kv: Tensor, rows: Tensor) -> Tensor:
        """Return the states `[S, H]` after the final norm, as `logits_of`."""
        return self._run(self._model.logits_and_states, pipeline, kv, rows)[1]

    def _run(self, model: Callable[[Tensor, Tensor, Tensor], T], pipeline: Pipeline, kv: Tensor, rows: Tensor) -> T:
        column, tokens = self.inputs.column, pipeline.tokens
        self._calls.begin(kv, column["slot_mapping"][:tokens].long(), self._steps)
        with attending(self._calls):
            out = model(self._ids[:tokens].long(), column["positions"][:tokens].long(), rows.long())
        self._calls.end()
        return out

    def blocks_capture(self, pipeline: Pipeline, kv: Tensor, num_rows: int) -> str:
        """Return the operation of the model's code that waits for the device, or "". Call after `touch`."""
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings(action="ignore"):  # torch calls this mode a prototype
                torch.cuda.set_sync_debug_mode("error")
            self.forward(pipeline, kv, num_rows)
        except RuntimeError as error:
            return one_line(error)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return ""
