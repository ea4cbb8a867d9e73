"""Products of packed weights compile for Ampere, Ada and Hopper without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled import compiled

pytest.importorskip("triton")
SCRIPT = """
import torch
from weft.kernels.formats.packed_form import PackedForm
from weft.kernels.formats.packed_rows import PackedRows
from weft.kernels.formats.packed_weight import PackedWeight
from weft.kernels.matmul.gemm_launch import workspace
from weft.kernels.matmul.packed_projections import PackedProjections

def work():
    wide, normed = torch.empty(1 << 24, dtype=torch.bfloat16, device="meta"), torch.empty(256, 4096, device="meta")
    projections = PackedProjections(wide, normed)
    options = {"num_sms": 108, "space": workspace("meta")}
    for form in (PackedForm(4, 128, 8, False), PackedForm(4, 32, 0, True), PackedForm(8, 16, 32, False)):
        rows = torch.empty(4096, form.row_bytes(4096), dtype=torch.uint8, device="meta")
        weight = PackedWeight.of(PackedRows(rows, form, 4096))
        for tokens in (1, 32, 64, 128, 300):
            x, out = (torch.empty(tokens, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
            projections.linear_project(x, None, weight, 1e-5, out=out, **options)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("gpu", "shared"), [("a100", 163 << 10), ("l40s", 99 << 10), ("h200", 227 << 10)])
def test_packed_products_compile(gpu: str, shared: int, tmp_path: Path) -> None:
    found = compiled(SCRIPT, tmp_path, gpu, shared)
    names = [name.rpartition("-")[0] for name in found]
    assert names.count("packed_kernel") >= (3 if gpu == "h200" else 6)
    assert names.count("packed_few_kernel") == (4 if gpu == "h200" else 0)
    assert names.count("widen_kernel") == 3
    assert not any(".local" in text for text in found.values())
