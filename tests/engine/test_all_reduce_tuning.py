"""The number of steps of a sum is measured once, stored, and the same on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_sampling_shards import on_ranks

from weft.engine.ranks.all_reduce_tuning import fastest, file_of, read, tuned_steps
from weft.engine.runner.device.collectives import Collectives, Steps


def test_rank_0s_measurement_is_used_by_all_and_stored(tmp_path: Path) -> None:
    file = file_of(tmp_path, "NVIDIA H200", "0123456789abcdef", 2, "8192")
    requested: list[tuple[int, int, Steps]] = []

    def choose(c: Collectives) -> dict[int, int]:
        def microseconds(tokens: int, steps: Steps) -> float:
            requested.append((c.rank, tokens, steps))
            if c.rank:
                return 1.0  # each rank's clock gives another time
            if steps.pushed:
                return {1: 9.9, 2: 4.0 if tokens > 128 else 20.0}[steps.pushed]
            return {1: 10.0, 2: 20.0 if tokens <= 64 else 5.0}[steps.sums]

        return tuned_steps(c, file, 300, microseconds, pushes=True)

    few, many = Steps(1), Steps(2, 2)
    want = {1: few, 16: few, 32: few, 64: few, 128: Steps(2), 256: many}
    assert on_ranks(2, choose) == [want, want]
    assert len(requested) == 2 * 4 * 6, "every rank takes part in every measurement"
    assert read(file) == want
    requested.clear()
    assert on_ranks(2, choose) == [want, want]
    assert not requested


def test_at_the_power_limit_two_steps_need_not_be_clearly_quicker() -> None:
    as_measured = {Steps(1): 504.2, Steps(1, 1): 518.5, Steps(1, 2): 508.1}  # 2,048 tokens of a 70B
    assert fastest(as_measured) == Steps(1)
    assert fastest(as_measured, sustained=True) == Steps(1, 2)
    assert fastest(as_measured | {Steps(1, 2): 530.0}, sustained=True) == Steps(1)
    assert fastest({Steps(1): 10.0, Steps(2): 9.9}, sustained=True) == Steps(1), "where none sends, the simplest"


def test_without_a_measurement_only_known_values_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "sums.json"
    file.write_text('{"steps": {"16": [2, 1]}}')
    assert on_ranks(2, lambda c: tuned_steps(c, file, 64, None, pushes=True)) == [{16: Steps(2, 1)}] * 2
    assert on_ranks(2, lambda c: tuned_steps(c, file, 64, None)) == [{16: Steps(2)}] * 2, "none that may send"


@pytest.mark.parametrize(
    "content",
    ["", "[]", *('{"steps": ' + s + "}" for s in ('{"16": [3, 0]}', '{"x": [1, 0]}', '{"1": [1, 0, 0]}', "1"))],
)
def test_an_invalid_file_is_treated_as_empty(tmp_path: Path, content: str) -> None:
    (file := tmp_path / "sums.json").write_text(content)
    assert read(file) == {}
