"""A profile of iterations: fitted, kept in a file, recorded from an engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from fleets import profile

from weft.deploy.fleet.profile import Features, SideBySide, load_profile
from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.tools.fleet import record
from weft.tools.fleet.fit import fit, knots_for, nonnegative

TRUE = (2e-3, 5e-5, 0.3, 0.02)
"""context, pairs, chunks, decodes: milliseconds"""


def rows(n: int, seed: int = 0) -> list[Features]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        decodes, chunks = int(rng.integers(0, 32)), int(rng.integers(0, 3))
        prompt = int(rng.integers(1, 400)) * chunks
        if decodes + prompt:
            made.append(Features(decodes + prompt, decodes, decodes * int(rng.integers(10, 900)), prompt * 200, chunks))
    return made


def dense(tokens: int) -> float:
    return 4.0 + 0.02 * tokens + (3.0 if tokens > 256 else 0.0)


def truth(f: Features) -> float:
    return dense(f.tokens) + float(np.dot(TRUE, (f.context, f.pairs, f.chunks, f.decodes)))


def test_a_fit_recovers_the_terms_and_reports_its_error() -> None:
    seen = rows(600)
    rng = np.random.default_rng(1)
    ms = np.array([truth(f) for f in seen]) * rng.normal(1.0, 0.02, len(seen))
    ms[::50] *= 6  # another process was in the way
    found = fit(seen, ms / 1e3, knots_for(seen))
    made = profile(
        knots=knots_for(seen), dense_ms=found.dense_ms, context_ms=found.rest[0], pair_ms=found.rest[1],
        chunk_ms=found.rest[2], decode_ms=found.rest[3],
    )  # fmt: skip
    fresh = rows(300, seed=9)
    off = [abs(1e3 * made.seconds(f) / truth(f) - 1) for f in fresh]
    assert np.median(off) < 0.03
    assert np.quantile(off, 0.9) < 0.1
    assert 0.005 < found.error.median < 0.05
    assert found.error.iterations == len(seen)


def test_no_term_is_negative() -> None:
    a = np.array([[1.0, 2.0], [1.0, 3.0], [1.0, 4.0]])
    assert nonnegative(a, np.array([5.0, 4.0, 3.0])).min() >= 0
    assert nonnegative(a, a @ [2.0, 0.5]) == pytest.approx([2.0, 0.5], rel=1e-4)


def test_beyond_the_recorded_range_time_is_extrapolated_in_proportion() -> None:
    made = profile(knots=(1.0, 100.0), dense_ms=(5.0, 10.0))
    assert [made.seconds(Features(n, 0, 0, 0, 0)) for n in (1, 100, 200)] == pytest.approx([0.005, 0.01, 0.02])


def test_a_profile_round_trips(tmp_path: Path) -> None:
    profile().save(tmp_path / "p.json")
    assert load_profile(str(tmp_path / "p.json")) == profile()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "is not a profile of iterations"),
        ("{", "is not JSON"),
        ('{"format": "weft-profile"}', "is not a profile of iterations"),
        ('{"format": "weft-iterations", "version": 99}', "is a profile of iterations of version 99"),
        ('{"format": "weft-iterations", "version": 1, "model": 3}', "is not a valid profile"),
    ],
)
def test_a_file_that_is_not_a_profile_is_a_one_line_error(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        load_profile(str(tmp_path / "p.json"))
    assert "\n" not in str(caught.value)


def test_a_spread_for_another_number_of_engines_is_a_one_line_error(tmp_path: Path) -> None:
    for spread in (((1.0,),), ((1.0,), ())):
        profile(side_by_side=SideBySide(2, (1.0, 1.5), (1.0, 2.0), (), spread)).save(tmp_path / "p.json")
        with pytest.raises(ConfigError, match=r"side_by_side\.prompts and its spread"):
            load_profile(str(tmp_path / "p.json"))


def test_a_missing_profile_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"shipped profiles: .*llama-3-8b-h200"):
        load_profile("none")


@pytest.mark.slow
def test_an_engine_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model="demo", device="cpu", cpu_threads=1, max_num_seqs=4, num_pages=100,
                          max_num_batched_tokens=64, max_model_len=256)  # fmt: skip
    arguments = argparse.Namespace(out=tmp_path / "p.json", seconds=3.0, processor_time=True, server=None)
    assert record.run(config, arguments) == 0
    made = load_profile(str(tmp_path / "p.json"))
    assert (made.threads, made.limits.max_num_seqs, made.limits.num_pages) == (1, 4, 100)
    assert made.error is not None
    assert made.error.iterations > 50
    assert f"{made.error.iterations} iterations" in capsys.readouterr().out
    few, many = (made.seconds(Features(n, 0, 0, n * n // 2, 1)) for n in (2, 64))
    assert 0 < few < many
