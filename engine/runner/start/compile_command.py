"""`weft compile`: fills a cache with a model's GPU kernels, on any machine.

Use it for images and volumes: a daemon with a complete cache compiles nothing at its start.
"""

from __future__ import annotations

import argparse
import time

from weft import install_hint
from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, WeftError
from weft.engine.progress import ProgressBar
from weft.engine.runner.device.compile_job import COMPILING
from weft.engine.wire.cores import cores
from weft.kernels.common.gpu import KNOWN, Gpu, gpu


def add_compile_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help=f"GPU to compile for: {', '.join(KNOWN)} [this machine's GPU]")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes [one per core]")


def _target(name: str | None) -> Gpu:
    if name is None:
        if (here := gpu()) is None:
            raise ConfigError(f"this machine has no GPU: choose one to compile for with --gpu {'|'.join(KNOWN)}")
        return here
    if name.lower() not in KNOWN:
        raise ConfigError(f"--gpu {name} is unknown; choose one of {', '.join(KNOWN)}")
    return KNOWN[name.lower()]


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Run the command and return 0. Raises `ConfigError`, or `WeftError` if the model cannot be served on that GPU."""
    target = _target(arguments.gpu)
    if arguments.jobs is not None and not 1 <= arguments.jobs <= 1024:
        raise ConfigError("--jobs must be 1 or more, and at most 1024")
    try:
        from weft.engine.runner.start.compile_kernels import compile_kernels
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError(f"compiling kernels needs Triton: {install_hint('gpu')}") from None
    begin = time.monotonic()
    with ProgressBar() as bar:
        total, failed = compile_kernels(
            config, target, arguments.jobs or cores(), lambda done, total: bar(COMPILING, done, total)
        )
    if failed:
        raise WeftError(f"{len(failed)} of {total} kernels did not compile: {', '.join(k.name for k in failed[:4])}")
    print(f"{total} kernels for {target.name} are in {config.cache_path}, after {time.monotonic() - begin:.0f} s")
    return 0
