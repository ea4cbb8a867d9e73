"""A kernel that never ends, in a real daemon: it is detected and logged, and the engine is replaced."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from live import running

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SPIN_CYCLES = 4 * 10**11
"""minutes: if a driver does not end the kernel with its process, the GPU becomes free again after some time"""
OPTIONS = ("--device", "cuda", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--kv-cache-gib", "1")
BODY = {"prompt": "What is 12 + 30?", "max_tokens": 8, "temperature": 0}

SITE = """
import os, sys
if "weft.engine.process" in sys.orig_argv:
    import torch
    from weft.engine.runner.cuda import cuda_runner
    launch = cuda_runner.CudaRunner.launch
    def spin(self, batch):
        if os.path.exists({trigger!r}):
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep({cycles})
        return launch(self, batch)
    cuda_runner.CudaRunner.launch = spin
"""


def ask(url: str, body: object = None) -> tuple[int, str]:
    """Status and text; 0 if there is no answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=180) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Return how long it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds
        time.sleep(0.2)
    return time.monotonic() - begun


def test_a_kernel_that_never_ends_is_detected_and_the_engine_replaced(tmp_path: Path) -> None:
    trigger, folder = tmp_path / "spin", tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(trigger=str(trigger), cycles=SPIN_CYCLES))
    paths = [str(folder), *(path for path in [os.environ.get("PYTHONPATH")] if path)]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    with running(tmp_path, *OPTIONS, "--hang-timeout", "15", env=env) as daemon, ThreadPoolExecutor() as pool:
        health, complete = f"{daemon.url}/health", f"{daemon.url}/v1/completions"
        status, before = ask(complete, BODY)
        assert status == 200
        trigger.touch()
        streams = [pool.submit(ask, complete, {**BODY, "stream": True, "max_tokens": 200}) for _ in range(4)]
        print(f"/health told of it after {until(lambda: ask(health)[0] == 503, 60):.1f} s")
        reported = [stream.result() for stream in streams]
        assert all("engine_dead" in text for _, text in reported), reported
        trigger.unlink()
        print(f"ready again {until(lambda: ask(f'{daemon.url}/ready')[0] == 200, 300):.1f} s after they were told")
        status, after = ask(complete, BODY)
        assert status == 200
        assert json.loads(after)["choices"][0]["text"] == json.loads(before)["choices"][0]["text"]
        assert 'weft_engine_hangs_total{engine="0"} 1.0' in ask(f"{daemon.url}/metrics")[1]
        log = daemon.stderr()
        assert "last batch: step" in log
        assert "in wait" in log  # the loop, in CUDA
