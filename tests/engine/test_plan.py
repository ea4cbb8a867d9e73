"""Plans: their valid content, their dependencies, and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weft.engine.errors import ConfigError
from weft.engine.model.parts import Norm
from weft.engine.model.rope import Rope
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import Edge, NanoOperation, Period, Plan, Target, load_plan, model_key, serial_period
from weft.kernels.matmul.gemm_config import SPECIAL

SPEC = ModelSpec(
    "LlamaForCausalLM", 1000, 256, 512, 4, 4, 2, 64, 4096, Norm(1e-5), (Rope(1e4),), "bfloat16",
)  # fmt: skip
TARGET = Target("GPU", 132, model_key(SPEC), "bfloat16", "abc")


def two_halves() -> Period:
    """The second half is in attention while the first is in its GEMMs, and one layer after it."""
    first = [NanoOperation(n, 0, 256, 100) for n in ("qkv", "prefill", "o", "gate_up", "down")]
    second = [NanoOperation(n, 256, 512, 100) for n in ("prefill", "o", "gate_up", "down")]
    return Period(
        512,
        (
            *first[:1],
            NanoOperation("decode", 0, 256, 32, "memory"),
            *first[1:],
            *(NanoOperation("qkv", b, b + 128, 100, config=SPECIAL) for b in (256, 384)),
            NanoOperation("decode", 256, 512, 32, "memory"),
            *second,
        ),
        waits=(Edge(1, 7, 0),),
        min_tokens=384,
        min_kv_tokens=1000,
        max_kv_tokens=5000,
        figures={"gain": 1.1},
    )


def changed(i: int, **change: Any) -> Period:
    period = two_halves()
    operations = list(period.operations)
    operations[i] = msgspec.structs.replace(operations[i], **change)
    return msgspec.structs.replace(period, operations=tuple(operations))


def test_a_possible_pipeline_passes() -> None:
    two_halves().check(SPEC, 132)
    serial_period(SPEC, 300, 132).check(SPEC, 132)  # the last range may end where the batch does


@pytest.mark.parametrize(
    ("period", "message"),
    [
        (changed(0, operation="embed"), "'embed'; this model has qkv, decode"),
        (changed(0, end=640), r"token range must lie in \[0, 512\)"),
        (changed(0, begin=100), "multiples of 128"),
        (changed(0, sms=133), "133 SMs, but the GPU has 132"),
        (changed(0, sms=0), "0 SMs"),
        (changed(0, lane="network"), "network lane"),
        (changed(0, end=128), r"compute qkv once for every token; \[128, 256\) is not"),
        (changed(6, end=512), "compute qkv once"),
        (changed(2, end=512), "compute prefill once"),
        (changed(3, next_layer=True), "launches o.* before|before prefill"),
        (msgspec.structs.replace(two_halves(), waits=(Edge(0, 99, 0),)), "an operation that it does not have"),
        (msgspec.structs.replace(two_halves(), waits=(Edge(8, 1, 0),)), "before decode.*256:512"),
        (msgspec.structs.replace(two_halves(), operations=two_halves().operations[::-1]), "launches"),
        (msgspec.structs.replace(two_halves(), offload="ffn"), "offloads pages during 'ffn'"),
        (msgspec.structs.replace(two_halves(), offload="decode"), "offloads pages during 'decode'"),
    ],
    ids=lambda v: v[:20] if isinstance(v, str) else "",
)
def test_an_impossible_pipeline_is_refused(period: Period, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        period.check(SPEC, 132)


def test_pages_leave_during_the_first_part_of_the_gemm() -> None:
    period = two_halves()
    assert period.gate is None
    gate = msgspec.structs.replace(period, offload="gate_up").gate
    assert gate is not None
    assert gate.label == "gate_up[0:256]"


def test_attention_is_cut_alike() -> None:
    period = two_halves()
    operations = [o for o in period.operations if o.operation != "prefill"]
    whole = NanoOperation("prefill", 0, 512, 100)
    with pytest.raises(ConfigError, match="same token ranges"):
        msgspec.structs.replace(period, operations=(*operations, whole), waits=()).check(SPEC, 132)


def test_collectives_on_two_lanes_are_refused() -> None:
    half = SPEC.shard(0, 2)
    period = serial_period(half, 512, 132)
    period.check(half, 132)

    def on_the_network(*names: str) -> Period:
        moved = (msgspec.structs.replace(o, lane="network") if o.operation in names else o for o in period.operations)
        return msgspec.structs.replace(period, operations=tuple(moved))

    on_the_network("o_reduce", "down_reduce").check(half, 132)
    with pytest.raises(ConfigError, match="all collectives on one lane, not on compute and network"):
        on_the_network("o_reduce").check(half, 132)


def test_too_many_starts_are_refused() -> None:
    operations = [
        NanoOperation(o.name, b, b + 128, 1) for o in SPEC.layer_operations() for b in range(0, 128 * 9, 128)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="9 places; the limit is 8"):
        Period(128 * 9, tuple(operations)).check(SPEC)


def test_dependencies_are_parents_on_the_same_tokens() -> None:
    period = two_halves()
    label = [o.label for o in period.operations]
    edges = {(label[e.before], label[e.after], e.distance) for e in period.dependencies(SPEC)}
    assert ("qkv[256:384]", "decode[256:512]", 0) in edges
    assert ("down[0:256]", "qkv[0:256]", -1) in edges
    # prefill attention reads what earlier tokens of the iteration wrote; decodes do not
    assert ("qkv[0:256]", "prefill[256:512]", 0) in edges
    assert ("qkv[0:256]", "decode[256:512]", 0) not in edges
    assert not any({"o[0:256]", "gate_up[256:512]"} == {a, b} for a, b, _ in edges)
    assert ("decode[0:256]", "qkv[384:512]", 0) in edges  # the wait


def test_every_layer_of_every_operation_runs_once_and_in_order() -> None:
    ops = two_halves().operations
    ahead = tuple(msgspec.structs.replace(o, next_layer=o.operation == "qkv") for o in ops)
    ordered = tuple(sorted(ahead, key=lambda o: o.operation == "qkv"))
    period = msgspec.structs.replace(two_halves(), operations=ordered, waits=())
    period.check(SPEC, 132)
    runs = [(layer, period.operations[i]) for layer, i in Pipeline(period, replace(SPEC, num_layers=3)).unrolled()]
    assert sorted((layer, o.label) for layer, o in runs) == sorted((n, o.label) for n in range(3) for o in ordered)
    done: set[tuple[int, str]] = set()
    for layer, op in runs:
        for edge in period.dependencies(SPEC):
            if period.operations[edge.after] is op:
                before = period.operations[edge.before]
                at = layer - op.next_layer + edge.distance + before.next_layer
                assert at < 0 or (at, before.label) in done
        done.add((layer, op.label))


def test_the_smallest_fitting_period_is_chosen_within_its_bounds() -> None:
    small = msgspec.structs.replace(two_halves(), tokens=512)
    large = msgspec.structs.replace(serial_period(SPEC, 1024, 132), min_tokens=400, max_kv_tokens=8000)
    plan = Plan(TARGET, "1:1", (large, small))
    assert plan.period_for(500, 2000) is small
    assert plan.period_for(383, 2000) is None
    assert plan.period_for(500, 5000) is large
    assert plan.period_for(600, 8000) is None


def test_a_plan_file_round_trips(tmp_path: Path) -> None:
    plan = Plan(TARGET, "1024:512", (two_halves(), serial_period(SPEC, 512, 132)), made="today")
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99, this weft reads 1 .weft search"),
        ({"format": "other"}, "is not a plan"),
        ({"periods": 3}, "not a valid plan: Expected `array`"),
        ({"speed": 3}, "unknown field `speed`"),
        ({"workload": None}, "Expected `str`"),
    ],
)
def test_a_file_that_is_not_a_plan_is_a_one_line_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan.json"
    Plan(TARGET, "1:1", (two_halves(),)).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message) as caught:
        load_plan(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b'"text"', b'{"mod\xffel": 1}', b"[" * 9999])
def test_a_file_that_is_not_json_is_a_one_line_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(ConfigError, match="is not a plan"):
        load_plan(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="cannot read"):
        load_plan(tmp_path / "none.json")


def test_the_model_key_distinguishes_shapes() -> None:
    assert model_key(SPEC) == model_key(replace(SPEC, ropes=(Rope(5e5),)))
    assert model_key(SPEC) != model_key(replace(SPEC, num_kv_heads=4))
