"""Launcher tables: on each device, what launches an operation of a layer, by the name of its kernel.

The layer itself is written once, as data (`ModelSpec.layer_operations`); a launcher reads from an operation what it
computes from and where the result goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from weft.engine.errors import ModelError
from weft.engine.model.spec import ModelSpec

Launcher = TypeVar("Launcher")


def launchers_of(spec: ModelSpec, table: Mapping[str, Launcher], device: str) -> dict[str, Launcher]:
    """The launcher of each operation of the layers, by its name.

    Raises `ModelError` for an operation that the device has no launcher for.
    """
    found = {}
    kinds = {spec.layer(i).experts: i for i in range(spec.num_layers)}
    for op in (op for layer in kinds.values() for op in spec.layer_operations(layer)):
        if op.kernel not in table:
            raise ModelError(f"{device} cannot launch the operation {op.name} ({op.kernel}): it has {', '.join(table)}")
        found[op.name] = table[op.kernel]
    return found
