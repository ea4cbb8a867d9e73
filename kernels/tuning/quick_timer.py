"""`QuickTimer`: times GEMMs at start-up in short bursts."""

from __future__ import annotations

import logging

import torch

from weft.kernels.matmul import gemm_launch
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.tuned import Shape
from weft.kernels.tuning.calls import DEVICE, copies_for, gemm_call, rule, weights
from weft.kernels.tuning.measure import burst

log = logging.getLogger("weft.kernels")


class QuickTimer:
    """Times GEMMs for `tile_search.search` on the current GPU. Keeps the weight of the last shape."""

    def __init__(self, head_dim: int, kv_heads: int) -> None:
        self._head_dim, self._kv_heads = head_dim, kv_heads
        self._sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._space: gemm_launch.Workspace | None = None
        self._shape: Shape | None = None
        self._weights: list[torch.Tensor] = []

    def rule(self, shape: Shape, tokens: int) -> GemmConfig:
        return rule(shape, tokens, self._sms)

    def __call__(self, shape: Shape, tokens: int, config: GemmConfig) -> float | None:
        """Return milliseconds, or None if the configuration does not compile or memory is too small."""
        try:
            space = self._space = self._space or gemm_launch.workspace(DEVICE, 1 << 24)
            if shape != self._shape:
                self._shape, self._weights = None, []
                self._shape, self._weights = shape, weights(shape, copies_for(shape))
            return burst(
                [
                    gemm_call(shape, tokens, w, space, self._sms, config, self._head_dim, self._kv_heads)
                    for w in self._weights
                ],
                5,
            )
        except Exception as error:  # a compiler may raise anything for a tile that does not fit
            log.debug("%s with %d tokens and %s: %s", shape, tokens, config, error)
            return None
