"""`weft bench formulas`: the constants of the search's formulas agree with the recorded profile."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from weft.autosearch import formula_profile, resource_assignment, structure_search
from weft.autosearch.accelerators import accelerator
from weft.autosearch.bench_protocol import Load
from weft.autosearch.cost_model import Usage
from weft.autosearch.formula_profile import CONSTANTS
from weft.autosearch.machine import Machine
from weft.autosearch.pipeline_structure import first_structures
from weft.autosearch.profile import SHIPPED, load_profile
from weft.engine.config import PRESETS
from weft.engine.errors import ConfigError
from weft.engine.model.directory import read_spec
from weft.engine.model.operations import Resource, Role
from weft.kernels.matmul.gemm_config import SPECIAL
from weft.tools.papers import formulas

LLAMA_8B = read_spec(PRESETS / "llama-3-8b")
TYPICAL = Load(2048, 683, 1280, 1024)
REFRESH = "run: weft bench formulas --out autosearch/formula_constants.json"


@pytest.fixture(scope="module")
def formula_machine() -> Machine:
    return Machine(formula_profile.formula_profile(LLAMA_8B, TYPICAL, accelerator("h200")), LLAMA_8B)


def test_the_constants_are_those_of_the_recorded_profile(tmp_path: Path) -> None:
    (name,) = CONSTANTS.profiles
    assert formulas.derive(load_profile(SHIPPED / name)) == CONSTANTS, REFRESH
    assert formulas.main(["--out", str(tmp_path / "constants.json")]) == 0
    shipped = Path(formula_profile.__file__).with_name("formula_constants.json")
    assert (tmp_path / "constants.json").read_bytes() == shipped.read_bytes(), REFRESH


def test_every_constant_comes_from_a_profile_of_several_ranks() -> None:
    """A profile made by the formulas gives their constants back, those of collectives included."""
    spec = read_spec(PRESETS / "llama-3-70b").shard(0, 4)
    made = formula_profile.formula_profile(spec, TYPICAL, accelerator("h200"))
    zero = msgspec.structs.replace(
        CONSTANTS, gemm=0, read=0, prefill=0, launch_ms=0, link=0, hop_ms=0, gemm_next_to_collective=0,
        attention_and_collective=0, watts=dict.fromkeys(Resource, 0.0),
    )  # fmt: skip
    found = formulas.derive(made, zero)
    for field in ("gemm", "read", "prefill", "link", "gemm_next_to_collective", "attention_and_collective"):
        assert getattr(found, field) == pytest.approx(getattr(CONSTANTS, field), rel=0.02), field
    assert (found.launch_ms, found.hop_ms) == pytest.approx((CONSTANTS.launch_ms, CONSTANTS.hop_ms), abs=1e-4)
    assert found.watts == pytest.approx(CONSTANTS.watts, abs=2e-3)


@pytest.mark.parametrize("preset", ["llama-2-70b", "llama-3-70b"])
def test_eight_ranks_take_the_times_of_table_2(preset: str) -> None:
    """NanoFlow prints milliseconds of LLaMA-2-70B on eight A100s for 2,048 tokens. The formulas give the same for one
    rank of eight without losses, apart from GEMMs, whose last wave of tiles does not fill the SMs."""
    printed = {
        "qkv": 11.01, "o": 8.81, "gate_up": 61.67, "down": 30.84, "decode": 28.89, "prefill": 0.37, "network": 31.33,
    }  # fmt: skip
    a100, usage = accelerator("a100"), Usage(2048, 512, 1024)
    spec = read_spec(PRESETS / preset).shard(0, 8)
    ideal = formula_profile.Formulas(spec, a100, formulas._IDEAL)
    attention = {
        Role.DECODE_ATTENTION: usage.decodes * usage.context,
        Role.PREFILL_ATTENTION: usage.prefills * usage.prompt,
    }
    found = dict.fromkeys(printed, 0.0)
    for op in spec.layer_operations():
        filled = 1.0
        if op.role is Role.PROJECTION:
            tiles = usage.dense_batch // SPECIAL.tokens * -(-op.out // SPECIAL.features)
            filled = tiles / (-(-tiles // a100.sms) * a100.sms)
        ms = ideal.ms(op, attention.get(op.role, usage.dense_batch), a100.sms)
        found["network" if op.role is Role.NETWORK else op.name] += spec.num_layers * ms * filled
    assert found == pytest.approx(printed, rel=0.01)


def test_the_formulas_predict_the_recorded_times(formula_machine: Machine) -> None:
    recorded = Machine(load_profile(formulas.DEFAULT), LLAMA_8B)
    for sms in (8, 16, 24, 32, 48, 132):  # decode attention reaches 0.24, 0.46, 0.67, 0.84 and 0.98 of its full speed
        ours, theirs = (m.curves.ms("decode", TYPICAL.kv_tokens, sms) for m in (formula_machine, recorded))
        assert ours == pytest.approx(theirs, rel=0.05), sms
    for sms in (16, 24, 32, 48):
        for resource, own in ((Resource.MEMORY, sms), (Resource.COMPUTE, 132 - sms)):
            ours, theirs = (m.interference.slowdown(resource, own) for m in (formula_machine, recorded))
            assert ours == pytest.approx(theirs, rel=0.05), (resource, own)
    assert formula_machine.serial_ms(TYPICAL) == pytest.approx(recorded.serial_ms(TYPICAL), rel=0.05)


def test_the_formulas_find_the_pipeline_that_was_measured(formula_machine: Machine) -> None:
    load = TYPICAL._replace(tokens=1792, decodes=597)
    structure = next(first_structures(LLAMA_8B))
    solved = structure_search.solve(formula_machine, load, structure, 20, 0.5)
    assert solved is not None
    found = resource_assignment.assign(formula_machine, solved.period, load, 0.2)
    assert found.ms < 0.97 * formula_machine.serial_ms(load)


def test_a_profile_of_an_unknown_shape_is_named() -> None:
    profile = load_profile(formulas.DEFAULT)
    other = msgspec.structs.replace(profile, target=msgspec.structs.replace(profile.target, model="layers=1"))
    with pytest.raises(ConfigError, match="no preset has the shape of this profile: layers=1"):
        formulas.derive(other)
