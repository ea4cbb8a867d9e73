"""The model families that weft supports: everything that the modules of this folder define.

Owns: the meaning of `config.json` files and the names of checkpoint tensors.
May import: `spec.py`, `parts.py`, `quantization.py` and `rope.py` of model/; no torch.
Never: depends on a kernel, a device or a plan.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from weft.engine.errors import UnknownArchitecture
from weft.engine.model.families.family import Family


def _families() -> tuple[Family, ...]:
    """Return the families of all modules of this folder, in file order."""
    found = (
        value
        for module in sorted(module.name for module in iter_modules(__path__))
        for value in vars(import_module(f"{__name__}.{module}")).values()
    )
    return tuple(dict.fromkeys(value for value in found if isinstance(value, Family)))


FAMILIES = _families()


def family_of(architecture: str) -> Family:
    """Return the family of an architecture. Raises `UnknownArchitecture`, which lists those supported.

    A model without a head (`Qwen3Model`), or with one for classes, has the family of the model that generates text."""
    headed = architecture.removesuffix("Model").removesuffix("ForSequenceClassification") + "ForCausalLM"
    for name in (architecture, headed):
        for family in FAMILIES:
            if name in family.architectures:
                return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise UnknownArchitecture(f"architecture {architecture} is not supported; supported: {known}")
