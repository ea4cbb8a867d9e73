"""How GEMMs of 33 to 2,048 tokens are cut: widths, splits of a depth, the shares that each adds, the table's
entries."""

from __future__ import annotations

import random
from collections.abc import Generator
from itertools import pairwise

import pytest
import split_meeting as mid_meeting

from weft.kernels.matmul import mid_config, mid_rule, mid_table
from weft.kernels.matmul.mid_config import TALL, MidConfig
from weft.tools.kernels.mid_configs import candidates, encoded

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (3072, 2048), (2048, 8192), (8192, 14336))


@pytest.mark.parametrize("width", range(64, 257, 32))
def test_a_width_is_a_sum_of_powers_of_two(width: int) -> None:
    pieces = MidConfig(width).pieces
    assert sum(pieces) == width
    assert sorted(pieces, reverse=True) == list(pieces)
    assert all(not p or p & (p - 1) == 0 for p in pieces)


@pytest.mark.parametrize(
    "config",
    [
        MidConfig(48),
        MidConfig(288),
        MidConfig(32),
        MidConfig(192, 2),
        MidConfig(0),
        MidConfig(256, rows=192),
        MidConfig(64, rows=64),
        MidConfig(64, box=32, rows=192),
    ],
)
def test_a_width_that_no_tile_has_is_refused(config: MidConfig) -> None:
    with pytest.raises(ValueError, match="cannot"):
        _ = config.pieces


def test_buckets_are_those_of_captured_graphs_and_no_fewer_tokens_are_live_than_the_next_one_has() -> None:
    from weft.engine.runner.iteration.pipelines import token_buckets

    graphs = token_buckets(2048)
    assert list(mid_table.BUCKETS) == [size for size in graphs if size >= 64]
    for bucket, live in mid_table.PARTLY_LIVE.items():
        assert graphs[graphs.index(bucket) - 1] < live < bucket


def test_the_rule_for_other_shapes_mostly_matches_measurements_of_these() -> None:
    ruled = {key: mid_rule.by_rule(*key, 132) for key in mid_table._shipped() if 64 < key[0] <= 512}
    same = [key for key, config in ruled.items() if config == mid_table._shipped()[key]._replace(ahead=0)]
    assert len(same) > 0.7 * len(ruled)
    assert {key for key, config in ruled.items() if config is None} <= {(128, 4096, 14336), (128, 2048, 8192)}


def test_for_more_tokens_the_rule_covers_only_gemms_measured_to_gain_from_a_narrower_tile() -> None:
    shapes, buckets = SHAPES[:4], [bucket for bucket in mid_table.BUCKETS if bucket > 512]
    ruled = {(b, *shape): mid_rule.by_rule(b, *shape, 132) for b in buckets for shape in shapes}
    spoken = {key: config for key, config in ruled.items() if config is not None}
    assert len(spoken) == 12
    assert [key for key in spoken if key not in mid_table._shipped()] == [(1536, 6144, 4096)]


@pytest.mark.parametrize("key", [(64, 28672, 4096), (513, 28672, 4096), (128, 1024, 4096), (128, 4096, 14336)])
def test_the_rule_has_no_answer_where_it_was_not_validated(key: tuple[int, int, int]) -> None:
    assert mid_rule.by_rule(*key, 132) is None


def test_a_shape_without_a_row_is_cut_by_the_rule() -> None:
    pytest.importorskip("triton")
    import torch

    from weft.kernels.common.gpu import KNOWN, compiling_for
    from weft.kernels.matmul.mid_projections import chosen

    weight = torch.empty(37888, 3584, dtype=torch.bfloat16, device="meta")  # gate and up of Qwen2.5-7B
    with compiling_for(KNOWN["h200"]):
        assert chosen(None, 256, weight, 132, None, plain=True) == mid_rule.by_rule(256, 37888, 3584, 132)
        assert chosen(None, 256, weight, 66, None, plain=True) is None


@pytest.mark.parametrize("box", [0, 16, 64, 256])
def test_boxes_of_tokens_that_the_kernel_does_not_support_are_refused(box: int) -> None:
    with pytest.raises(ValueError, match="load"):
        _ = MidConfig(128, box=box).pieces


