"""`weft doctor` checks this machine and reports problems and fixes."""

from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from weft import __version__, install_hint
from weft.engine.errors import ConfigError, one_line
from weft.engine.wire.open_files import ENOUGH, HOW, needed
from weft.engine.wire.spawn import PrivateSocket
from weft.server.config import ServeConfig
from weft.server.options import load

GIB = 2**30
PYTHON = ((3, 11), (3, 14))
LITTLE_DISK = 20 * GIB
HUB_SECONDS = 4.0
MAX_PORT = 65535


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    state: Literal["ok", "warn", "bad"]
    what: str
    do: str = ""  # The fix, unless the state is ok.


def python(_: argparse.Namespace) -> Iterator[Finding]:
    here = sys.version_info[:2]
    what = f"{platform.python_version()} on {platform.system()} {platform.machine()}, weft {__version__}"
    if not PYTHON[0] <= here <= PYTHON[1]:
        spans = " to ".join(".".join(map(str, v)) for v in PYTHON)
        yield Finding("python", "bad" if here < PYTHON[0] else "warn", what, f"weft is tested with Python {spans}")
    elif sys.platform != "linux":
        yield Finding("python", "bad", what, "weft runs only on Linux")
    else:
        yield Finding("python", "ok", what)


def packages(_: argparse.Namespace) -> Iterator[Finding]:
    """Compare the installed packages with weft's requirements."""
    from packaging.requirements import Requirement

    wrong = []
    try:
        listed = requires("weft-serve") or []
    except PackageNotFoundError:
        yield Finding("packages", "ok", "weft runs from its source tree")
        return
    for requirement in map(Requirement, listed):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            there = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(there.partition("+")[0], prereleases=True):
            wrong.append(f"{requirement.name} is {there}, not {requirement.specifier}")
    if wrong:
        yield Finding("packages", "bad", "; ".join(wrong), "run pip install . -c constraints.txt in weft's source tree")
    else:
        yield Finding("packages", "ok", "all installed")


def processor(_: argparse.Namespace) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _memory_limit()
    within = f" ({limit / GIB:.1f} GiB for this container)" if limit and limit < memory else ""
    what = f"{cores} cores, {memory / GIB:.1f} GiB of memory{within}"
    if cores < 2:
        yield Finding("machine", "warn", what, "engine and HTTP server share one core: use at least two")
    elif min(memory, limit or memory) < 2 * GIB:
        yield Finding("machine", "warn", what, "the demo model needs 1 GiB, other models need more")
    else:
        yield Finding("machine", "ok", what)


def _memory_limit() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def gpu(_: argparse.Namespace) -> Iterator[Finding]:
    """Check torch's build, the driver, each GPU, and whether a kernel compiles and runs."""
    cards = _nvidia_smi()
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", "bad", f"cannot be imported: {one_line(error)}", "run pip install . -c constraints.txt")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    about_torch = f"{torch.__version__}, built for {build}"
    if cards and not torch.version.cuda:
        what, do = f"{about_torch}, but there is an NVIDIA GPU", "run make serve DEVICE=cuda, or pip install torch"
        yield Finding("torch", "bad", what, do)
        return
    yield Finding("torch", "ok", about_torch)
    if not cards and not torch.cuda.is_available():
        yield Finding("gpu", "ok", "none: models run on the CPU")
        return
    if cards and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "the driver is too old for torch's CUDA: update it"
        if visible is not None:
            hint = f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it; otherwise {hint}"
        yield Finding("gpu", "bad", f"{cards[0]}, but torch cannot use it", hint)
        return
    driver = cards[0].rpartition("driver ")[2] if cards else "unknown"
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        what = (
            f"{i}: {about.name}, compute capability {about.major}.{about.minor}, {about.multi_processor_count} SMs, "
            f"{free / GIB:.1f} of {total / GIB:.1f} GiB free, driver {driver}"
        )
        do = ""
        if about.major < 8:
            do = "bfloat16 kernels need compute capability 8.0 or higher; use --device cpu"
        elif about.major != 9:
            do = "uses portable kernels; weft is tuned for and tested on 9.0 (H100, H200)"
        elif free < 0.5 * total:
            do = "other processes use its memory: see nvidia-smi, or lower --gpu-memory-utilization"
        yield Finding("gpu", "bad" if about.major < 8 else "warn" if do else "ok", what, do)
    yield _kernel()


