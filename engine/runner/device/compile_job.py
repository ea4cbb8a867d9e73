"""`CompileJob`: a process beside a starting engine that compiles the kernels it will need. Costs no import of torch.

What has been compiled is written down beside the tuned tables, so that a start with everything in the cache starts no
such process. Where an engine does not wait for its plan, the kernels of the serial plan come first, then those of one
pipeline after the other, while it serves.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from weft.engine.config import EngineConfig, expanded
from weft.engine.progress import Progress

COMPILING = "compiling kernels"
SERIAL, PIPELINE = "serial", "pipeline"
"""what lines of the job tell of: the kernels of the serial plan are there; those of a pipeline, or why not"""
PATIENCE_SECONDS = 600
"""for all of them; then the engine goes on and compiles what it lacks itself"""
ENGINE = Path(__file__).parents[2]
SOURCES = (ENGINE / "runner", ENGINE / "plans", ENGINE / "model", ENGINE.parent / "kernels")
"""whose code decides which kernels there are"""
MATTERS = {
    "device", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "attention_backend",
    "batch_invariant", "tuning_seconds", "plan", "model_impl", "trust_remote_code", "tensor_parallel_size",
    "quantization", "kv_cache_dtype", "pod",
}  # fmt: skip
"""options that decide it too"""
DRIVER = Path("/proc/driver/nvidia/gpus")


class CompileJob:
    """A running job. Create with `CompileJob.begin(config)`."""

    def __init__(self, process: subprocess.Popen[str], *, waits_for_plan: bool = True, serial: bool = False) -> None:
        """waits_for_plan: the engine does. serial: the kernels of the serial plan are there already."""
        self._process = process
        self._whole, self._serial = waits_for_plan, serial
        self._deadline = time.monotonic() + PATIENCE_SECONDS
        self._outcomes: dict[int, str] = {}
        self._ended = False
        self._partial = b""
        """what has no line end yet"""

    @classmethod
    def begin(cls, config: EngineConfig) -> CompileJob | None:
        """None where there is nothing to compile for, or nothing left to compile."""
        use_cache(config)
        if config.device == "cpu" or config.model_impl == "transformers" or not has_gpu() or is_compiled(config):
            return None
        process = subprocess.Popen(
            (sys.executable, "-P", "-m", "weft.engine.runner.start.compile_kernels"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its compilers end with it
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(config.model_dump_json() + "\n")
            process.stdin.flush()
        return cls(process, waits_for_plan=config.wait_for_plan, serial=is_compiled(config, SERIAL))

    @classmethod
    def renewed(cls, job: CompileJob | None, config: EngineConfig) -> CompileJob | None:
        """After tiles were tuned, which are other kernels: the job that goes on, or another one in its place."""
        if job is not None and not job._whole and is_compiled(config, SERIAL):
            return job
        if job is not None:
            job.stop()
        return cls.begin(config)

    def wait(self, progress: Progress | None = None) -> None:
        """Until the engine can begin: the job has ended, however that was, or the kernels of the serial plan are there
        and the engine does not wait for more. What has not been compiled the first launch compiles.
        """
        while not self._ended and (self._whole or not self._serial):
            self._hear(None, progress)

    def outcome(self, pipeline: int) -> str | None:
        """Empty once all kernels of that pipeline of the plan are in the cache, else why they will not be; None: not
        known yet. Does not wait.
        """
        while not self._ended and pipeline not in self._outcomes and self._hear(0.0):
            pass
        unknown = "the process that compiles has ended" if self._ended else None
        return self._outcomes.get(pipeline, unknown)

    def stop(self) -> None:
        self._kill()
        self._process.wait()
        self._ended = True

    def _hear(self, seconds: float | None, progress: Progress | None = None) -> bool:
        """Take what the job says, wait so long for it at most (None: as long as it may take). Whether there was any."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        left = max(0.0, self._deadline - time.monotonic())
        if not select.select([pipe], (), (), left if seconds is None else min(seconds, left))[0]:
            if left == 0:
                self.stop()
            return False
        if not (data := os.read(pipe, 65536)):
            self._process.wait()
            self._ended = True
            return True
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._take(line.decode(), progress)
        return True

    def _take(self, line: str, progress: Progress | None) -> None:
        what, _, rest = line.partition(" ")
        if what == SERIAL:
            self._serial = True
        elif what == PIPELINE:
            number, _, failed = rest.partition(" ")
            self._outcomes[int(number)] = f"{failed} did not compile" if failed else ""
        elif progress is not None and rest:
            progress(COMPILING, int(what), int(rest))

    def _kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def has_gpu() -> bool:
    """Whether an NVIDIA driver is there, as far as files tell."""
    return Path("/dev/nvidiactl").exists()


def use_cache(config: EngineConfig) -> None:
    """From now on this process and its children keep compiled kernels in the configuration's folder.

    An operator's `TRITON_CACHE_DIR` stays.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(config.cache_path / "triton"))


def gpus_here() -> set[str]:
    """Their names, as far as files tell: a container may hide them."""
    found = set()
    for file in DRIVER.glob("*/information"):
        with contextlib.suppress(OSError):
            found |= {line.partition(":")[2].strip() for line in file.read_text().splitlines() if line[:6] == "Model:"}
    return found


def stamp_file(config: EngineConfig, part: str = "") -> Path:
    """Where it is written down which kernels this configuration needs: another one, another file.

    part: `SERIAL` for those of the serial plan alone.
    """
    digest = hashlib.sha256(config.model_dump_json(include=MATTERS).encode())
    for name in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(importlib.metadata.version(name).encode())
    files = [config.model_path / "config.json"]
    files += sorted(config.cache_path.glob("gemm-*.json"))  # tiles that were tuned
    if config.plan.endswith(".json"):
        files.append(expanded(config.plan))
    for folder in SOURCES:
        files += sorted(file for file in folder.rglob("*") if file.suffix in (".py", ".json"))
    for file in files:
        with contextlib.suppress(OSError):
            digest.update(file.read_bytes())
        digest.update(b"\0")
    return config.cache_path / f"kernels-{digest.hexdigest()[:16]}{part and '-'}{part}.json"


def is_compiled(config: EngineConfig, part: str = "") -> bool:
    """Whether all that was compiled for this configuration, or this part of it, is still in the cache."""
    if part and is_compiled(config):
        return True
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    try:
        stamp = json.loads(stamp_file(config, part).read_text())
        here = gpus_here()
        return (not here or stamp["gpu"] in here) and all((folder / name).is_dir() for name in stamp["kernels"])
    except (OSError, ValueError, TypeError, KeyError):
        return False


def write_stamp(file: Path, gpu: str, kernels: list[str]) -> None:
    """gpu: its name. kernels: their folders in the cache. Where nothing can be written, every start looks again."""
    part = file.with_suffix(f".{os.getpid()}.part")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"gpu": gpu, "kernels": kernels}))
        part.replace(file)
