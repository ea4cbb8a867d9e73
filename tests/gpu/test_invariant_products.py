"""Rows of an 8B's GEMMs have the same bits with every configuration that `--batch-invariant` may choose, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from weft.engine.runner.iteration.pipelines import token_buckets
from weft.kernels.matmul import gemm, mid_projections
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig
from weft.kernels.matmul.gemm_launch import workspace
from weft.kernels.matmul.mid_projections import Config, unsplit
from weft.kernels.matmul.projections import sumsq_buffer
from weft.kernels.matmul.rows import row_sumsq

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD = 4096, 14336, 32, 8, 128
ROWS, PAGE = 512, 64
Product = Callable[[Tensor, dict[str, Any]], Tensor]
"""Computes the rows of `ROWS` with these indices. The dictionary has what all GEMMs take besides their operands."""


def _random(*shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * std).to(torch.bfloat16)


def _qkv() -> tuple[Tensor, Product]:
    weight = _random((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, std=HIDDEN**-0.5)
    x, sums = _random(ROWS, HIDDEN), torch.rand(1, ROWS, device="cuda") * HIDDEN
    angles = 6.3 * torch.rand(4096, HEAD // 2, device="cuda")
    rotary = torch.stack((angles.cos(), angles.sin()), -1)

    def product(rows: Tensor, common: dict[str, Any]) -> Tensor:
        kv = torch.zeros(ROWS // PAGE + 1, 1, 2, PAGE, KV_HEADS, HEAD, device="cuda", dtype=torch.bfloat16)
        q = torch.zeros(len(rows), HEADS * HEAD, device="cuda", dtype=torch.bfloat16)
        positions, slots = (7 * rows).int(), (PAGE + rows).int()
        mid_projections.qkv_project(
            x[rows], sums[:, rows], weight, None, 1e-5, rotary, positions, slots, kv, 0, HEADS, out=q, **common
        )
        pages = kv[slots.long() // PAGE, 0, :, slots.long() % PAGE]
        return torch.cat((q, pages.flatten(1)), 1)

    return weight, product


def _residual(depth: int) -> tuple[Tensor, Product]:
    weight, a, x = _random(HIDDEN, depth, std=depth**-0.5), _random(ROWS, depth), _random(ROWS, HIDDEN)

    def product(rows: Tensor, common: dict[str, Any]) -> Tensor:
        out, sums = x[rows].contiguous(), sumsq_buffer(HIDDEN, len(rows), "cuda")
        mid_projections.residual_project(a[rows], weight, out, out=out, sumsq=sums, **common)
        return torch.cat((out.float(), row_sumsq(out, out=sums[:1]).t()), 1)

    return weight, product


def _gate_up() -> tuple[Tensor, Product]:
    weight, x = _random(2 * INTERMEDIATE, HIDDEN, std=HIDDEN**-0.5), _random(ROWS, HIDDEN)
    sums = torch.rand(1, ROWS, device="cuda") * HIDDEN

    def product(rows: Tensor, common: dict[str, Any]) -> Tensor:
        out = torch.zeros(len(rows), INTERMEDIATE, device="cuda", dtype=torch.bfloat16)
        return mid_projections.gate_up_project(x[rows], sums[:, rows], weight, 1e-5, out=out, **common)

    return weight, product


def _logits() -> tuple[Tensor, Product]:
    weight, x = _random(32_000, HIDDEN, std=HIDDEN**-0.5), _random(ROWS, HIDDEN)

    def product(rows: Tensor, common: dict[str, Any]) -> Tensor:
        return gemm.matmul(x[rows], weight, torch.zeros(len(rows), len(weight), device="cuda"), **common)

    return weight, product


PRODUCTS = {
    "qkv": _qkv, "o": lambda: _residual(HIDDEN), "gate_up": _gate_up, "down": lambda: _residual(INTERMEDIATE),
    "logits": _logits,
}  # fmt: skip


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_rows_bits_do_not_follow_the_token_count(kind: str, device: str, num_sms: int) -> None:
    if device != "cuda":
        pytest.skip("the order of an interpreted product's sums follows its shape")
    weight, product = PRODUCTS[kind]()
    space = workspace(device, elements=1 << 24)

    def run(first: int, tokens: int, bucket: int, config: Config) -> Tensor:
        """Rows `first ..` in a launch for `bucket` rows, the last of which are not live."""
        rows = (torch.arange(bucket, device="cuda") + first) % ROWS
        live = torch.tensor([tokens], dtype=torch.int32, device="cuda")
        return product(rows, {"num_sms": num_sms, "space": space, "num_tokens": live, "config": config})[:tokens]

    whole = run(0, ROWS, ROWS, SPECIAL if kind != "logits" else GemmConfig(128, 256, 64, 3, 8))
    assert whole.float().std() > 0.01
    for bucket in token_buckets(ROWS):
        either = unsplit(bucket, *weight.shape, num_sms)
        found: list[Config] = [either.gemm]
        if either.mid is not None and kind != "logits":
            found.append(either)
        for first, tokens in ((0, bucket), (100, max(1, bucket - 3)), (ROWS - 1, 1)):
            if first + tokens <= ROWS:
                for config in found:
                    got = run(first, tokens, bucket, config)
                    assert torch.equal(got, whole[first : first + tokens]), (bucket, first, tokens, config)
