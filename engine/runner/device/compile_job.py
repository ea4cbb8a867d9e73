"""`CompileJob`: a process that compiles the kernels of a starting engine. This module does not import torch.

A stamp in the cache folder records what has been compiled, so that a start with a complete cache needs no process. If
the engine does not wait for its plan, the job compiles the serial plan's kernels first. Then it compiles one pipeline
after another while the engine serves.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from weft.engine.config import EngineConfig, cache_home, expanded
from weft.engine.progress import Progress

COMPILING = "compiling kernels"
SERIAL, PIPELINE = "serial", "pipeline"
"""First words of the job's lines: the serial plan is compiled; a pipeline is compiled, or has failed."""
TIMEOUT_SECONDS = 600  # Time limit for the job. After it the engine compiles missing kernels itself.
ENGINE = Path(__file__).parents[2]
SOURCES = (ENGINE / "runner", ENGINE / "plans", ENGINE / "model", ENGINE.parent / "kernels")
"""Folders with code that determines the kernels."""
KERNEL_OPTIONS = {
    "device", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "attention_backend",
    "batch_invariant", "tuning_seconds", "plan", "model_impl", "trust_remote_code", "tensor_parallel_size",
    "quantization", "kv_cache_dtype", "state_dtype", "pod", "enforce_eager", "speculation", "speculative_config",
    "enable_lora", "lora_modules", "lora_dir", "max_loras", "max_lora_rank",
}  # fmt: skip
"""Options that determine the kernels."""
DRIVER = Path("/proc/driver/nvidia/gpus")

_preloaded: list[subprocess.Popen[str]] = []  # At most one process, until a job or nobody needs it.