def _kernel() -> Finding:
    began = time.perf_counter()
    try:
        from weft.server.commands.gpu_probe import probe

        right = probe()
    except ModuleNotFoundError as error:
        return Finding("kernels", "bad", f"{error.name} is not installed", install_hint("gpu"))
    except Exception as error:  # compiler, driver and linker raise different types
        do = "install a C compiler (apt-get install gcc) and a matching driver"
        return Finding("kernels", "bad", f"Triton cannot compile or run a kernel: {one_line(error)}", do)
    if not right:
        return Finding("kernels", "bad", "a kernel computed a wrong result", "reset or replace the GPU; see dmesg")
    seconds = time.perf_counter() - began
    return Finding("kernels", "ok", f"Triton {version('triton')} compiled and ran a kernel ({seconds:.1f} s)")


def _nvidia_smi() -> list[str]:
    """Return name and driver of each card; empty without cards or driver."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in out.stdout.splitlines() if "," in line] if out.returncode == 0 else []
    return [", driver ".join(part.strip() for part in line.split(",", 1)) for line in lines]


def images(_: argparse.Namespace) -> Iterator[Finding]:
    """Check Pillow, and torchvision: one that does not fit torch breaks the import of every transformers model."""
    if find_spec("torchvision") is not None:
        command = (sys.executable, "-P", "-c", "import torchvision")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
            do = "uninstall torchvision, or install the version for this torch; weft does not need it"
            yield Finding("torchvision", "bad", f"cannot be imported: {why[:200]}", do)
    if find_spec("PIL") is None:
        yield Finding("images", "ok", f"Pillow is missing: models take text only ({install_hint('vision')})")
    else:
        yield Finding("images", "ok", f"Pillow {version('pillow')}")


def caches(_: argparse.Namespace) -> Iterator[Finding]:
    """Check the folders of compiled and tuned kernels."""
    try:
        config = load(ServeConfig, {}, None)
    except ConfigError as error:
        yield Finding("options", "bad", one_line(error), "change or unset the variable")
        return
    try:
        tuned = config.cache_path
    except ConfigError as error:
        yield Finding("tuned kernels", "bad", one_line(error), "set HOME or XDG_CACHE_HOME to a folder")
        return
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or tuned / "triton")
    folders = (("tuned kernels", tuned, "XDG_CACHE_HOME"), ("compiled kernels", triton, "TRITON_CACHE_DIR"))
    for name, path, variable in folders:
        if (why := _unwritable(path)) is None:
            yield Finding(name, "ok", str(path))
        else:
            do = f"they are rebuilt at every start: set {variable} to a writable folder"
            yield Finding(name, "warn", f"{path}: {why}", do)


def _unwritable(path: Path) -> str | None:
    """Return why a folder, which may not exist yet, is not writable; None if it is."""
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        return f"{path} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return error.strerror or str(error)


def temporary(_: argparse.Namespace) -> Iterator[Finding]:
    """Check the folder of sockets, and shared memory."""
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        yield Finding("sockets", "bad", one_line(error), "set TMPDIR to a writable folder")
    else:
        try:
            PrivateSocket().close()
            yield Finding("sockets", "ok", f"in {folder}")
        except ConfigError as error:
            yield Finding("sockets", "bad", one_line(error), "set TMPDIR to another folder")
    try:
        fd = os.memfd_create("weft-doctor")
        os.ftruncate(fd, 1 << 20)
        os.close(fd)
        for made in (os.eventfd(0), os.pidfd_open(os.getpid())):  # for --tensor-parallel-size
            os.close(made)
        yield Finding("shared memory", "ok", "anonymous files work")
    except OSError as error:
        do = "the container forbids memfd_create, eventfd or pidfd_open"
        yield Finding("shared memory", "bad", one_line(error), do)


def files(_: argparse.Namespace) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} at most"
    if hard != resource.RLIM_INFINITY and hard < ENOUGH:
        how = f"each connection needs one: raise the hard limit ({HOW})"
        yield Finding("open files", "bad" if hard < needed() else "warn", most, how)
    else:
        yield Finding("open files", "ok", f"{most}; currently {soft:,}, raised by the server")


def port(arguments: argparse.Namespace) -> Iterator[Finding]:
    where = f"{arguments.host}:{arguments.port}"
    if not 0 <= arguments.port <= MAX_PORT:  # the system would use the lower 16 bits
        yield Finding("port", "bad", f"{arguments.port} is not a port", f"give --port a number up to {MAX_PORT}")
        return
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            arguments.host, arguments.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            yield Finding("port", "warn", f"{where} is in use", "choose another --port, or stop the other server")
        else:
            yield Finding("port", "bad", f"{where}: {one_line(error)}", "choose another --host or --port")
    else:
        yield Finding("port", "ok", f"{where} is free")


def disk(_: argparse.Namespace) -> Iterator[Finding]:
    from weft.engine.model.download import cache_dir

    try:
        folder = cache_dir()
        problem = f"{folder}: {why}" if (why := _unwritable(folder)) is not None else ""
    except ConfigError as error:
        problem = one_line(error)
    if problem:
        yield Finding("disk", "warn", problem, "weft pull needs it: set HF_HOME to a folder")
        return
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    what = f"{free / GIB:.0f} GiB free for models in {folder}"
    if free < LITTLE_DISK:
        yield Finding("disk", "warn", what, "a model of 8 billion parameters takes 16 GB: set HF_HOME to a larger disk")
    else:
        yield Finding("disk", "ok", what)


def hub(_: argparse.Namespace) -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    token = "with a token" if get_token() else "without a token"
    where = constants.ENDPOINT
    later = "only needed to download models"
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", "warn", "HF_HUB_OFFLINE is set", later)
        return
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"{where}/api/models?limit=1", timeout=HUB_SECONDS):
            yield Finding("hub", "ok", f"{where}, {token}")
    except urllib.error.HTTPError as error:
        yield Finding("hub", "warn", f"{where} responds with status {error.code}", later)
    except (OSError, ValueError) as error:
        yield Finding("hub", "warn", f"{where} cannot be reached: {one_line(error)}", later)


CHECKS: tuple[Callable[[argparse.Namespace], Iterator[Finding]], ...] = (
    python, packages, processor, gpu, images, caches, temporary, files, port, disk, hub,
)  # fmt: skip


def check(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings of all checks. A check that fails is a finding, too."""
    for each in CHECKS:
        try:
            yield from each(arguments)
        except Exception as error:  # one failed check must not stop the others
            yield Finding(each.__name__, "warn", f"check failed: {one_line(error)}")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns 1 if anything is bad."""
    found = []
    if not arguments.json:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
    for finding in check(arguments):
        found.append(finding)
        if not arguments.json:
            style = {"ok": "green", "warn": "yellow", "bad": "bold red"}[finding.state]
            console.print(Text.assemble((f"{finding.state:<5}", style), f"{finding.name:<17}{finding.what}"))
            if finding.do:
                console.print(f"{'':<22}-> {finding.do}", markup=False)
    bad, warn = (sum(f.state == state for f in found) for state in ("bad", "warn"))
    if arguments.json:
        print(json.dumps({"ok": not bad, "findings": [f._asdict() for f in found]}, indent=2))
    else:
        print(f"{bad} bad, {warn} to check" if bad or warn else "no problems found")
    return 1 if bad else 0
