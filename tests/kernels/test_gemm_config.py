"""`GemmConfig`: tiles that must hold a whole head."""

from __future__ import annotations

import pytest

from weft.kernels.matmul import tuned
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig


def test_wider_tiles_take_no_more_shared_memory() -> None:
    long = GemmConfig(16, 64, 256, 5, 4, split=2, swap=True)
    assert long.widened(128) == long._replace(features=128, depth=128)
    short = GemmConfig(64, 64, 64, 6, 4)
    assert short.widened(128) == short._replace(features=128, stages=4)
    assert GemmConfig(128, 64, 64, 2, 4).widened(128).stages == 2  # a pipeline needs two


def test_tiles_that_are_wide_enough_are_unchanged() -> None:
    assert SPECIAL.widened(256) == SPECIAL


@pytest.mark.parametrize("config", sorted({c for c in tuned.shipped((9, 0), 132).values() if c.features < 128}))
def test_every_shipped_tile_fits_when_it_is_widened_to_a_head(config: GemmConfig) -> None:
    assert config.widened(128).staged <= config.staged
