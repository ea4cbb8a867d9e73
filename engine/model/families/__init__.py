"""The model families that weft reads: a file each, listed here.

Owns: what a `config.json` means, and the names of a checkpoint's tensors.
May import: `spec.py` and `rope.py` of model/.
Never: knows a kernel, a device or a plan.
"""

from __future__ import annotations

from weft.engine.errors import ModelError
from weft.engine.model.families.family import Family
from weft.engine.model.families.llama import LLAMA
from weft.engine.model.families.mistral import MISTRAL
from weft.engine.model.families.qwen import QWEN2, QWEN3

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3)


def family_of(architecture: str) -> Family:
    """Raises `ModelError`, which names what is supported."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ModelError(f"architecture {architecture} is not supported; supported: {known}")
