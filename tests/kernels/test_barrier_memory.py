"""Shared memory that was an mbarrier in a warp-specialised kernel is never reused.

The compiler places the workers' arguments into shared memory that is dead by then. If that had been an unused barrier,
the arguments turned into the barrier's bits again when another process took the GPU in between: workers that read a
huge negative number of tiles exited at once, and a warpgroup waited for them forever.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = """
import functools
import sys
import torch
from weft.kernels.tuning import calls as bench_calls
from weft.kernels.matmul import fp8_projections
from weft.kernels.matmul import gemm_launch
from weft.kernels.matmul import mid_projections
from weft.kernels.matmul import projections
from weft.kernels.common.compilation import collect
from weft.kernels.attention.decode_workspace import decode_workspace
from weft.kernels.matmul.gemm_config import SPECIAL
from weft.kernels.common.gpu import KNOWN
from weft.kernels.matmul.mid_config import MidConfig
from weft.tools.kernels.mid_trial import MODELS, Operands
from weft.kernels.attention.pod_hopper import PodWork, launch_pod
from weft.kernels.attention.pod_together import launch_together
from weft.kernels.attention.prefill_attention import prefill_workspace
from weft.kernels.matmul.tuned import Shape

count = torch.empty(1, dtype=torch.int32, device="meta")  # read on the device, so it is an argument
for module in (projections, fp8_projections, mid_projections):
    for name in ("qkv_project", "gate_up_project", "linear_project", "residual_project"):
        if hasattr(module, name):
            setattr(module, name, functools.partial(getattr(module, name), num_tokens=count))

def sixteen():
    space = gemm_launch.workspace("meta")
    for kind in ("qkv", "gate_up", "up", "residual"):
        shape = Shape(kind, 1536, 1024)
        bench_calls.gemm_call(shape, 2048, bench_calls.weights(shape, 1, "meta")[0], space, 132, SPECIAL, 64, 2)()

def eight():
    space = gemm_launch.workspace("meta")
    for kind in ("qkv", "gate_up", "residual"):
        shape = Shape(kind, 1536, 1024, bits=8)
        bench_calls.gemm_call(shape, 2048, bench_calls.weights(shape, 1, "meta")[0], space, 132, None, 128, 2)()

def mid():
    model = MODELS["8b"]
    for index, config in ((0, MidConfig(192)), (1, MidConfig(128)), (1, MidConfig(256, 5)), (2, MidConfig(224)),
                          (3, MidConfig(128, rows=192))):
        shape = model.shapes[index]
        weight = torch.empty(shape.features, shape.depth, dtype=torch.bfloat16, device="meta")
        Operands(shape, 256, model, 132, "meta").run(weight, config)

def pod():
    def meta(*shape, dtype=torch.int32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    lists = PodWork(meta(99, 8), meta(1), meta(99, 8), meta(1), meta(1))
    for launch in (launch_pod, launch_together):
        launch(meta(64, 32, 128, dtype=torch.bfloat16), meta(9, 2, 2, 64, 8, 128, dtype=torch.bfloat16), 0, meta(5, 9),
            lists, out=meta(64, 4096, dtype=torch.bfloat16), num_sms=132,
            decodes=decode_workspace(64, 8, 8, 4, 128, "meta"), prefills=prefill_workspace(64, 8, 128, "meta"))

for number, kernel in enumerate(collect(globals()[sys.argv[1]], KNOWN["h200"])):
    compiled = kernel.function._do_compile(*kernel.arguments)
    with open(f"{kernel.name}-{number}.ptx", "w") as file:
        file.write(compiled.asm["ptx"])
"""
SIZES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b128": 16}


def shared_places(ptx: str) -> tuple[set[int], set[int]]:
    """Bytes of shared memory at addresses known at compile time: of barriers, and of plain stores."""
    at = {"global_smem": 0}
    for name, value in re.findall(r"mov\.b(?:32|64)\s+(%\w+), (global_smem);", ptx):
        at[name] = at[value]
    for name, base, offset in re.findall(r"add\.s32\s+(%\w+), (%\w+), (\d+);", ptx):
        if base in at:
            at.setdefault(name, at[base] + int(offset))
    barriers = {
        at[name] + byte for name in re.findall(r"mbarrier\.init\S* \[(%\w+)\]", ptx) for byte in range(8) if name in at
    }
    stored = set()
    for count, size, base, offset in re.findall(r"st\.shared(?:\.v(\d))?\.(b\d+)\s+\[([%\w]+)\+?(\d*)\]", ptx):
        if base in at:
            first = at[base] + int(offset or 0)
            stored |= set(range(first, first + int(count or 1) * SIZES[size]))
    return barriers, stored


def compiled(which: str, tmp_path: Path) -> dict[str, str]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    ended = subprocess.run(
        (sys.executable, "-P", "-c", SCRIPT, which),
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    return {file.name: file.read_text() for file in tmp_path.glob("*.ptx") if "mbarrier.init" in file.read_text()}


@pytest.mark.nightly
@pytest.mark.parametrize(("which", "kernels"), [("sixteen", 4), ("eight", 3), ("mid", 5), ("pod", 2)])
def test_no_argument_is_placed_where_a_barrier_was(which: str, kernels: int, tmp_path: Path) -> None:
    found = compiled(which, tmp_path)
    assert len(found) == kernels
    for name, ptx in found.items():
        barriers, stored = shared_places(ptx)
        assert len(barriers) >= 8 * 4, f"{name}: barriers are not found"
        assert len(stored) >= 8, f"{name}: arguments are not found"
        assert not barriers & stored, name
