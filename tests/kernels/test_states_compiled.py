"""Kernels of recurrent states and latents compile for every GPU, without one, into the shared memory of an SM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = """
import sys
import torch
from weft.tools.kernels.latent_decode import latent_decode, latent_workspace
from weft.kernels.common.compilation import collect
from weft.kernels.common.gpu import Gpu
from weft.tools.kernels import bench_states

def steps_and_chunks():
    for name in bench_states.MODELS:
        of = bench_states.MODELS[name]
        for rows, tokens in ((4, 0), (1, 64)):
            layer = bench_states.Layer(of, rows, tokens, 64, "meta")
            space = bench_states.delta_space(tokens, of, "meta")
            for call in layer.chunk(132, space, layer.work()) if tokens else layer.step(132):
                call()

def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")

def latents():
    for heads in (16, 40, 128):
        q, kv, out = (meta(*shape, dtype=torch.bfloat16)
                      for shape in ((4, heads, 576), (9, 2, 1, 64, 1, 576), (4, heads * 512)))
        latent_decode(q, kv, 0, meta(4, 9), meta(9, 8), meta(1), out=out, num_sms=132, scale=0.1, rank=512,
                      space=latent_workspace(9, 4, heads, 512, "meta"))

capability, limit = (int(sys.argv[1]), int(sys.argv[2])), int(sys.argv[3])
kernels = [k for work in (steps_and_chunks, latents) for k in collect(work, Gpu("GPU", capability, 132))]
for kernel in kernels:
    shared = kernel.function._do_compile(*kernel.arguments).metadata.shared
    assert shared <= limit, (kernel.name, shared)
    print(kernel.function.fn.__module__.split(".")[-1], kernel.name)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("capability", "shared"), [("8 0", 166912), ("8 9", 101376), ("9 0", 232448), ("10 0", 232448)]
)
def test_they_compile(capability: str, shared: int, tmp_path: Path) -> None:
    ended = subprocess.run(
        (sys.executable, "-P", "-c", SCRIPT, *capability.split(), str(shared)),
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert {line.split()[0] for line in ended.stdout.splitlines()} == {
        "conv", "delta_rule", "gated_norm", "latent_decode", "mamba2",
    }  # fmt: skip
