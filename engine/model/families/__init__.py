"""The model families that weft reads: what the modules of this folder define.

Owns: what a `config.json` means, and the names of a checkpoint's tensors.
May import: `spec.py`, `parts.py`, `quantization.py`, `integer_config.py` and `rope.py` of model/; no torch.
Never: knows a kernel, a device or a plan.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from weft.engine.errors import UnknownArchitecture
from weft.engine.model.families.family import Family


def _families() -> tuple[Family, ...]:
    """Of every module here, in the order of their files."""
    found = (
        value
        for module in sorted(module.name for module in iter_modules(__path__))
        for value in vars(import_module(f"{__name__}.{module}")).values()
    )
    return tuple(dict.fromkeys(value for value in found if isinstance(value, Family)))


FAMILIES = _families()


def family_of(architecture: str) -> Family:
    """Raises `UnknownArchitecture`, which names what is supported.

    A checkpoint without a head, of an embedding model, is that of the model that has one: `Qwen3Model`.
    """
    headed = architecture.removesuffix("Model") + "ForCausalLM"
    for name in (architecture, headed):
        for family in FAMILIES:
            if name in family.architectures:
                return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise UnknownArchitecture(f"architecture {architecture} is not supported; supported: {known}")
