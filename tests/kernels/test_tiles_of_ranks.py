"""The tiles that rules choose for the shards of a 70B on eight ranks are legal, for every GEMM and number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

from weft.engine.config import PRESETS
from weft.engine.model.directory import read_spec
from weft.engine.model.operations import Role
from weft.kernels.collectives.peer import shard_width
from weft.kernels.collectives.push_gemm import width_of
from weft.kernels.common.gpu import KNOWN, compiling_for
from weft.kernels.matmul import fp8_projections, mid_rule, mid_table
from weft.kernels.matmul.fp8_few_config import distribute, is_few
from weft.kernels.matmul.gemm_launch import Launch, check_workspace, choose, launch_of, workspace
from weft.kernels.matmul.tuned import BUCKETS
from weft.tools.kernels.kernel_map import Case, kernels_of

RANKS, SMS = 8, KNOWN["h200"].sms
SHARED_BYTES = 232448  # of a program
TOKENS = sorted({*BUCKETS, *(b - 1 for b in BUCKETS), 1, 48, 96, 192, 384, 640, 768, 1536, 3072})


class Gemm(NamedTuple):
    kind: str
    features: int
    depth: int


def gemms(preset: str) -> Iterator[Gemm]:
    """The GEMMs of a rank's layer."""
    spec = read_spec(PRESETS / preset).shard(RANKS - 1, RANKS)
    kinds = {"qkv": "qkv", "gate_up": "gate_up", "o": "residual", "down": "residual"}
    for op in spec.layer_operations():
        if op.role is Role.PROJECTION:
            yield Gemm(kinds[op.name], op.out, op.inner)


@pytest.fixture(autouse=True)
def h200() -> Iterator[None]:
    with compiling_for(KNOWN["h200"]):
        yield


def check_splits(launch: Launch, depth: int) -> None:
    """No split is empty, and every program has work."""
    steps = -(-depth // launch.config.depth)
    assert -(-steps // launch.split) * (launch.split - 1) < steps
    assert launch.grid[0] >= 1


@pytest.mark.parametrize("preset", ["llama-2-70b", "llama-3-70b"])
def test_tiles_in_16_bits(preset: str) -> None:
    space = workspace("meta", elements=1 << 26)
    for gemm in gemms(preset):
        for tokens in TOKENS:
            launch = launch_of(tokens, gemm.features, gemm.depth, choose(tokens, *gemm[1:], SMS), SMS)
            check_splits(launch, gemm.depth)
            check_workspace(space, launch, tokens, gemm.features)
            config = launch.config
            assert 2 * config.staged <= SHARED_BYTES, (gemm, tokens, config)
            mid = mid_table.lookup(tokens, *gemm[1:]) or mid_rule.by_rule(tokens, *gemm[1:], SMS)
            if mid is not None:
                assert mid.pieces[0]
                assert mid.stages_for(gemm.kind, whole=mid.split == 1) >= 2
                assert mid.splits_of(gemm.depth) <= -(-gemm.depth // 64)


@pytest.mark.parametrize("preset", ["llama-2-70b", "llama-3-70b"])
def test_a_tile_of_a_gemm_that_pushes_has_one_owner(preset: str) -> None:
    """Otherwise no GEMM could send in two steps."""
    for gemm in gemms(preset):
        if gemm.kind == "residual":
            width = width_of(gemm.features, RANKS, 2)
            assert width == shard_width(gemm.features, RANKS) == gemm.features // RANKS
            assert all(width % choose(tokens, *gemm[1:], SMS).features == 0 for tokens in TOKENS)


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["llama-2-70b", "llama-3-70b"])
def test_every_operation_of_a_rank_launches_kernels_for_all_numbers_of_tokens(preset: str) -> None:
    """Without a GPU: launches check their operands, tiles and scratch."""
    case = Case("eight ranks", preset, "h200", {"tensor_parallel_size": RANKS})
    for name, rows in kernels_of(case).items():
        assert rows, name
        assert rows[-1][0] == BUCKETS[-1], name


@pytest.mark.parametrize("preset", ["llama-2-70b", "llama-3-70b"])
def test_tiles_in_fp8(preset: str) -> None:
    for gemm in gemms(preset):
        assert gemm.depth % 128 == 0, "a rank's columns are whole blocks of scales"
        for tokens in TOKENS:
            launch = fp8_projections.launch_of(gemm.kind, tokens, gemm.features, gemm.depth, None, SMS)
            config = launch.config
            if is_few(config):
                share, programs = distribute(gemm.features, gemm.depth, config.features, SMS)
                assert share <= 128
                assert programs <= 8
                continue
            check_splits(launch, gemm.depth)
            assert config.staged * config.per_sm <= SHARED_BYTES, (gemm, tokens, config)
            assert gemm.kind != "gate_up" or config.features == 256
