"""Collectives of GPUs and the layers between them: processes interpret the kernels over shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():  # which has no memory that a process can simply map
    pytest.skip("GPUs are tried by test_ranks.py", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine_of_rank import served
from interpreted import interpreted_gpu, streams_in_order
from interpreted_rank import ARENA, PIPELINES, SUMS, logits, models, partial_sums, product, product_sizes

from weft.kernels.collectives.peer import shard_width

Found = list[dict[str, list[Tensor]]]
HERE = Path(__file__).parent
BY_DAY = ("sandwich",)


def pushed_sum(inputs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None, x: Tensor | None) -> Tensor:
    """Sum every rank's `a [T, K] @ weight [H, K].T`, rounded to its dtype, in rank order in float32, plus x `[T, H]`.

    The result is rounded once. bias `[H]` is added to rank 0's GEMM.
    """
    total = torch.zeros(len(inputs[0]), len(weights[0]), device=weights[0].device)
    for rank, (a, weight) in enumerate(zip(inputs, weights, strict=True)):
        part = a.float() @ weight.float().T
        total += (part + bias.float() if bias is not None and rank == 0 else part).to(a.dtype).float()
    return (total if x is None else total + x.float()).to(inputs[0].dtype)


def ranks_of(count: int, folder: Path, *names: str, script: str = "interpreted_rank.py") -> Found:
    """The results of `count` ranks, for these models too."""
    memory = folder / "memory"
    with open(memory, "wb") as file:
        file.truncate(10 * count * ARENA)
    paths = os.pathsep.join(sys.path)
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / script, str(rank), str(count), memory, folder / f"{rank}", *names],
            env={**os.environ, "PYTHONPATH": paths},
        )
        for rank in range(count)
    ]
    try:
        assert [process.wait(540) for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}") for rank in range(count)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return ranks_of(2, tmp_path_factory.mktemp("two"), *BY_DAY)


def check_sums(found: Found) -> None:
    ranks = len(found)
    tokens, hidden = SUMS
    width = shard_width(hidden, ranks)
    for shots in (1, 2):
        every = [of_rank[f"sums in {shots}"] for of_rank in found]
        for launch in range(3):
            x = partial_sums(0)[1]
            for _ in range(2):
                total = torch.zeros(SUMS)
                for rank in range(ranks):
                    total += (partial_sums(rank)[0] * (launch + 1)).float()
                x[: tokens - 2] = (total + x.float()).half()[: tokens - 2]
            squares = torch.stack([x[:, p * width : (p + 1) * width].float().square().sum(1) for p in range(ranks)])
            for of_rank in every:
                got, sumsq = of_rank[2 * launch : 2 * launch + 2]
                assert torch.equal(got, x)
                assert torch.equal(sumsq, every[0][2 * launch + 1])
                torch.testing.assert_close(sumsq[:, : tokens - 2], squares[:, : tokens - 2])
        for of_rank in every:
            for gathered in of_rank[6:9]:
                assert torch.equal(gathered, torch.stack([partial_sums(r)[0].double() for r in range(ranks)]))
            assert of_rank[9].tolist() == [[100 * r + i for i in range(6)] for r in range(ranks)]
    for once, twice in zip(*(found[0][f"sums in {shots}"] for shots in (1, 2)), strict=True):
        assert torch.equal(once, twice), "in how many steps a sum is made must change no bit"


def test_sums_are_in_rank_order_and_the_same_bits_on_all_ranks_in_one_step_and_in_two(two: Found) -> None:
    check_sums(two)


def check_products(found: Found, *ways: int) -> None:
    ranks = len(found)
    tokens = product_sizes(ranks)[0]
    want = []
    for launch in range(4):
        *_, bias, stream = product(0, launch, ranks)
        given = [product(rank, launch, ranks)[:2] for rank in range(ranks)]
        x = stream if launch % 2 == 0 else want[-1]
        total = pushed_sum([a for a, _ in given], [w for _, w in given], bias, x if launch < 2 else None)
        want.append(torch.cat([total[: tokens - 1], x[tokens - 1 :]]))
    for pushed in (0, *ways):
        for of_rank in found:
            every = of_rank[f"products {pushed}"]
            for got, sumsq, x in zip(every[::2], every[1::2], want, strict=True):
                torch.testing.assert_close(got, x, rtol=2e-3, atol=2e-3)  # references add in another order
                parts = x[: tokens - 1].float().square().view(tokens - 1, -1)
                torch.testing.assert_close(sumsq[:, : tokens - 1].sum(0), parts.sum(1), rtol=1e-2, atol=1e-2)
            for once, other in zip(found[0]["products 0"], every, strict=True):
                assert torch.equal(once, other), "who writes where must change no bit"


def test_gemms_that_write_to_the_ranks_give_the_bits_of_a_separate_sum(two: Found) -> None:
    check_products(two, 1, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [3, 8])
def test_sums_of_more_ranks(tmp_path: Path, ranks: int) -> None:
    """Covers columns that ranks do not divide, and the most ranks."""
    found = ranks_of(ranks, tmp_path)
    check_sums(found)
    check_products(found, 1, 2)


@pytest.mark.parametrize("name", BY_DAY)
def test_ranks_give_the_logits_of_one(two: Found, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_logits(two, name, monkeypatch)


@pytest.mark.nightly
def test_a_pipeline_with_sums_on_the_network_lane_gives_the_serial_plans_logits_to_the_bit(tmp_path: Path) -> None:
    for of_rank in ranks_of(2, tmp_path, PIPELINES):
        serial, *pipelines = of_rank[PIPELINES]
        assert serial.isfinite().all()
        assert serial.std() > 0.01
        assert len(pipelines) == 3
        for pipeline in pipelines:
            assert torch.equal(pipeline, serial)


@pytest.mark.nightly
def test_ranks_give_the_logits_of_one_with_other_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = sorted(set(models()) - set(BY_DAY))
    found = ranks_of(2, tmp_path, *others)
    for name in others:
        check_logits(found, name, monkeypatch)


@pytest.mark.nightly
def test_engines_on_ranks_give_the_tokens_of_one(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers the whole runner: greedy and sampled tokens of one batch, penalties, log-probabilities, and the
    measurements of a start."""
    model = str(tiny_model("yi"))
    found: Any = ranks_of(2, tmp_path, model, script="engine_of_rank.py")
    with interpreted_gpu(monkeypatch):
        tokens, logprobs = served(model)
    assert found[0] == found[1]
    assert found[0][0] == tokens
    for handle, values in logprobs.items():
        np.testing.assert_allclose(found[0][1][handle], values, atol=2e-2)


@pytest.mark.nightly
def test_the_searchs_bench_measures_in_step_on_ranks(tmp_path: Path) -> None:
    """Measures GEMMs and sums alone, in pairs, and a pipeline: a rank that launched one sum more would wait forever."""
    found: Any = ranks_of(2, tmp_path, script="bench_of_rank.py")
    assert len(found[0]) == 7
    assert found[0] == found[1]


def check_logits(two: Found, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with streams_in_order(monkeypatch):
        want = logits(name, None, 0, 1)
    for step in (0, 2):
        got = torch.cat([of_rank[name][step] for of_rank in two], 1)
        assert want[step].std() > 0.01
        assert float((got - want[step]).norm() / want[step].norm()) < 2e-2
        for of_rank in two:  # the best of all ranks' logits, and the same everywhere
            assert torch.equal(of_rank[name][step + 1], got.argmax(1))
