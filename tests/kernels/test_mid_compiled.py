"""GEMMs of 33 to 2,048 tokens compile for Hopper without a GPU: they fit an SM, spill nothing, wait in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from compiled import compiled

pytest.importorskip("triton")
SCRIPT = """
import torch
from weft.kernels.matmul.mid_config import MidConfig
from weft.tools.kernels.mid_trial import MODELS, Operands

def work():
    model = MODELS["8b"]
    tried = ((0, MidConfig(192)), (0, MidConfig(256, 5, box=32)), (2, MidConfig(224, box=32)), (3, MidConfig(256, 8)),
             (2, MidConfig(192, rows=192)), (3, MidConfig(128, 4, rows=192)))
    for index, config in tried:
        shape = model.shapes[index]
        weight = torch.empty(shape.features, shape.depth, dtype=torch.bfloat16, device="meta")
        Operands(shape, 256, model, 132, "meta").run(weight, config)
"""


@pytest.mark.nightly
def test_mid_sized_gemms_compile_and_their_splits_meet_after_a_barrier(tmp_path: Path) -> None:
    found = [text for name, text in compiled(SCRIPT, tmp_path).items() if name.startswith("mid_kernel")]
    assert len(found) == 6
    assert not any(".local" in text for text in found)
    assert all("wgmma.mma_async" in text for text in found)
    cut = [text for text in found if "atom.global.gpu.acq_rel" in text]
    assert len(cut) == 3
    for text in cut:
        for m in re.finditer(r"atom\.global\.gpu\.acq_rel", text):
            # all threads' sums are written, or read, before one of them signals it
            before = text[: m.start()]
            assert before.rfind("bar.sync") > max(before.rfind("st.global.v"), before.rfind("ld.global.cg"))
    whole = [text for text in found if text not in cut]
    assert not any("atom." in text for text in whole)
