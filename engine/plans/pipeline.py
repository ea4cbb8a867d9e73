"""`Pipeline`: a period bound to a model, with everything that iterations need computed once."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.engine.errors import ConfigError
from weft.engine.model.operations import Operation, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import Edge, NanoOperation, Period, by_name, serial_period

UNREAD_FROM = 129
"""Bucket size from which the last layer drops unread rows: fewer tokens fit one GEMM tile, which costs as much as
reading the weights."""


class Pipeline:
    def __init__(self, period: Period, spec: ModelSpec) -> None:
        known = by_name(spec)
        self.period = period
        self.num_layers = spec.num_layers
        self.tokens = period.tokens  # The token bucket.
        self.operations: tuple[tuple[NanoOperation, Operation], ...] = tuple(
            (nano, known[nano.operation]) for nano in period.operations
        )
        self._of_layer = self._by_layer(period, spec)
        self.lanes = {nano.lane for nano in period.operations}
        self.edges: tuple[Edge, ...] = tuple(period.dependencies(spec))
        self.begins = period.begins  # Where token ranges begin, in order.
        self.nano_batches = period.nano_batches(spec)
        """The token ranges that attention is split into, in token order."""
        decodes = [nano for nano in period.operations if known[nano.operation].role is Role.DECODE_ATTENTION]
        self.decode_sms: tuple[int, ...] = tuple(nano.sms for nano in sorted(decodes, key=lambda nano: nano.begin))
        """SMs of decode attention for each of the `nano_batches`."""
        self.gate = next((i for i, op in enumerate(period.operations) if op is period.gate), None)
        """Index of the operation at the start of which copies of pages to the host begin."""
        self.after_drop = self._after_drop(spec)
        """Operations of the last layer that run after unread rows are dropped; empty if none are dropped."""

    def _after_drop(self, spec: ModelSpec) -> frozenset[str]:
        operations = list(spec.layer_operations())
        first, *others = (i for i, op in enumerate(operations) if op.role.attends)
        roles = {known.role for _, known in self.operations}
        # A batch of decodes reads every row. Projections parallel to attention and all-reduces take all rows, and
        # `transformers` models cannot drop any.
        if self.tokens < UNREAD_FROM or Role.PREFILL_ATTENTION not in roles:
            return frozenset()
        if first > 1 or not spec.native or spec.shard_of.ranks > 1:
            return frozenset()
        return frozenset(op.name for op in operations[max(first, *others) + 1 :])

    def serial(self, spec: ModelSpec, num_sms: int) -> Pipeline:
        """Return this pipeline if serial, else a serial one with the kernel configurations of its first ranges."""
        if self.is_serial:
            return self
        given = {op.operation: op.config for op in self.period.operations if op.begin == 0}
        period = serial_period(spec, self.tokens, num_sms)
        operations = (msgspec.structs.replace(op, config=given.get(op.operation)) for op in period.operations)
        return Pipeline(msgspec.structs.replace(period, operations=tuple(operations)), spec)

    @property
    def is_serial(self) -> bool:
        """Whether operations run in sequence, each on all tokens."""
        return len(self.begins) == 1 and len(self.lanes) == 1

    def _by_layer(self, period: Period, spec: ModelSpec) -> list[range]:
        """Return the operations of each layer as a range of `operations`, adding those of a second kind of layer (dense
        or experts). Raises `ConfigError` if the pipeline is not serial and layers differ: it describes only one kind.
        """
        known, last = by_name(spec), spec.num_layers - 1
        kinds = {spec.layer(last).experts: range(len(self.operations))}
        for i in range(last):
            if (kind := spec.layer(i).experts) in kinds:
                continue
            nano = period.operations[0]
            if len(period.begins) > 1 or len({op.lane for op in period.operations}) > 1:
                raise ConfigError(
                    "a plan describes one kind of layer; this model has dense layers and layers with experts"
                )
            names = {op.operation for op in period.operations}
            others = tuple(
                (msgspec.structs.replace(nano, operation=op.name), op)
                for op in spec.layer_operations(i)
                if op.name in names or op.name not in known
            )
            kinds[kind] = range(len(self.operations), len(self.operations) + len(others))
            self.operations += others
        return [kinds[spec.layer(i).experts] for i in range(spec.num_layers)]

    def unrolled(self) -> Iterator[tuple[int, int]]:
        """Yield (layer, index of the nano-operation) in launch order over all layers."""
        for turn in range(-1, self.num_layers):
            for i in self._of_layer[max(turn, 0)]:
                layer = turn + self.operations[i][0].next_layer
                if 0 <= layer < self.num_layers:
                    yield layer, i

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same operations."""
        return len(set(self._of_layer)) == 1
