"""`CompileJob`: a process beside a starting engine that compiles the kernels it will need. Costs no import of torch.

What has been compiled is written down beside the tuned tables, so that a start with everything in the cache starts no
such process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from weft.engine.config import EngineConfig
from weft.engine.progress import Progress

COMPILING = "compiling kernels"
PATIENCE_SECONDS = 600
"""for all of them; then the engine goes on and compiles what it lacks itself"""
HERE = Path(__file__).parent
SOURCES = (HERE, HERE.parent / "plans", HERE.parent / "model", HERE.parents[1] / "kernels")
"""whose code decides which kernels there are"""
MATTERS = {
    "device", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "attention_backend",
    "batch_invariant", "tuning_seconds", "plan", "model_impl", "trust_remote_code",
}  # fmt: skip
"""options that decide it too"""
DRIVER = Path("/proc/driver/nvidia/gpus")


class CompileJob:
    """A running job. Create with `CompileJob.begin(config)`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    def begin(cls, config: EngineConfig) -> CompileJob | None:
        """None where there is nothing to compile for, or nothing left to compile."""
        use_cache(config)
        if config.device == "cpu" or config.model_impl == "transformers" or not has_gpu() or is_compiled(config):
            return None
        process = subprocess.Popen(
            (sys.executable, "-P", "-m", "weft.engine.runner.compile_kernels"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its compilers end with it
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(config.model_dump_json() + "\n")
            process.stdin.flush()
        return cls(process)

    def wait(self, progress: Progress | None = None) -> None:
        """Until it has ended, however that was: what it has not compiled the first launch does."""
        assert self._process.stdout is not None
        impatience = threading.Timer(PATIENCE_SECONDS, self._kill)
        impatience.start()
        try:
            for line in self._process.stdout:
                done, _, total = line.partition(" ")
                if progress is not None and total:
                    progress(COMPILING, int(done), int(total))
        finally:
            impatience.cancel()
        self._process.wait()

    def stop(self) -> None:
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def cores() -> int:
    """that this process may use"""
    return len(os.sched_getaffinity(0))


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


def stamp_file(config: EngineConfig) -> Path:
    """Where it is written down which kernels this configuration needs: another one, another file."""
    digest = hashlib.sha256(config.model_dump_json(include=MATTERS).encode())
    for name in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(importlib.metadata.version(name).encode())
    files = [config.model_path / "config.json"]
    files += sorted(config.cache_path.glob("gemm-*.json"))  # tiles that were tuned
    if config.plan.endswith(".json"):
        files.append(Path(config.plan).expanduser())
    for folder in SOURCES:
        files += sorted(file for file in folder.rglob("*") if file.suffix in (".py", ".json"))
    for file in files:
        with contextlib.suppress(OSError):
            digest.update(file.read_bytes())
        digest.update(b"\0")
    return config.cache_path / f"kernels-{digest.hexdigest()[:16]}.json"


def is_compiled(config: EngineConfig) -> bool:
    """Whether all that was compiled for this configuration is still in the cache."""
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    try:
        stamp = json.loads(stamp_file(config).read_text())
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
