"""Conversion of a checkpoint's tensors on CPU threads."""

from __future__ import annotations

import threading
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from weft.engine.errors import ModelError
from weft.engine.model import conversion
from weft.engine.model.checkpoint import Stored
from weft.engine.model.conversion import Conversion, Wanted
from weft.engine.model.finite import FiniteCheck
from weft.engine.model.gguf.checkpoint import dequantized


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "PIECE", 100)


def _take(*wanted: Wanted, threads: int = 3) -> tuple[list[torch.Tensor], FiniteCheck]:
    finite = FiniteCheck()
    with Conversion(wanted, finite, threads) as converting:
        return [converting.take() for _ in wanted], finite


def _plain(values: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Wanted:
    return Wanted("plain", Stored(values), tuple(values.shape), dtype)


def _blocks(rows: int, columns: int, seed: int = 0) -> tuple[Wanted, torch.Tensor]:
    values = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    want = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType.Q8_0))
    stored = Stored(torch.from_numpy(raw), dequantized("Q8_0"), by_rows=True)
    return Wanted("blocks", stored, (rows, columns), torch.bfloat16), want.bfloat16()


def test_tensors_come_in_order_as_copies_of_their_dtype() -> None:
    cubes = torch.randn(4, 7, 33)
    rows, vector, scalar = torch.randn(50, 64)[::2, :40], torch.randn(300), torch.tensor(3.0)
    blocks, want = _blocks(40, 64)
    got, _ = _take(_plain(cubes), _plain(rows), blocks, _plain(vector), _plain(scalar), _plain(rows, torch.float32))
    for a, b in zip(got, (cubes, rows, want, vector, scalar), strict=False):
        assert torch.equal(a, b.bfloat16())
        assert a.is_contiguous()
    assert torch.equal(got[5], rows)
    assert got[5].data_ptr() != rows.data_ptr()


def test_columns_of_blocks_are_cut_after_conversion() -> None:
    wanted, want = _blocks(40, 64)
    stored = Stored(wanted.stored.raw, dequantized("Q8_0", slice(5, 50)), by_rows=True)
    (got,), _ = _take(wanted._replace(stored=stored, shape=(40, 45)))
    assert torch.equal(got, want[:, 5:50])


def test_a_decoder_that_needs_the_whole_tensor_gets_it() -> None:
    raw = torch.arange(600.0).view(20, 30)
    seen = []

    def transposed(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        seen.append(given.shape)
        return given.t().to(dtype)

    (got,), _ = _take(Wanted("whole", Stored(raw, transposed), (30, 20), torch.float32))
    assert torch.equal(got, raw.t())
    assert seen == [raw.shape]


def test_values_that_are_not_finite_name_their_tensor_once() -> None:
    bad = torch.zeros(40, 30)
    bad[3, 4] = bad[35, 1] = float("inf")
    _, finite = _take(_plain(torch.zeros(9, 30)), Wanted("bad", Stored(bad), (40, 30), torch.bfloat16))
    with pytest.raises(ModelError, match=r"as bfloat16\): bad; the checkpoint"):
        finite.end(torch.bfloat16)


def test_an_error_of_a_thread_is_raised_and_ends_the_others() -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise ModelError("damaged")

    broken = Wanted("broken", Stored(torch.zeros(4, 4), fail, by_rows=True), (4, 4), torch.float32)
    with pytest.raises(ModelError, match="damaged"):
        _take(broken, *[_plain(torch.zeros(50, 50))] * 5)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weft-convert")]


def test_no_team_of_torch_threads_works_meanwhile() -> None:
    before, seen = torch.get_num_threads(), set()
    torch.set_num_threads(2)

    def note(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return raw.to(dtype)

    try:
        wanted = [Wanted("", Stored(torch.zeros(40, 30), note, by_rows=True), (40, 30), torch.float32)] * 3
        with Conversion(wanted, FiniteCheck()) as converting:
            assert torch.get_num_threads() == 1
            for _ in wanted:
                converting.take()
        assert seen == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_tensors_can_be_taken_in_inference_mode() -> None:
    """The threads that fill them are not in that mode."""
    with torch.inference_mode():
        (tensor,), _ = _take(_plain(torch.arange(300.0)))
    assert tensor.float().tolist() == torch.arange(300.0).bfloat16().float().tolist()
