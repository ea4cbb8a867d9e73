"""Break-evens of one launch for a hybrid batch: the table made from timings, its answers, and its file."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kernels.attention import break_evens
from weft.kernels.attention.break_evens import (
    FAR,
    VARIANTS,
    BreakEven,
    BreakEvens,
    TableKey,
    file_of,
    keep,
    learn,
    read,
    write,
)

H200 = TableKey("NVIDIA H200", 132, 32, 8, 128, 64, "3.6.0", "abc")
SIZES = [(c, k, d) for c in (128, 256, 512, 1024, 2048) for k in (4096, 8192, 16384) for d in (8, 32, 128)]
PLAN = {"parts": 1, "rule": 132, "all": 132, "few": 40, "half": 66, "share": 50, "tiles": 0, "together": -1}


def row(size: tuple[int, int, int], us: Mapping[str, float], model: str = "llama-3-8b") -> dict[str, Any]:
    chunk, context, decodes = size
    return {
        "part": "sweep", "model": model, "chunk": chunk, "context": context, "decodes": decodes, "length": context,
        "regime": "burst", "plan": PLAN, "us": dict(us),
    }  # fmt: skip


EQUAL = {"whole": 100.0, "cut": 100.0, **{f"pod {variant}": 100.0 for variant in VARIANTS if variant != "whole"}}


def measured(card: Callable[[tuple[int, int, int]], Mapping[str, float]]) -> list[dict[str, Any]]:
    return [row(size, {**EQUAL, **card(size)}) for size in SIZES]


@pytest.mark.parametrize(
    ("us", "variant", "programs"),
    [
        ({}, "all", 132),
        ({"pod few": 90.0}, "few", 40),
        ({"pod few": 90.0, "pod share": 85.0}, "share", 50),
        ({"pod half": 99.0}, "all", 132),  # gains less than the margin
        ({"whole": 90.0}, "whole", 132),
        ({"whole": 90.0, "pod half": 91.0}, "whole", 132),
        ({"whole": 90.0, "pod half": 80.0}, "half", 66),
        ({"cut": 90.0}, "all", 132),  # whole tiles are slower; one launch was not
        ({"pod few": 90.0, "pod share": math.nan}, "few", 40),
        ({"pod few": 90.0, "pod tiles": 80.0}, "tiles", 0),
        ({"pod few": 90.0, "pod together": 80.0}, "together", 132),
    ],
)
def test_a_row_leaves_lists_in_sequence_for_a_gain(us: dict[str, float], variant: str, programs: int) -> None:
    for found in learn(measured(lambda _: us), 132):
        assert (found.variant, found.programs) == (variant, programs)


def test_break_evens_match_those_of_the_card() -> None:
    table = BreakEvens(learn(measured(lambda at: {"pod few": 80.0 if at[0] >= 1024 else 130.0}), 132))

    def variant(*sizes: float) -> str:
        found = table.nearest(*sizes)
        assert found is not None
        return found.variant

    assert variant(1500, 9000, 40, 9000) == "few"
    assert variant(200, 9000, 40, 9000) == "all"
    several = table.of_batch(np.array([700, 600]), np.array([16000, 2000]), np.array([9000] * 20 + [10000] * 20))
    assert several is not None
    assert several.variant == "few"


def test_one_quick_timing_alone_changes_nothing() -> None:
    dense = [(1024, 8192 + 512 * i, 32) for i in range(8)]
    rows = [row(size, {**EQUAL, **({"pod few": 95.0} if i == 4 else {})}) for i, size in enumerate(dense)]
    assert {found.variant for found in learn(rows, 132)} == {"all"}


def test_rows_not_timed_in_all_variants_are_ignored() -> None:
    some = row(SIZES[0], {"whole": 1.0, "cut": 1.0, "pod rule": 1.0, "pod all": 1.0})
    assert learn([some, {**row(SIZES[0], EQUAL), "regime": "sustained"}, row((0, 0, 8), EQUAL)], 132) == []


def test_an_unmeasured_case_has_no_answer() -> None:
    table = BreakEvens([BreakEven(512, 8192, 32, 8192, "few", 40)])
    assert table.nearest(512, 8192, 32, 8192)
    assert table.nearest(512, 8192, 32 * 2 ** (FAR - 0.1), 8192)
    assert table.nearest(512, 8192, 32 * 2 ** (FAR + 0.1), 8192) is None
    assert table.nearest(0, 8192, 32, 8192) is None
    assert BreakEvens([]).nearest(512, 8192, 32, 8192) is None
    none = np.zeros(0, np.int32)
    assert table.of_batch(none, none, np.array([8192])) is None
    assert table.of_batch(np.array([512]), np.array([8192]), none) is None


sizes = st.tuples(st.integers(1, 16384), st.integers(0, 131072), st.integers(1, 512), st.integers(1, 131072))
rows_of = st.builds(
    lambda at, variant, programs: BreakEven(*map(float, at), variant, programs),
    sizes,
    st.sampled_from(VARIANTS),
    st.integers(0, 132),
)
EXAMPLES = settings(max_examples=60, deadline=None)


def away(a: BreakEven, at: tuple[int, ...]) -> float:
    pairs = ((a.chunk, at[0]), (a.chunk + a.context, at[0] + at[1]), (a.decodes, at[2]), (a.length, at[3]))
    return sum(abs(math.log2(x / y)) for x, y in pairs)


@EXAMPLES
@given(st.lists(rows_of, min_size=1, max_size=20), sizes)
def test_the_answer_is_the_nearest_row(rows: list[BreakEven], at: tuple[int, ...]) -> None:
    found = BreakEvens(rows).nearest(*at)
    least = min(away(row, at) for row in rows)
    if found is None:
        assert least > FAR - 1e-9
    else:
        assert away(found, at) <= min(least, FAR) + 1e-9


@EXAMPLES
@given(
    st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 131072)), max_size=5),
    st.lists(st.integers(1, 131072), max_size=20),
)
def test_any_iteration_has_an_answer_or_none(chunks: list[tuple[int, int]], lengths: list[int]) -> None:
    table = BreakEvens(learn(measured(lambda _: {"pod few": 80.0}), 132))
    tokens, contexts = (np.array([c[i] for c in chunks], np.int32) for i in (0, 1))
    found = table.of_batch(tokens, contexts, np.array(lengths, np.int32))
    assert found is None or (tokens.sum() and lengths and 0 <= found.programs <= 132)


def log_line_of(folder: Path, made: TableKey = H200) -> str:
    table, message = read(folder, made)
    assert table is None
    assert "\n" not in message
    assert "by rule" in message
    return message


ROWS = learn(measured(lambda at: {"pod few": 80.0 if at[0] >= 1024 else 130.0}), 132)


def test_a_file_round_trips(tmp_path: Path) -> None:
    file = write(tmp_path / "new" / "folder", H200, ROWS)
    table, message = read(file.parent, H200)
    assert table is not None
    assert list(table.rows) == ROWS
    assert f"by {len(ROWS)} measured batches" in message
    assert [file] == list(file.parent.iterdir())


def test_a_missing_stale_or_foreign_file_logs_a_line_and_uses_the_rule(tmp_path: Path) -> None:
    assert "no break-evens were measured here" in log_line_of(tmp_path)
    assert "no break-evens were measured here" in log_line_of(tmp_path / "none")
    file = write(tmp_path, H200, ROWS)
    newer, other = H200._replace(kernels="def"), H200._replace(kv_heads=4)
    assert "other kernels" in log_line_of(tmp_path, newer)
    assert "no break-evens were measured here" in log_line_of(tmp_path, other)
    file_of(tmp_path, other).write_bytes(file.read_bytes())  # under a name that is not its own
    assert "another GPU" in log_line_of(tmp_path, other)


BROKEN = [
    "", "{", "[]", "null", "7", "{}", "\x00\xff", "[" * 100_000,
    *(
        json.dumps({"made": H200._asdict(), "rows": rows})
        for rows in (
            [], {}, 7, None, [7], [[]], [[1, 2, 3]], [[512, 8192, 32, 8192, "fast", 40]], [[0, 1, 1, 1, "few", 40]],
            [[512, 8192, 32, 8192, "few", 133]], [[512, -1, 32, 8192, "few", 40]], [["a", 1, 1, 1, "few", 40]],
            [[512, math.nan, 32, 8192, "few", 40]], [[512, math.inf, 32, 8192, "few", 40]],
            [[512, 8192, 32, 8192, "few", math.inf]], [[10**400, 8192, 32, 8192, "few", 40]],
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_logs_a_line_and_uses_the_rule(tmp_path: Path, text: str) -> None:
    file_of(tmp_path, H200).write_text(text, encoding="latin-1")
    assert "is not used" in log_line_of(tmp_path)


def test_a_folder_in_place_of_the_file_logs_a_line_and_uses_the_rule(tmp_path: Path) -> None:
    file_of(tmp_path, H200).mkdir()
    assert "Is a directory" in log_line_of(tmp_path)


def test_a_reader_during_two_writes_sees_one_of_the_tables(tmp_path: Path) -> None:
    tables = [ROWS, ROWS[:7]]
    write(tmp_path, H200, ROWS)

    def write_repeatedly(rows: list[BreakEven]) -> None:
        for _ in range(30):
            write(tmp_path, H200, rows)

    writers = [threading.Thread(target=write_repeatedly, args=(rows,)) for rows in tables]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        table, message = read(tmp_path, H200)
        assert table is not None, message
        assert list(table.rows) in tables
    for writer in writers:
        writer.join()
    assert len(list(tmp_path.iterdir())) == 1


def test_tables_are_kept_by_model_and_failures_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    message: list[str] = []

    def made(model: str) -> TableKey:
        return H200._replace(kv_heads={"llama-3-8b": 8, "yi-6b": 4}[model])

    rows = [*measured(lambda _: {"pod few": 80.0}), row(SIZES[0], {"whole": 1.0}, "yi-6b")]
    assert not keep(rows, tmp_path, made, message.append)
    assert read(tmp_path, made("llama-3-8b"))[0] is not None
    assert any(line.startswith("yi-6b: no break-evens") for line in message)
    assert any(f"{len(SIZES)} few" in line for line in message)
    assert keep([*rows[:-1], *(row(size, EQUAL, "yi-6b") for size in SIZES)], tmp_path, made, message.append)
    assert len(list(tmp_path.iterdir())) == 2

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    message.clear()
    monkeypatch.setattr(break_evens.os, "replace", full)
    assert not keep(rows[:-1], tmp_path, made, message.append)
    assert "No space left" in message[0]
    assert len(list(tmp_path.iterdir())) == 2  # no temporary file is left


def test_a_shipped_table_is_used_if_none_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(break_evens, "SHIPPED", tmp_path / "shipped")
    here, rows = tmp_path / "here", learn(measured(lambda _: {}), 132)
    assert read(here, H200)[0] is None
    shipped = write(tmp_path / "shipped", H200, rows[:1])
    table, message = read(here, H200)
    assert table is not None
    assert len(table.rows) == 1
    assert str(shipped) in message
    assert read(here, H200._replace(kernels="other"))[0] is None
    write(here, H200, rows)
    table, _ = read(here, H200)
    assert table is not None
    assert len(table.rows) == len(rows)
