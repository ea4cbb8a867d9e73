"""A starting engine launches only kernels that its background compilation has compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import os, sys
from pathlib import Path
from weft.engine.config import EngineConfig
from weft.engine.runner.device.compile_job import CompileJob

config = EngineConfig(model="demo", cache_dir=sys.argv[1], num_pages=200, max_num_batched_tokens=512)
job = CompileJob.begin(config)
assert job is not None
job.wait()
assert CompileJob.begin(config) is None, "not all is compiled"
cache = Path(os.environ["TRITON_CACHE_DIR"])
before = set(cache.iterdir())
from weft.engine.llm import LLM
from weft.engine.wire.sampling import SamplingParams
llm = LLM("demo", **config.model_dump(exclude={"model"}, exclude_none=True))
print(llm.generate(["3 + 4 ="] * 3, SamplingParams(max_tokens=2, temperature=0))[0].text)
print(sorted(entry.name for entry in set(cache.iterdir()) - before))
"""


def test_a_start_launches_no_kernel_that_its_job_has_not_compiled(device: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip(f"kernels are compiled for a GPU, not interpreted on a {device}")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"}
    ended = subprocess.run(
        (sys.executable, "-P", "-c", SCRIPT, str(tmp_path)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [" 7", "[]"]
