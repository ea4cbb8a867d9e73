"""The model families that weft reads: a file each, listed here.

Owns: what a `config.json` means, and the names of a checkpoint's tensors.
May import: `spec.py`, `parts.py` and `rope.py` of model/; no torch.
Never: knows a kernel, a device or a plan.
"""

from __future__ import annotations

from weft.engine.errors import ModelError
from weft.engine.model.families.family import Family
from weft.engine.model.families.gemma import GEMMA, GEMMA2, GEMMA3
from weft.engine.model.families.glm import GLM, GLM4, GLM4_MOE
from weft.engine.model.families.gpt2 import GPT2, OPT
from weft.engine.model.families.gpt_oss import GPT_OSS
from weft.engine.model.families.granite import GRANITE, GRANITE_MOE
from weft.engine.model.families.llama import LLAMA
from weft.engine.model.families.mistral import MISTRAL, MIXTRAL
from weft.engine.model.families.olmo import OLMO2
from weft.engine.model.families.phi import PHI, PHI3
from weft.engine.model.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from weft.engine.model.families.smollm3 import SMOLLM3

FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, GPT_OSS, GEMMA, GEMMA2, GEMMA3, PHI, PHI3, OLMO2,
    GRANITE, GRANITE_MOE, SMOLLM3, GLM, GLM4, GLM4_MOE, OPT, GPT2,
)  # fmt: skip


def family_of(architecture: str) -> Family:
    """Raises `ModelError`, which names what is supported."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ModelError(f"architecture {architecture} is not supported; supported: {known}")