class CompileJob:
    """A running job. Create with `CompileJob.begin(config)`."""

    def __init__(self, process: subprocess.Popen[str], *, waits_for_plan: bool = True, serial: bool = False) -> None:
        """waits_for_plan: the engine waits for all kernels. serial: the serial plan is compiled already."""
        self._process = process
        self._waits_for_plan, self._serial = waits_for_plan, serial
        self._deadline = time.monotonic() + TIMEOUT_SECONDS
        self._outcomes: dict[int, str] = {}
        self._ended = False
        self._partial = b""  # Output after the last newline.

    @classmethod
    def preload(cls) -> None:
        """Start the process of the next job before its configuration is known, if the default cache has no stamp. The
        process imports what every job needs, which takes as long as compiling some kernels."""
        if has_gpu() and not any(cache_home().glob("kernels-*.json")):
            with contextlib.suppress(OSError):  # `begin` reports it
                _preloaded.append(_start_process())

    @classmethod
    def begin(cls, config: EngineConfig) -> CompileJob | None:
        """Start a job. Returns None without a GPU, or if everything is compiled."""
        use_cache(config)
        if config.device == "cpu" or config.model_impl == "transformers" or not has_gpu() or is_compiled(config):
            cls.unload()
            return None
        process = _preloaded.pop() if _preloaded else _start_process()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(config.model_dump_json() + "\n")
            process.stdin.flush()
        return cls(process, waits_for_plan=config.wait_for_plan, serial=is_compiled(config, SERIAL))

    @classmethod
    def unload(cls) -> None:
        """End the process that `preload` has started, because no job needs it."""
        while _preloaded:
            process = _preloaded.pop()
            process.kill()
            process.communicate()

    @classmethod
    def after_tuning(cls, job: CompileJob | None, config: EngineConfig) -> CompileJob | None:
        """Return the job for the kernels with newly tuned tiles: the running one if they are compiled, or a new one."""
        if job is not None and not job._waits_for_plan and is_compiled(config, SERIAL):
            return job
        if job is not None:
            job.stop()
        return cls.begin(config)

    def wait(self, progress: Progress | None = None) -> None:
        """Wait until the engine can start: the job has ended, successfully or not, or the serial plan is compiled and
        the engine does not wait for more. The first launch compiles missing kernels."""
        while not self._ended and (self._waits_for_plan or not self._serial):
            self._read(None, progress)

    def outcome(self, pipeline: int) -> str | None:
        """Return "" once all kernels of that pipeline of the plan are in the cache, why they will never be, or None if
        that is not known yet. Does not wait."""
        while not self._ended and pipeline not in self._outcomes and self._read(0.0):
            pass
        return self._outcomes.get(pipeline, "the compiling process has ended" if self._ended else None)

    def stop(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._ended = True

    def _read(self, seconds: float | None, progress: Progress | None = None) -> bool:
        """Read the job's output, waiting at most `seconds` (None: until its time limit). Returns whether any came."""
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
            self._handle_line(line.decode(), progress)
        return True

    def _handle_line(self, line: str, progress: Progress | None) -> None:
        what, _, rest = line.partition(" ")
        if what == SERIAL:
            self._serial = True
        elif what == PIPELINE:
            number, _, failed = rest.partition(" ")
            self._outcomes[int(number)] = f"{failed} did not compile" if failed else ""
        elif progress is not None and rest:
            progress(COMPILING, int(what), int(rest))


def _start_process() -> subprocess.Popen[str]:
    return subprocess.Popen(
        (sys.executable, "-P", "-m", "weft.engine.runner.start.compile_kernels"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # lets `stop` end its compilers too
    )


def has_gpu() -> bool:
    """Return whether the device file of an NVIDIA driver exists."""
    return Path("/dev/nvidiactl").exists()


def use_cache(config: EngineConfig) -> None:
    """Make this process and its children keep compiled kernels in the configuration's folder, unless
    `TRITON_CACHE_DIR` is set. A folder that cannot be written stops nothing."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(config.cache_path / "triton"))
    os.environ.setdefault("TRITON_CACHE_MANAGER", "weft.kernels.common.kernel_cache:KernelCache")


def gpus_here() -> set[str]:
    """Return the GPUs' names from the driver's files, which a container may hide."""
    found = set()
    for file in DRIVER.glob("*/information"):
        with contextlib.suppress(OSError):
            found |= {line.partition(":")[2].strip() for line in file.read_text().splitlines() if line[:6] == "Model:"}
    return found


def stamp_file(config: EngineConfig, part: str = "") -> Path:
    """Return the file that records this configuration's kernels. part: `SERIAL` for the serial plan only."""
    digest = hashlib.sha256(config.model_dump_json(include=KERNEL_OPTIONS).encode())
    for name in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(importlib.metadata.version(name).encode())
    files = [config.model_path / "config.json"]
    files += sorted(config.cache_path.glob("gemm-*.json"))  # tuned tiles
    if config.plan.endswith(".json"):
        files.append(expanded(config.plan))
    digest.update(_digest(files) + _sources())
    return config.cache_path / f"kernels-{digest.hexdigest()[:16]}{part and '-'}{part}.json"


@functools.cache
def _sources() -> bytes:
    """Return the digest of the code that determines the kernels, which takes tenths of a second to read."""
    files = (file for folder in SOURCES for file in folder.rglob("*") if file.suffix in (".py", ".json"))
    return _digest(sorted(files))


def _digest(files: Sequence[Path]) -> bytes:
    """Return a digest of the files' contents; one that cannot be read counts as empty."""
    digest = hashlib.sha256()
    for file in files:
        with contextlib.suppress(OSError):
            digest.update(file.read_bytes())
        digest.update(b"\0")
    return digest.digest()


def is_compiled(config: EngineConfig, part: str = "") -> bool:
    """Return whether the cache has all kernels of this configuration, or of this part of it."""
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
    """Record compiled kernels, if the folder is writable. gpu: its name. kernels: their folders in the cache."""
    part = file.with_suffix(f".{os.getpid()}.part")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"gpu": gpu, "kernels": kernels}))
        part.replace(file)
