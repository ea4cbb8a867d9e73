"""Lengths, prompts, traces and their clipping."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from weft.loadgen import lengths
from weft.loadgen.errors import LoadError
from weft.loadgen.lengths import Lengths
from weft.loadgen.prompts import Calibration, PromptMaker, read_prompts
from weft.loadgen.traces import read_trace
from weft.loadgen.workload import ArrivalOptions, ContentOptions, build, clip


def maker(kind: str = "ids", **fields: object) -> PromptMaker:
    return PromptMaker(kind, 7, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("preset", "table"),
    [
        ("splitwise", (1155, 1109, 211, 163)), ("lmsys", (102, 169, 222, 210)), ("sharegpt", (246, 547, 322, 244)),
        ("arxiv", (10041, 5551, 471, 711)),
    ],
)  # fmt: skip
def test_presets_have_the_means_and_deviations_of_the_papers(preset: str, table: tuple[float, ...]) -> None:
    rng = np.random.default_rng(0)
    for distribution, mean, sd in zip(lengths.PRESETS[preset], table[::2], table[1::2], strict=True):
        n = 400_000
        drawn = distribution.draw(rng, n)
        assert drawn.mean() == pytest.approx(mean, abs=5 * sd / np.sqrt(n) + 0.5)
        # The deviation of a log-normal converges slowly: its fourth moment is large.
        assert drawn.std() == pytest.approx(sd, rel=0.06)
        assert drawn.min() >= 1


def test_uniform_lengths_reach_both_bounds_and_constant_ones_do_not_vary() -> None:
    rng = np.random.default_rng(0)
    drawn = lengths.parse("uniform:3:6", "--input").draw(rng, 1000)
    assert set(drawn) == {3, 4, 5, 6}
    assert set(lengths.parse("12", "--input").draw(rng, 10)) == {12}


@pytest.mark.parametrize("text", ["0", "uniform:9:3", "uniform:3", "lognormal:10", "normal:1:2", "x", "lognormal:0:1"])
def test_an_invalid_length_is_named(text: str) -> None:
    with pytest.raises(LoadError, match="--input"):
        lengths.parse(text, "--input")


def test_pairs_come_from_json_and_from_csv(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[[3, 4], [5, 6]]")
    (tmp_path / "a.csv").write_text("input,output\n3,4\n5,6\n")
    (tmp_path / "c.csv").write_text("num_prefill_tokens,num_decode_tokens,ratio\n3.0,4.0,0.75\n5.0,6.0,0.83\n")
    for name in ("a.json", "a.csv", "c.csv"):
        assert lengths.read_pairs(tmp_path / name).tolist() == [[3, 4], [5, 6]]
    for wrong in ("[[3, 1.5]]", '[[3, "x"]]', "[[3, NaN]]", "[[3, 1e400]]"):
        (tmp_path / "b.json").write_text(wrong)
        with pytest.raises(LoadError, match="must be a JSON list"):
            lengths.read_pairs(tmp_path / "b.json")
    (tmp_path / "b.json").write_text("[[3, 0]]")
    with pytest.raises(LoadError, match="at least 1"):
        lengths.read_pairs(tmp_path / "b.json")
    with pytest.raises(LoadError, match="cannot read"):
        lengths.read_pairs(tmp_path / "none")


def test_requests_that_do_not_fit_lose_prompt_tokens_first_and_are_counted() -> None:
    inputs, outputs, clipping = clip(np.array([10, 90, 500, 10]), np.array([10, 20, 30, 300]), 100)
    assert inputs.tolist() == [10, 80, 70, 1]
    assert outputs.tolist() == [10, 20, 30, 99]
    assert (clipping.requests, clipping.of) == (3, 4)
    assert clipping.tokens == 10 + 430 + 9 + 201
    assert clipping.of_tokens == 970


def test_prompts_depend_only_on_seed_and_index() -> None:
    one, same, other = maker(), maker(), PromptMaker("ids", 8)
    assert one.prompt(3, 50) == same.prompt(3, 50)
    assert one.prompt(3, 50) != one.prompt(4, 50)
    assert one.prompt(3, 50) != other.prompt(3, 50)
    assert all(300 <= token < 2000 for token in one.prompt(3, 500))


def test_the_shared_fraction_of_prompts_is_shared_at_any_length() -> None:
    sharing = maker(shared=0.5)
    a, b = sharing.prompt(1, 100), sharing.prompt(2, 60)
    assert a[:30] == b[:30]
    assert a[50:80] != b[30:60]
    groups = maker(shared=1.0, groups=4)
    assert 2 <= len({tuple(groups.prompt(i, 20)) for i in range(64)}) <= 4


def test_calibrated_words_have_the_requested_number_of_tokens() -> None:
    calibrated = replace(maker("words"), calibration=Calibration(per_word=1.5, overhead=10))
    prompt = calibrated.prompt(0, 160)
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 100


def test_equal_hash_ids_become_equal_blocks_and_lengths_are_exact() -> None:
    make = maker()
    a = make.from_blocks(0, (5, 6, 7), 512, 1300)
    b = make.from_blocks(1, (5, 6, 9), 512, 1536)
    assert (len(a), len(b)) == (1300, 1536)
    assert a[:1024] == b[:1024]
    assert a[1024:1300] != b[1024:1300]
    assert len(make.from_blocks(2, (5,), 512, 700)) == 700  # more tokens than blocks: filled up
    assert make.from_blocks(3, (5, 6), 512, 200) == a[:200]  # cut to a context: still a shared beginning


def test_azure_csv_is_read_with_its_seven_decimals(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,0\n"
    )
    trace = read_trace(path)
    assert trace.times[1] - trace.times[0] == pytest.approx(4.314579, abs=1e-6)
    assert [(row.input_tokens, row.output_tokens) for row in trace.rows] == [(374, 44), (396, 1)]


def test_mooncake_and_own_json_lines_are_read(tmp_path: Path) -> None:
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text('{"timestamp": 2500, "input_length": 1030, "output_length": 5, "hash_ids": [1, 2, 3]}\n')
    row = read_trace(mooncake).rows[0]
    assert (row.at, row.hash_ids) == (2.5, (1, 2, 3))
    own = tmp_path / "own.jsonl"
    lines = [
        {"at": 2, "output_tokens": 4, "prompt": "hello"},
        {"at": 1, "input_tokens": 30, "output_tokens": 4, "hash_ids": [1], "block_tokens": 16},
    ]
    own.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(own)
    assert [row.at for row in trace.rows] == [1, 2]
    assert trace.block == 16
    assert trace.rows[1].content == "hello"


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', '{"at": "x", "input_tokens": 1, "output_tokens": 1}\n',
             "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n"],
)  # fmt: skip
def test_an_invalid_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(LoadError, match="--trace"):
        read_trace(path)


def test_prompts_come_from_text_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "a.txt") == [("one", None), ("two", None)]
    messages = [{"role": "user", "content": "hi"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages, "max_tokens": 5}) + '\n{"text": "x"}\n')
    assert read_prompts(tmp_path / "a.jsonl") == [(messages, 5), ("x", None)]
    (tmp_path / "b.jsonl").write_text('{"nothing": 1}\n')
    with pytest.raises(LoadError, match="line 1"):
        read_prompts(tmp_path / "b.jsonl")


def test_processes_share_a_workload_without_overlap_or_gap() -> None:
    workload = build(ArrivalOptions(rate=10.0, duration=20.0), ContentOptions(), maker(), None)
    shares = [list(workload.share(part, 3)) for part in range(3)]
    assert sorted(i for share in shares for i in share) == list(range(len(workload)))


def test_a_workload_is_the_same_for_the_same_seed_and_keeps_its_requests_when_the_rate_changes() -> None:
    content = ContentOptions(input=Lengths("lognormal", 100, 50))
    a, b, faster = (build(ArrivalOptions(rate=r, count=50), content, maker(), None) for r in (2.0, 2.0, 4.0))
    assert np.array_equal(a.times, b.times)
    assert np.array_equal(a.inputs, b.inputs)
    assert np.array_equal(a.inputs, faster.inputs)
    assert a.content(a.planned(9)) == faster.content(faster.planned(9))


def test_the_offered_rate_is_that_of_the_schedule() -> None:
    def rate(**arrival: object) -> float | None:
        return build(ArrivalOptions(**arrival), ContentOptions(), maker(), None).offered_rate()  # type: ignore[arg-type]

    assert rate(process="constant", rate=20.0, count=12) == pytest.approx(20.0)
    assert rate(process="constant", rate=20.0, duration=2.0) == pytest.approx(20.0)
    assert rate(process="constant", rate=20.0, duration=60.0, count=12) == pytest.approx(20.0)
    assert rate(rate=20.0, count=40_000) == pytest.approx(20.0, rel=0.02)
    assert rate(process="constant", rate=20.0, count=1) is None
    assert rate(process="closed", users=2) is None


def test_a_mooncake_trace_becomes_prompts_with_shared_beginnings(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]},
        {"timestamp": 9, "input_length": 900, "output_length": 2, "hash_ids": [0, 2]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    content = ContentOptions(trace=read_trace(path))
    workload = build(ArrivalOptions(rate=None), content, maker(), None)
    first, second = (workload.content(workload.planned(i)) for i in range(2))
    assert (len(first), len(second)) == (600, 900)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]


def test_no_request_within_the_time_is_an_error() -> None:
    with pytest.raises(LoadError, match="no request arrives"):
        build(ArrivalOptions(rate=0.001, duration=0.001), ContentOptions(), maker(), None)
