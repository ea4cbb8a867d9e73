"""Both stages against enumeration on small machines: their output is possible and lasts as predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import (
    LLAMA_8B,
    TYPICAL,
    SyntheticBench,
    assert_schedule_is_possible,
    small_profile,
    spec_of,
    target_for,
    with_operations,
)  # fmt: skip

from weft.autosearch import resource_assignment, structure_search, two_stage_search
from weft.autosearch.bench_protocol import Load
from weft.autosearch.machine import Machine
from weft.autosearch.pipeline_structure import Structure, first_structures
from weft.autosearch.profiler import Grid, Profiler
from weft.autosearch.simulate import members_of_lanes, simulate
from weft.engine.errors import ConfigError
from weft.engine.model.operations import Resource, all_gather
from weft.engine.model.operations import projection as dense
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import Edge, NanoOperation, Period

pytestmark = pytest.mark.slow

Formula = Callable[[str, float, int], float]


def chain(*resources: Resource) -> ModelSpec:
    """A layer of operations a, b, c …, each of which needs the one before."""
    operations = []
    for i, resource in enumerate(resources):
        name, parents = "abcdef"[i], ("abcdef"[i - 1],) if i else ()
        network = resource is Resource.NETWORK
        operation = all_gather(name, parents, 1, 2) if network else dense(name, parents, 1, 1)
        operations.append(replace(operation, resource=resource))
    return with_operations(LLAMA_8B, operations)


def orders(period: Period, spec: ModelSpec) -> Iterator[Period]:
    """Every possible order of launches and choice of `next_layer`."""
    for operations in permutations(period.operations):
        for ahead in product((False, True), repeat=len(operations)):
            ops = tuple(msgspec.structs.replace(o, next_layer=n) for o, n in zip(operations, ahead, strict=True))
            candidate = msgspec.structs.replace(period, operations=ops)
            try:
                candidate.check(spec)
            except ConfigError:
                continue
            yield candidate


def best_structure(machine: Machine, load: Load, structures: list[Structure]) -> float:
    """Stage I by enumeration: structures, sizes, orders; operations of different lanes never disturb each other."""
    best, seen = float("inf"), set()
    for structure in structures:
        for sizes in product(range(1, load.tokens // 128 + 1), repeat=structure.pieces):
            if sum(sizes) != load.tokens // 128:
                continue
            edges = [128 * sum(sizes[:k]) for k in range(structure.pieces + 1)]
            lanes = {o.operation: o.lane for o in structure.period(machine.spec).operations}
            ops = tuple(NanoOperation(n, edges[a], edges[b], 1, lanes[n]) for n, a, b in structure.groups)
            for period in orders(Period(load.tokens, ops), machine.spec):
                # what counts is the order within lanes
                key = tuple(sorted((o.lane, i, o.label) for i, o in enumerate(sorted(period.operations, key=_lane))))
                if key not in seen:
                    seen.add(key)
                    durations = [
                        machine.curves.ms(o.operation, o.end - o.begin, machine.num_sms) for o in period.operations
                    ]
                    best = min(best, simulate(period, machine.spec, durations, 99, 12).ms)
    return best


def _lane(op: NanoOperation) -> str:
    return op.lane


@pytest.mark.parametrize(
    ("resources", "ms"),
    [
        # splitting is free: everything overlaps with the busier lane
        ((Resource.COMPUTE, Resource.MEMORY), {"a": (0.0, 1.0), "b": (0.0, 0.7)}),
        # a fixed cost per launch makes splitting the GEMM expensive
        ((Resource.COMPUTE, Resource.MEMORY), {"a": (0.35, 0.6), "b": (0.0, 1.0)}),
        ((Resource.COMPUTE, Resource.MEMORY, Resource.COMPUTE), {"a": (0.05, 0.5), "b": (0.0, 0.9), "c": (0.2, 0.3)}),
        ((Resource.MEMORY, Resource.COMPUTE, Resource.NETWORK), {"a": (0.0, 0.5), "b": (0.1, 0.5), "c": (0.0, 0.8)}),
    ],
)
def test_stage_one_finds_what_enumeration_finds(
    resources: tuple[Resource, ...], ms: dict[str, tuple[float, float]]
) -> None:  # fmt: skip
    spec, load = chain(*resources), Load(512, 1, 1, 1)

    def formula(name: str, work: float, sms: int) -> float:
        return ms[name][0] + ms[name][1] * work / 512 * 16 / sms

    machine = Machine(small_profile(spec, load, formula), spec)
    structures = list(first_structures(spec))
    found = [s for x in structures if (s := structure_search.solve(machine, load, x, machine.num_sms, 10.0))]
    best = min(found, key=lambda s: s.ms)
    assert best.ms == pytest.approx(best_structure(machine, load, structures), rel=2e-3)
    best.period.check(spec, 16)
    durations = [machine.curves.ms(o.operation, o.end - o.begin, 16) for o in best.period.operations]
    assert simulate(best.period, spec, durations, 99 * 16).ms == pytest.approx(best.ms, rel=2e-3)


def test_stage_one_keeps_an_operation_whole_if_cutting_it_does_not_pay() -> None:
    spec, load = chain(Resource.COMPUTE, Resource.MEMORY, Resource.COMPUTE), Load(512, 1, 1, 1)

    def formula(name: str, work: float, _: int) -> float:
        return {"a": 0.5, "b": 0.1, "c": 0.6}[name] + 0.01 * work / 512

    best = structure_search.search(Machine(small_profile(spec, load, formula), spec), load, 16, 5.0)[0]
    assert dict(best.structure.cuts) == {"a": (), "b": (), "c": ()}


def test_more_nano_batches_are_tried_near_bubbles() -> None:
    spec, load = chain(Resource.COMPUTE, Resource.MEMORY, Resource.COMPUTE), Load(1024, 1, 1, 1)

    def formula(name: str, work: float, _: int) -> float:
        return {"a": 0.2, "b": 2.0, "c": 0.2}[name] * work / 1024

    machine = Machine(small_profile(spec, load, formula), spec)
    two = [s for x in first_structures(spec) if (s := structure_search.solve(machine, load, x, 16, 5.0))]
    found = structure_search.search(machine, load, 16, 5.0)
    assert structure_search.bubble(min(two, key=lambda s: s.ms)) is not None
    assert max(s.structure.pieces for s in found) > 2
    assert found[0].ms <= min(s.ms for s in two)


def best_shares(machine: Machine, period: Period) -> float:
    """Stage II by enumeration: the SM counts of all operations, and the order of any two that do not fit together."""
    spec, total = machine.spec, machine.num_sms
    levels = resource_assignment.guest_levels(total)
    best = float("inf")
    lanes = [[o for o in period.operations if o.lane == lane] for lane in ("compute", "memory")]
    for places in combinations(range(len(period.operations)), len(lanes[0])):
        rest = [iter(lanes[0]), iter(lanes[1])]
        ops = [next(rest[0] if i in places else rest[1]) for i in range(len(period.operations))]
        options = [[*(total - n for n in levels), total] if o.lane == "compute" else [*levels, total] for o in ops]
        for sms in product(*options):
            shared = tuple(msgspec.structs.replace(o, sms=n) for o, n in zip(ops, sms, strict=True))
            waits = [
                w for i, j in combinations(range(len(ops)), 2)
                if ops[i].lane != ops[j].lane and sms[i] + sms[j] > total
                for w in (Edge(i, j, 0), Edge(j, i, -1))
            ]  # fmt: skip
            candidate = Period(period.tokens, shared, waits=tuple(waits))
            try:
                candidate.check(spec, total)
            except ConfigError:
                continue
            durations = [machine.duration(o.operation, o.end - o.begin, o.sms) for o in shared]
            best = min(best, simulate(candidate, spec, durations, total, 12).ms)
    return best


@pytest.mark.parametrize("slowdown", [1.0, 1.15])
@pytest.mark.parametrize(("product_ms", "read_ms", "bend"), [(1.0, 0.8, 0.5), (1.0, 0.3, 0.3), (0.4, 1.0, 1.0)])
def test_stage_two_finds_what_enumeration_finds(
    product_ms: float, read_ms: float, bend: float, slowdown: float
) -> None:
    """`bend` below 1: reading needs few SMs for most of its speed."""
    spec, load = chain(Resource.COMPUTE, Resource.MEMORY), Load(256, 1, 1, 1)

    def formula(name: str, work: float, sms: int) -> float:
        full = product_ms / sms * 32 if name == "a" else read_ms / (sms / 32) ** bend
        return full * work / 256

    profile = small_profile(spec, load, formula, sms=32, slowdown=slowdown, levels=(8, 16, 24, 32))
    machine = Machine(profile, spec)
    structure = Structure(2, (("a", (1,)), ("b", (1,))))
    solved = structure_search.solve(machine, load, structure, 32, 5.0)
    assert solved is not None
    found = resource_assignment.assign(machine, solved.period, load, 10.0)
    assert found.ms == pytest.approx(best_shares(machine, solved.period), rel=2e-3)


def real_machine(
    compute: float = 1.1, guest: float = 1.06, spec: ModelSpec = LLAMA_8B, load: Load = TYPICAL
) -> Machine:
    bench = SyntheticBench(spec, compute_slowdown=compute, guest_slowdown=guest)
    profiler = Profiler(bench, spec, load, Grid.coarse(load, 132), lambda *_: None)
    return Machine(profiler.run(target_for(spec), 100.0), spec)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([512, 1024, 2048]), st.floats(0.05, 0.9), st.integers(50, 6000), st.floats(1.0, 1.3),
    st.sampled_from([32, 48, 132]), st.integers(0, 15),
)  # fmt: skip
def test_every_pipeline_is_possible_and_lasts_as_predicted(
    tokens: int, share: float, context: int, slowdown: float, guest_sms: int, which: int
) -> None:
    load = Load(tokens, max(1, round(tokens * share)), context, 1024)
    machine = real_machine(slowdown, slowdown, load=load)
    structure = list(first_structures(LLAMA_8B))[which]
    solved = structure_search.solve(machine, load, structure, guest_sms, 1.0)
    if solved is None:  # the decodes of half the requests do not fit one range
        assert tokens // 128 < 2 * -(-load.decodes // 256)
        return
    choice = resource_assignment.assign(machine, solved.period, load, 0.5)
    choice.period.check(LLAMA_8B, 132)
    timeline, durations = machine.timeline(choice.period, load)
    assert_schedule_is_possible(choice.period, LLAMA_8B, durations, 132)
    assert timeline.ms == pytest.approx(choice.ms, rel=1e-6)
    assert simulate(choice.period, LLAMA_8B, durations, 132, 90).ms == pytest.approx(choice.ms, rel=5e-3)
    for op, waits in ((o, w) for o, w in zip(choice.period.operations, choice.period.waits, strict=False)):
        assert op.sms <= 132
        assert waits.distance in (0, -1)


def test_the_solvers_prediction_equals_the_replay() -> None:
    """Compares the objective, not only the replay: waits keep the order that the solver assumes."""
    machine = real_machine()
    for guest_sms in (132, 32):
        solved = structure_search.search(machine, TYPICAL, guest_sms, 1.0)[0]
        shares = resource_assignment.ResourceAssignment(machine, solved.period, TYPICAL)
        greedy = shares.greedy()
        found = shares.solve(greedy, 5.0)
        assert found.ms < greedy.ms
        assert found.period.waits
        assert found.ms < machine.serial_ms(TYPICAL)
        bare = msgspec.structs.replace(found.period, waits=())
        assert shares.evaluate(bare).ms > found.ms * 1.001


def test_the_same_search_twice_gives_the_same_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_stage_search, "GUEST_SMS", (32,))
    monkeypatch.setattr(two_stage_search, "PER_LEVEL", 1)
    machine = real_machine()
    first, second = (
        two_stage_search.search_pipelines(machine, TYPICAL),
        two_stage_search.search_pipelines(machine, TYPICAL),
    )
    assert first == second
    assert first.choices[0].ms < first.serial_ms
    assert first.structure_ms < first.choices[0].ms


def test_without_time_one_structure_is_tried() -> None:
    found = two_stage_search.search_pipelines(real_machine(), TYPICAL, seconds=0.0)
    assert len(found.choices) == 1
    found.choices[0].period.check(LLAMA_8B, 132)


@pytest.mark.parametrize("load", [Load(128, 64, 500, 100), Load(100, 10, 500, 100), Load(1, 1, 1, 1)])
def test_a_batch_too_small_to_cut_has_no_pipeline(load: Load) -> None:
    machine = real_machine()
    assert structure_search.search(machine, load, 132, 1.0) == []
    assert two_stage_search.search_pipelines(machine, load).choices == []


@pytest.mark.parametrize("load", [Load(2048, 0, 1, 1024), Load(2048, 2048, 4000, 1), Load(2100, 700, 1000, 1024)])
def test_odd_loads_have_possible_pipelines(load: Load) -> None:
    machine = real_machine(load=load)
    for solved in structure_search.search(machine, load, 132, 1.0)[:2]:
        choice = resource_assignment.assign(machine, solved.period, load, 0.5)
        choice.period.check(LLAMA_8B, 132)
        assert choice.period.tokens == load.tokens


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec_of(3584, 18944, 28, 28, 4), id="7B"),
        pytest.param(spec_of(5120, 13824, 40, 40, 40), id="13B", marks=pytest.mark.nightly),
    ],
)
def test_unseen_models_need_no_manual_step(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of Qwen2.5-7B and Llama-2-13B."""
    machine = real_machine(spec=spec)
    monkeypatch.setattr(two_stage_search, "GUEST_SMS", (32,))
    found = two_stage_search.search_pipelines(machine, TYPICAL)
    found.choices[0].period.check(spec, 132)
    assert found.choices[0].ms < found.serial_ms