def test_the_shipped_table_can_be_read_and_has_only_buckets() -> None:
    table = mid_table._shipped()
    assert {64, 128, 256, 384, 512} <= {tokens for tokens, _, _ in table} <= set(mid_table.BUCKETS)
    assert mid_table.lookup(200, 28672, 4096) == table[256, 28672, 4096]
    assert mid_table.lookup(150, 28672, 4096) == table[192, 28672, 4096]
    assert mid_table.lookup(32, 28672, 4096) is None


def test_a_model_that_was_not_measured_has_the_next_row_and_loads_only_live_tokens() -> None:
    assert (192, 3072, 2048) not in mid_table._shipped()
    assert mid_table.lookup(192, 3072, 2048) == mid_table._shipped()[256, 3072, 2048]._replace(box=32)
    assert mid_table.lookup(256, 3072, 2048) == mid_table._shipped()[256, 3072, 2048]


def test_the_rule_for_192_tokens_is_within_a_sixth_of_the_quickest_of_these() -> None:
    """Microseconds in bursts on an H200 (measured on 2026-11-23)."""
    measured = {
        (6144, 4096): {MidConfig(96, box=32): 24.6, MidConfig(64, rows=TALL): 25.4, MidConfig(96): 36.2},
        (4096, 4096): {MidConfig(64, box=32): 17.7, MidConfig(64, rows=TALL): 20.0, MidConfig(64): 29.3},
        (28672, 4096): {MidConfig(128, rows=TALL): 78.9, MidConfig(224, rows=TALL): 82.5, MidConfig(224): 94.5},
        (4096, 14336): {MidConfig(128, 4, rows=TALL): 45.5, MidConfig(64, box=32): 52.5, MidConfig(64): 91.8},
    }
    for shape, times in measured.items():
        config = mid_rule.by_rule(192, *shape, 132)
        assert config is not None
        assert times[config] < 7 / 6 * min(times.values())


