"""One set of weights on a GPU: engines that map it answer as one that has loaded its own, and it outlives them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.runner.shared_memory import CudaMemory
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams
from weft.engine.wire.shelf import Shelf

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the driver's memory needs a GPU")
CONFIG = EngineConfig(
    device="cuda", num_pages=64, max_num_seqs=16, max_num_batched_tokens=256, tuning_seconds=0, plan="serial",
    wait_for_plan=True,
)  # fmt: skip
MAKER = """
import os, torch
from weft.engine.runner.shared_memory import CudaMemory
from weft.engine.wire.shelf import Shelf
shelf = Shelf.of({fds})
fd = CudaMemory(torch.device("cuda", 0)).make(2**22, lambda home: home.fill_(7))
shelf.put("sevens", fd, fd)
os._exit(0)
"""


def tokens(engine: Engine) -> list[int]:
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    engine.add(AddRequest(handle=1, prompt_token_ids=np.arange(5, 60, dtype=np.int32).tobytes(), params=params))
    out: list[int] = []
    while engine.has_work:
        if (outputs := engine.step()) is not None:
            out += outputs.columns()[1].tolist()
    return out


def test_memory_outlives_the_process_that_made_it() -> None:
    shelf = Shelf()
    code = MAKER.format(fds=shelf.fds)
    subprocess.run([sys.executable, "-P", "-c", code], pass_fds=shelf.fds, check=True, timeout=120)
    found = shelf.find()
    assert found is not None
    home = CudaMemory(torch.device("cuda", 0)).map(found.memory, 2**22)
    assert bool((home == 7).all())
    found.close()
    shelf.clear()


def test_engines_with_weights_in_common_answer_as_one_alone() -> None:
    alone = tokens(Engine(CONFIG))
    shelf = Shelf()
    maker, mapper = Engine(CONFIG, shelf=shelf), Engine(CONFIG, shelf=shelf)
    assert (tokens(maker), tokens(mapper)) == (alone, alone)
    assert "loading weights" not in mapper.start_seconds
    shelf.clear()