def test_three_lanes_never_hold_more_than_all_sms() -> None:
    spec, load = chain(Resource.COMPUTE, Resource.MEMORY, Resource.NETWORK), Load(512, 1, 1, 1)

    def formula(name: str, work: float, sms: int) -> float:
        return {"a": 1.0, "b": 0.6, "c": 0.5}[name] * work / 512 * (32 / sms) ** (1.0 if name == "a" else 0.4)

    machine = Machine(small_profile(spec, load, formula, sms=32, levels=(8, 16, 24, 32)), spec)
    solved = structure_search.search(machine, load, 32, 2.0)[0]
    choice = resource_assignment.assign(machine, solved.period, load, 2.0)
    durations = machine.timeline(choice.period, load)[1]
    assert_schedule_is_possible(choice.period, spec, durations, 32)
    assert choice.ms < machine.serial_ms(load)


def test_waits_implied_by_lanes_and_data_are_left_out() -> None:
    machine = real_machine()
    solved = structure_search.search(machine, TYPICAL, 132, 1.0)[0]
    choice = resource_assignment.assign(machine, solved.period, TYPICAL, 1.0)
    lanes = {tuple(m): None for m in members_of_lanes(choice.period)}
    for wait in choice.period.waits:
        without = tuple(w for w in choice.period.waits if w != wait)
        rest = msgspec.structs.replace(choice.period, waits=without)
        again = resource_assignment.without_implied(
            msgspec.structs.replace(rest, waits=()), machine, choice.period.waits
        )
        assert wait in again.waits
    assert all(a < b for members in lanes for a, b in pairwise(members))
