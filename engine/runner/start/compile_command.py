"""`weft compile`: fills a cache with the kernels that a model needs on a GPU, which need not be there.

For images and volumes: a daemon that finds them compiles nothing at its start.
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
    parser.add_argument(
        "--gpu", metavar="NAME", help=f"compile for this GPU, not for that of this machine: {', '.join(KNOWN)}"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="processes [one for each core]")


def _target(name: str | None) -> Gpu:
    if name is None:
        if (here := gpu()) is None:
            raise ConfigError(f"there is no GPU here: name the one to compile for, --gpu {'|'.join(KNOWN)}")
        return here
    if name.lower() not in KNOWN:
        raise ConfigError(f"--gpu {name} is not known; there are {', '.join(KNOWN)}")
    return KNOWN[name.lower()]


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Returns the exit status. Raises `ConfigError`, and `WeftError` for a model that cannot be served there."""
    target = _target(arguments.gpu)
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ConfigError("--jobs must be 1 or more")
    try:
        from weft.engine.runner.start.compile_kernels import compile_kernels
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError(f"kernels are compiled with Triton: {install_hint('gpu')}") from None
    begin = time.monotonic()
    with ProgressBar() as bar:
        total, failed = compile_kernels(
            config, target, arguments.jobs or cores(), lambda done, total: bar(COMPILING, done, total)
        )
    if failed:
        raise WeftError(f"{len(failed)} of {total} kernels do not compile: {', '.join(k.name for k in failed[:4])}")
    print(f"{total} kernels for {target.name} lie in {config.cache_path}, after {time.monotonic() - begin:.0f} s")
    return 0
