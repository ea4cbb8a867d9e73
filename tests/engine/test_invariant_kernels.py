"""`--batch-invariant` on a GPU: no sum depends on tiles that follow the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.engine.config import EngineConfig

PRESETS = Path(__file__).parents[2] / "engine" / "model" / "presets"
MOVED = ("_scatter_kernel",)
"""passes whose tiles follow the token count, and which copy each number separately"""
PRODUCTS = ("product_kernel", "grouped_kernel")
SUMS = ("_reduce_kernel", "_reduce_pushed_kernel", "_meet_kernel")
"""of ranks: each number separately, in rank order, in one step or two"""

COMPILE = """
import re, sys
from weft.engine.config import EngineConfig
from weft.engine.runner.start.kernel_set import kernel_set
from weft.kernels.common.gpu import KNOWN

config = EngineConfig(
    model=sys.argv[1], cache_dir=sys.argv[2], load_format="dummy", tuning_seconds=0, num_pages=4000,
    max_model_len=2048, max_num_batched_tokens=512, batch_invariant=True,
)
for number, kernel in enumerate(kernel_set(config, KNOWN["h200"])):
    names = [param.name for param in kernel.function.params]
    kind = {names[place[0]]: value for place, value in kernel.arguments[3].items()}.get("KIND")
    if kernel.name in ("product_kernel", "mid_kernel") and kind != "residual":
        code = kernel.function._do_compile(*kernel.arguments).asm["llir"]
        products = set(re.findall(r"(%\\S+) = fmul ", code))
        sums = re.findall(r" = f(?:add|sub) (?:\\w+ )*float ([^\\s,]+), ([^\\s,]+)", code)
        assert sums or kind == "plain"
        pairs = [pair for pair in sums if products.issuperset(pair)]
        print("gluon" if kernel.function.is_gluon() else "triton", kind, number, len(pairs))
"""


def constants(kernel: Any) -> dict[str, Any]:
    """The constants that a kernel was compiled for, by argument name; None for those that it is not given."""
    params = kernel.function.params
    return {
        params[place[0]].name: value
        for place, value in kernel.arguments[3].items()
        if params[place[0]].is_constexpr or value is None
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process with a GPU has Triton's driver for it")
@pytest.mark.parametrize(
    "preset",
    ["llama-3-8b", "qwen2.5-7b", "qwen3-8b", pytest.param("qwen3-30b-a3b", marks=pytest.mark.nightly), "mixtral-8x7b",
     pytest.param("glm-4.5-air", marks=pytest.mark.nightly), "gpt-oss-20b", "gemma-3-4b", "olmo-2-7b", "opt-1.3b"],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 4])
def test_no_sum_of_a_models_kernels_follows_the_token_count(
    preset: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GEMM's sum over its depth is in the order of the depth for any tile: its tiles may follow the count, but it is
    not split, and its epilogue must not add up a row. Every other kernel is the same for all token counts."""
    if ranks > 1 and preset == "olmo-2-7b":
        pytest.skip("the kernels have no norms over all heads of several ranks")
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    from weft.engine.runner.start.kernel_set import kernel_set
    from weft.kernels.common.gpu import KNOWN

    monkeypatch.setattr(driver, "_active", None)
    config = EngineConfig(
        model=str(PRESETS / preset), cache_dir=str(tmp_path), load_format="dummy", tuning_seconds=0, num_pages=4000,
        max_model_len=2048, max_num_batched_tokens=512, batch_invariant=True, tensor_parallel_size=ranks,
    )  # fmt: skip
    others: dict[Any, set[Any]] = defaultdict(set)
    tiles: dict[str, set[Any]] = defaultdict(set)
    for kernel in kernel_set(config, KNOWN["h200"]):
        of = constants(kernel)
        # sums of squares are a row's in one piece
        assert of.get("PARTS") in (None, 0, 1), kernel.name
        if kernel.name == "product_kernel":
            assert of.get("SPLIT", 1) == 1
            normed_heads = of["HAS_NORM"] if "HAS_NORM" in of else of["KIND"] == "qkv" and "q_norm" not in of
            assert not normed_heads, "norms of heads are not added up in the epilogue of a product"
            tiles[of["KIND"]].add(of.get("BM"))
        elif kernel.name == "mid_kernel":
            assert of["SPLIT"] == 1
            tiles[of["KIND"]].add((of["W0"], of["W1"], of["W2"], of["ROWS"]))
        elif kernel.name not in (*PRODUCTS, *SUMS, *MOVED):
            # layers with windows of their own have kernels of their own
            window = of.pop("WINDOW", None), of.pop("WINDOWED", None)
            others[kernel.name, window].add((str(sorted(of.items())), kernel.arguments[4].num_warps))
    assert tiles
    assert all(len(found) > 1 for found in tiles.values()), "a kind of GEMM has one tile for all token counts"
    assert {name: found for name, found in others.items() if len(found) > 1} == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process with a GPU has Triton's driver for it")
@pytest.mark.nightly
def test_no_sum_of_two_products_is_left_to_the_compiler(tmp_path: Path) -> None:
    """It would round one product and fuse the other with the sum, and chose differently in different kernels. So the
    tiles of a QKV GEMM, which follow the token count, changed bits of rotated heads. Squares of 16-bit numbers are
    exact. In a process of its own, because Triton remembers compiled kernels."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = (sys.executable, "-P", "-c", COMPILE, str(PRESETS / "llama-3-8b"), str(tmp_path))
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    found = {tuple(line.split()[:3]): int(line.split()[3]) for line in ended.stdout.splitlines()}
    assert {(kernel, kind) for kernel, kind, _ in found} >= {
        ("gluon", "qkv"), ("triton", "qkv"), ("gluon", "gate_up"), ("triton", "gate_up")
    }  # fmt: skip
    assert {kernel: pairs for kernel, pairs in found.items() if pairs} == {}