@pytest.mark.parametrize("steps", [1, 3, 8, 64, 65, 224])
@pytest.mark.parametrize("split", range(1, mid_config.MAX_SPLIT + 1))
def test_the_splits_of_a_depth_cover_all_of_it_and_none_is_empty(steps: int, split: int) -> None:
    parts = MidConfig(128, split).splits_of(steps * mid_config.BLOCK_DEPTH)
    spans = [(part * steps // parts, (part + 1) * steps // parts) for part in range(parts)]  # as `mid_hopper` cuts
    assert spans[0][0] == 0
    assert spans[-1][1] == steps
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert all(first < last for first, last in spans)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", mid_table.BUCKETS)
@pytest.mark.parametrize("kind", ["qkv", "residual", "gate_up", "plain"])
def test_candidates_fit_an_sm_with_steps_to_spare(kind: str, shape: tuple[int, int], tokens: int) -> None:
    found = candidates(kind, tokens, *shape, 132)
    assert len(set(found)) == len(found)
    assert any(config.rows == mid_config.TALL for config in found) == (tokens in (192, 384, 768, 1536))
    for config in found:
        assert config.pieces
        whole = config.split == 1
        stages = config.stages_for(kind, whole=whole)
        kept = config.rows * config.width * (1 if kind == "gate_up" else 2) if whole else 0
        assert stages >= 3
        assert stages * (config.rows + config.width) * 128 + kept <= mid_config.SHARED_BYTES


def test_an_unmeasured_bucket_has_the_rows_of_the_next() -> None:
    shipped = mid_table._shipped()
    assert mid_table.lookup(192, 28672, 4096) == shipped.get((192, 28672, 4096), shipped[256, 28672, 4096])


def _part(meeting: mid_meeting.Meeting, part: int, patience: int, added: list[int]) -> Generator[None, None, None]:
    """One split as in `mid_hopper`: between two atomic operations there is only the decision."""
    arrived, is_last, left = meeting.arrive()
    shares = left
    yield
    for _ in range(patience):
        if arrived == meeting.parts:
            break
        arrived = meeting.look()
        yield
    if arrived < meeting.parts:
        arrived = meeting.give_up(part)
        yield
    if arrived == meeting.parts:
        shares |= 1 << part
    assert is_last or not left
    for share in range(meeting.parts):
        if shares >> share & 1:
            assert meeting.word & 255 == meeting.parts, "added up before all sums were there"
            added.append(share)
            yield
    meeting.leave()
    yield


def _all_orders(parts: int, patience: int) -> int:
    """Play all orders of the splits' operations and return their number."""

    def play(order: list[int]) -> list[int]:
        meeting, added = mid_meeting.Meeting(parts), list[int]()
        agents = {part: _part(meeting, part, patience, added) for part in range(parts)}
        for part in order:
            try:
                next(agents[part])
            except StopIteration:
                del agents[part]
        if not agents:
            assert sorted(added) == list(range(parts))
            assert meeting.word == 0
        return list(agents)

    count, open_orders = 0, [[]]
    while open_orders:
        order = open_orders.pop()
        left = play(order)
        count += not left
        open_orders += [[*order, part] for part in left]
    return count


@pytest.mark.parametrize("patience", [0, 1])
def test_every_share_is_added_once_in_all_orders_of_two_splits(patience: int) -> None:
    assert _all_orders(2, patience) > 20


@pytest.mark.parametrize("patience", [0, 1, 5])
@pytest.mark.parametrize("parts", [3, 4, 8])
def test_every_share_is_added_once_in_any_order(parts: int, patience: int) -> None:
    for seed in range(150):
        rng = random.Random(seed)
        meeting, added = mid_meeting.Meeting(parts), list[int]()
        agents = [_part(meeting, part, patience, added) for part in range(parts)]
        weights = [rng.random() ** 3 + 0.01 for _ in agents]
        while agents:
            at = rng.choices(range(len(agents)), weights)[0]
            try:
                next(agents[at])
            except StopIteration:
                del agents[at], weights[at]
        assert sorted(added) == list(range(parts))
        assert meeting.word == 0, "the next launch begins where this one did"


def test_a_table_round_trips_and_is_found_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {(256, 6144, 4096): MidConfig(192), (128, 4096, 14336): MidConfig(256, 8, 4)}
    import json

    assert mid_table.decoded(json.loads(encoded(table))) == table
    with pytest.raises(ValueError, match="cannot"):
        mid_table.decoded({"128,1,1": [200, 1, 0]})
    monkeypatch.setattr(mid_table, "_shipped", lambda: table)
    assert mid_table.lookup(193, 6144, 4096) == MidConfig(192)
    assert mid_table.lookup(256, 6144, 4096) == MidConfig(192)
    assert mid_table.lookup(257, 6145, 4096) is None
    assert mid_table.lookup(16, 4096, 14336) is None


def test_a_table_is_for_whole_gpus_of_its_kind_and_for_existing_epilogues(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from weft.kernels.common.gpu import KNOWN, compiling_for
    from weft.kernels.matmul.gemm_config import SPECIAL
    from weft.kernels.matmul.gemm_launch import workspace
    from weft.kernels.matmul.mid_projections import chosen

    shipped = mid_table._shipped() | {(256, 4096, 4096): MidConfig(256, 4)}
    monkeypatch.setattr(mid_table, "_shipped", lambda: shipped)
    weight, space = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"), workspace("meta")
    with compiling_for(KNOWN["h200"]):
        assert chosen(None, 200, weight, 132, space, plain=True) == MidConfig(256, 4)
        assert chosen(MidConfig(128), 200, weight, 100, space, plain=True) == MidConfig(128)
        assert chosen(None, 200, weight, 132, None, plain=True) is None
        assert chosen(None, 200, weight, 132, workspace("meta", 1 << 18), plain=True) is None
        assert chosen(None, 200, weight, 132, space, plain=False) is None
        assert chosen(None, 200, weight, 100, space, plain=True) is None
        assert chosen(SPECIAL, 200, weight, 132, space, plain=True) is None
    with compiling_for(KNOWN["a100"]):
        assert chosen(MidConfig(128), 200, weight, 108, space, plain=True) is None


@pytest.mark.parametrize(
    ("options", "why"), [([], "needs a Hopper GPU"), (["--models", "8b,9b"], "unknown 9b; choose from 8b")]
)
def test_impossible_tuning_is_reported_before_it_starts(
    options: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    from weft.tools.kernels import mid_tuning

    monkeypatch.setattr(mid_tuning.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["mid_tuning", *options])
    with pytest.raises(SystemExit):
        mid_tuning.main()
    assert why in capsys.readouterr().err
