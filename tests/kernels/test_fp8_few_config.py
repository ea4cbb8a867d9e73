"""How GEMMs of few tokens are distributed over the SMs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.kernels.matmul.fp8_few_config import MAX_SPLITS, MIN_BUSY, STEP, distribute, few_config

SIZES = st.integers(1, 40_000)


@given(SIZES, SIZES, st.sampled_from((128, 256)), st.integers(1, 160))
def test_every_step_of_every_tile_is_in_one_program_and_no_tile_in_too_many(
    features: int, depth: int, wide: int, num_sms: int
) -> None:
    share, parts = distribute(features, depth, wide, num_sms)
    steps, tiles = -(-depth // STEP), -(-features // wide)
    assert share * num_sms >= steps * tiles
    programs = [{(tile * steps + step) // share for step in range(steps)} for tile in range(min(tiles, 20))]
    assert max(map(len, programs)) <= parts <= MAX_SPLITS


@given(SIZES, SIZES, st.integers(1, 160))
def test_stretches_that_end_with_tiles_idle_no_more_sms_than_memory_allows(
    features: int, depth: int, num_sms: int
) -> None:
    share, _ = distribute(features, depth, 128, num_sms)
    steps, tiles = -(-depth // STEP), -(-features // 128)
    even = -(-steps * tiles // num_sms)
    assert share <= max(even / MIN_BUSY, -(-steps // (MAX_SPLITS - 2)))


def test_an_8b_is_distributed_so_that_no_stretch_ends_within_two_tiles() -> None:
    shapes = {(6144, 4096, 128): (16, 2), (4096, 4096, 128): (8, 4), (28672, 4096, 256): (32, 1),
              (4096, 14336, 128): (28, 4)}  # fmt: skip
    assert {shape: distribute(*shape, 132) for shape in shapes} == shapes


def test_a_program_has_no_more_steps_than_scales_fit() -> None:
    assert few_config("residual", 8192, 28672, 132).special
    assert not few_config("residual", 8192, 28672, 64).special
