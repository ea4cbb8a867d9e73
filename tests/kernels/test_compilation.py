"""Kernels are found and compiled for a GPU that is not present."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime.driver import driver

from weft.kernels.common.compilation import Kernel, collect, compile_all
from weft.kernels.common.gpu import KNOWN, gpu, gpu_device, is_hopper

H200 = KNOWN["h200"]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a process with a GPU has Triton's driver for it")


@triton.jit
def _add(x, y, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < N) + 1, mask=at < N)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def triton_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", None)
    _add.device_caches.clear()


def launches(*lengths: int, dtype: torch.dtype = torch.float32) -> list[Kernel]:
    def work() -> None:
        for n in lengths:
            x = torch.empty(n, dtype=dtype, device="meta")
            _add[(1,)](x, x, n, BLOCK=64)

    return collect(work, H200)


def test_launches_with_the_same_compiled_code_are_one_kernel() -> None:
    assert len(launches(17, 18, 19)) == 1
    assert len(launches(17, 32)) == 2  # a multiple of 16 is known to be one
    assert len(launches(17) + launches(17, dtype=torch.bfloat16)) == 2


def test_kernels_are_chosen_for_the_named_gpu() -> None:
    seen = []
    collect(lambda: seen.append((gpu(), str(gpu_device()), is_hopper())), H200)
    assert seen == [(H200, "meta", True)]
    assert gpu() is None


def test_torch_work_without_data_imports_no_compiler() -> None:
    script = """
import sys, torch
from weft.kernels.common.compilation import collect
from weft.kernels.common.gpu import KNOWN
collect(lambda: torch.cat([torch.empty(2, device="meta")] * 2), KNOWN["h200"])
assert "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch)
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_compiled_kernels_are_found_in_the_cache(cache: Path) -> None:
    kernels = launches(17, 32)
    reported: list[tuple[int, int]] = []
    hashes, failed = compile_all(kernels, 2, lambda done, total: reported.append((done, total)))
    assert len(set(hashes)) == 2
    assert failed == []
    assert reported[-1] == (2, 2)
    machine_code = list(cache.glob("*/*.cubin"))
    assert len(machine_code) == 2
    written = {file: file.stat().st_mtime_ns for file in machine_code}
    again, failed = compile_all(launches(17, 32), 2)
    assert (sorted(again), failed) == (sorted(hashes), [])
    assert {file: file.stat().st_mtime_ns for file in cache.glob("*/*.cubin")} == written


class _Broken:
    """Stands for a kernel that the compiler rejects or that kills it."""

    def __init__(self, dies: bool) -> None:
        self._dies = dies
        self.fn = _Broken.is_gluon

    def is_gluon(self) -> bool:
        return False

    def _do_compile(self) -> None:
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no such layout")


@pytest.mark.slow
def test_a_kernel_that_fails_to_compile_or_kills_its_compiler_affects_no_other(
    capfd: pytest.CaptureFixture[str],
) -> None:
    refused, deadly = Kernel(_Broken(False), ()), Kernel(_Broken(True), ())
    reported: list[int] = []
    hashes, failed = compile_all([deadly, refused, deadly, *launches(17)], 1, lambda done, _: reported.append(done))
    assert failed == [deadly, refused, deadly]
    assert len(hashes) == 1
    assert reported[-1] == 4
    assert "no such layout" in capfd.readouterr().err
