"""`launchers_for`: looks up a device's launchers of a model's operations, by kernel name.

Layers are data (`ModelSpec.layer_operations`). A launcher reads an operation's source and target from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from weft.engine.errors import ModelError
from weft.engine.model.spec import ModelSpec

Launcher = TypeVar("Launcher")


def launchers_for(spec: ModelSpec, table: Mapping[str, Launcher], device: str) -> dict[str, Launcher]:
    """Return the launcher of each layer operation by name. Raises `ModelError` if `table` lacks one."""
    found = {}
    kinds = {spec.layer(i): i for i in range(spec.num_layers)}
    for op in (op for layer in kinds.values() for op in spec.layer_operations(layer)):
        if op.kernel not in table:
            raise ModelError(f"{device} cannot launch the operation {op.name} ({op.kernel}), only {', '.join(table)}")
        found[op.name] = table[op.kernel]
    return found
