"""In how many steps sums are made: measured once, kept, and the same on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_sampling_shards import on_ranks

from weft.engine.ranks.shots import agreed_shots, file_of, read
from weft.engine.runner.collectives import Collectives


def test_what_rank_0_measured_is_used_by_all_and_kept(tmp_path: Path) -> None:
    file = file_of(tmp_path, "NVIDIA H200", "0123456789abcdef", 2, 8192)
    asked: list[tuple[int, int, int]] = []

    def choose(c: Collectives) -> dict[int, int]:
        def microseconds(tokens: int, shots: int) -> float:
            asked.append((c.rank, tokens, shots))
            # each rank's clock says something else
            return {1: 10.0, 2: 20.0 if tokens <= 64 else 5.0}[shots] if c.rank == 0 else 1.0

        return agreed_shots(c, file, 300, microseconds)

    want = {16: 1, 32: 1, 64: 1, 128: 2, 256: 2}
    assert on_ranks(2, choose) == [want, want]
    assert len(asked) == 2 * 2 * 5, "every rank takes part in every measurement"
    assert read(file) == want
    asked.clear()
    assert on_ranks(2, choose) == [want, want]
    assert not asked


def test_without_a_measurement_only_what_is_known_is_told(tmp_path: Path) -> None:
    file = tmp_path / "sums.json"
    file.write_text('{"shots": {"16": 2}}')
    assert on_ranks(2, lambda c: agreed_shots(c, file, 64, None)) == [{16: 2}] * 2


@pytest.mark.parametrize("content", ["", "[]", '{"shots": {"16": 3}}', '{"shots": {"x": 1}}', '{"shots": 1}'])
def test_a_file_that_is_none_holds_nothing(tmp_path: Path, content: str) -> None:
    (file := tmp_path / "sums.json").write_text(content)
    assert read(file) == {}
