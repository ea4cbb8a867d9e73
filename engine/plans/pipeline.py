"""`Pipeline`: a period bound to a model: each nano-operation with what it is, and what follows from the roles."""

from __future__ import annotations

from collections.abc import Iterator

from weft.engine.model.operations import Operation, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import Edge, NanoOperation, Period, by_name


class Pipeline:
    """Everything that iterations ask of a period, worked out once."""

    def __init__(self, period: Period, spec: ModelSpec) -> None:
        known = by_name(spec)
        self.period = period
        self.num_layers = spec.num_layers
        self.tokens = period.tokens
        """the token bucket"""
        self.operations: tuple[tuple[NanoOperation, Operation], ...] = tuple(
            (nano, known[nano.operation]) for nano in period.operations
        )
        self.lanes = {nano.lane for nano in period.operations}
        self.edges: tuple[Edge, ...] = tuple(period.dependencies(spec))
        self.begins = period.begins
        """where token ranges begin, in order"""
        self.nano_batches = period.nano_batches(spec)
        """the token ranges that attention is cut into, in token order"""
        decodes = [nano for nano, op in self.operations if op.role is Role.DECODE_ATTENTION]
        self.decode_sms: tuple[int, ...] = tuple(nano.sms for nano in sorted(decodes, key=lambda nano: nano.begin))
        """SMs of decode attention for each of the `nano_batches`"""
        self.gate = next((i for i, op in enumerate(period.operations) if op is period.gate), None)
        """index of the operation from whose beginning on pages leave for the host"""

    def unrolled(self, num_layers: int | None = None) -> Iterator[tuple[int, int]]:
        """(layer, index of the nano-operation) in the order of launch over the whole model, or its first layers."""
        num_layers = self.num_layers if num_layers is None else min(num_layers, self.num_layers)
        for turn in range(-1, num_layers):
            for i, (nano, _) in enumerate(self.operations):
                layer = turn + nano.next_layer
                if 0 <= layer < num_layers:
                    yield layer, i
