"""Staging delivers the content of the files, in the requested order, for any sizes, and leaves nothing behind."""

from __future__ import annotations

import threading

import pytest
import torch

from weft.engine.model.staging import AHEAD_BYTES, Staging

CPU = torch.device("cpu")


def _tensors() -> list[torch.Tensor]:
    """Tensors of several dtypes and sizes around a buffer of 256 bytes, including parts of larger ones."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return [
        draw(3),
        draw(7, 40),  # a row is less than a buffer
        draw(5, 100),  # a row is more
        draw(1000).bfloat16(),
        draw(4, 6, 90).half(),
        draw(8, 64)[:, 16:32],  # columns of a matrix, as a rank reads them
        draw(64, 64).bfloat16()[16:48],
        draw(2, 3, 200)[:, :, 100:],
        torch.arange(700, dtype=torch.uint8).reshape(7, 100),
        torch.tensor(3.5),
        torch.zeros(0, 5),
        torch.arange(90),
    ]


def test_every_tensor_arrives_in_order_and_complete() -> None:
    wanted = _tensors()
    with Staging(wanted, CPU, buffer_bytes=256) as staging:
        for want in wanted:
            got = staging.take()
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
            assert got.is_contiguous()


def test_no_more_is_read_ahead_than_fits() -> None:
    half = torch.empty(1, dtype=torch.uint8).expand(AHEAD_BYTES // 2)
    staging = Staging([half] * 6, torch.device("meta"))
    staging._begin()
    assert len(staging._coming) == 2
    huge = Staging([torch.empty(1, dtype=torch.uint8).expand(2 * AHEAD_BYTES), half], torch.device("meta"))
    huge._begin()
    assert len(huge._coming) == 1, "one that is larger than the room comes alone"
    for each in (staging, huge):
        each._pool.shutdown(cancel_futures=True)


def test_an_error_while_reading_is_raised_and_the_threads_end() -> None:
    before = threading.active_count()
    wanted = [torch.zeros(4), torch.empty(4, device="meta"), torch.zeros(4)]  # the second has no memory to read
    with Staging(wanted, CPU) as staging:
        assert torch.equal(staging.take(), wanted[0])
        with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
            staging.take()
    assert threading.active_count() <= before  # some of the threads of earlier tests may have ended meanwhile
