"""Models that draft on the CPU: one module for each kind, and `make_drafter`, which makes one.

Owns: the computation of drafted tokens, and the drafter's K and V.
May import: `engine/model/drafts/`, the CPU executor, kernels.
Never: decides how many drafts an iteration has, or which are accepted.
"""

from __future__ import annotations

from torch import Tensor

from weft.engine.model.drafts.draft_model import DraftModel
from weft.engine.model.drafts.eagle3 import Eagle3Head, Eagle3Weights
from weft.engine.model.drafts.mtp import MtpLayer, MtpWeights
from weft.engine.model.drafts.spec import DraftWeights
from weft.engine.model.weights import Weights
from weft.engine.runner.cpu.cpu_executor import CpuExecutor
from weft.engine.runner.cpu.drafts.draft_model import CpuDraftModel
from weft.engine.runner.cpu.drafts.drafter import CpuDrafter
from weft.engine.runner.cpu.drafts.eagle3 import CpuEagle3
from weft.engine.runner.cpu.drafts.mtp import CpuMtp
from weft.engine.runner.options.resolve import ResolvedConfig


def make_drafter(config: ResolvedConfig, weights: DraftWeights, target: CpuExecutor, pool: Tensor) -> CpuDrafter:
    """Return the drafter for `config.draft`. `pool`: the KV pool."""
    if isinstance(config.draft, Eagle3Head):
        assert isinstance(weights, Eagle3Weights)
        return CpuEagle3(config.draft, weights, target, config, pool)
    if isinstance(config.draft, MtpLayer):
        assert isinstance(weights, MtpWeights)
        return CpuMtp(config.draft, weights, target, config, pool)
    assert isinstance(config.draft, DraftModel)
    assert isinstance(weights, Weights)
    return CpuDraftModel(config.draft, weights, config, pool)
