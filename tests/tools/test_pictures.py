"""The pictures and tables of docs/papers.md are what `make benchmarks` writes, and agree with the papers' claims."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from weft.autosearch import plan_model
from weft.autosearch.machine import Machine
from weft.tools.pictures import papers
from weft.tools.pictures.drawing import Axis


@pytest.fixture(scope="module")
def machine() -> Machine:
    return papers.profiled()


def cells(picture: str) -> list[float]:
    return [float(value) for value in re.findall(r'class="cell"[^>]*>([^<]*)', picture)]


def test_the_files_are_those_that_the_command_writes() -> None:
    for path, text in papers.files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: run `make benchmarks`"
        if path.suffix == ".svg":
            assert ElementTree.fromstring(text).tag.endswith("svg")


def test_the_heat_maps_say_what_the_paper_says(capsys: pytest.CaptureFixture[str]) -> None:
    """NanoFlow §3.3: all workloads are compute-bound, except 512:1024 with the 8B model, where T_R is about 1."""
    memory = cells(papers.figure_3())
    workloads = len(memory) // len(papers.MODELS)
    assert memory[workloads - 1] == max(memory) == pytest.approx(1, abs=0.1)
    assert sum(value > 0.75 for value in memory) == 1
    plan_model.main(["--model-preset", "llama-3-8b", "--gpu", "a100", "--workload", "512:1024"])
    assert f"T_R {memory[workloads - 1]:.2f}" in capsys.readouterr().out
    large = cells(papers.figure_2())[-13:]
    assert large[1:3] == [pytest.approx(31.33 / 114.17, abs=0.02)] * 2  # Table 2: network and compute time on A100s


def test_estimates_are_below_measurements(machine: Machine) -> None:
    rows = [line.split("|")[1:-1] for line in papers.table_2(machine).splitlines()[2:]]
    assert len(rows) == 7
    for row in rows:
        assert float(row[5]) < float(row[6])
    assert float(rows[-1][6]) == pytest.approx(sum(float(row[6]) for row in rows[:-1]), abs=0.05)


def test_more_sms_keep_more_speed(machine: Machine) -> None:
    rows = [line.split(" | ") for line in papers.table_3(machine).splitlines()[2:]]
    assert len(rows) == 16
    decode = [(float(share), float(kept)) for name, share, kept, _ in rows if "decode" in name]
    assert decode == sorted(decode)
    assert all(share < kept for share, kept in decode)  # memory is saturated before all SMs are used


def test_no_operation_exceeds_the_roofline(machine: Machine) -> None:
    for name in ("qkv", "gate_up", "decode"):
        for tokens in papers.GRID:
            found = papers.measured(machine, tokens, name)
            assert found.tflops < min(989, 4.8 * found.intensity)
    few, many = (papers.measured(machine, tokens, "decode").intensity for tokens in (128, 2048))
    assert few == pytest.approx(many, rel=0.01)


def test_a_table_without_a_place_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"papers\.md has no place for table_9"):
        papers.with_tables("text", {"table_9": "| a |"})


def test_an_axis_maps_its_range_to_0_and_1() -> None:
    axis = Axis("x", 1, 100, (), logarithmic=True)
    assert [axis.share(v) for v in (1, 10, 100)] == pytest.approx([0, 0.5, 1])
    assert Axis("x", 0, 4, ()).share(1) == 0.25
