"""Chooses the build of torch: CUDA on a machine with an NVIDIA GPU, else CPU.

The registry's default build for Linux includes CUDA: gigabytes that a machine without a GPU never uses. PyTorch's CPU
builds are on a separate index, which some networks block; one short request finds out. This file needs only the
standard library, because it runs before anything is installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

CPU_INDEX = ["--index-url", "https://download.pytorch.org/whl/cpu"]
PROBE_SECONDS = 3.0
# torch 2.13.0 for Python 3.11 on x86-64 with its CUDA 13 libraries and Triton: sums over the wheels.
CUDA_SIZES = "about 2.7 GB to download, 4.7 GB on disk"


class Build(NamedTuple):
    why: str
    """One line for the user: which build, why, and its size."""
    pip: list[str]
    """Arguments of `pip install`."""


class Wheel(NamedTuple):
    version: str
    path: Path

    @property
    def name(self) -> str:
        return f"{self.path.name}, {self.path.stat().st_size / 1e6:.0f} MB"


def choose(version: str, device: str, cpu_index: list[str]) -> Build | None:
    """The build of torch `version` for `device` (auto, cpu or cuda). None if it is installed already."""
    gpu = has_nvidia_gpu() if device == "auto" else device == "cuda"
    have = installed()
    if have.partition("+")[0] == version and not (gpu and is_cpu_build(have)):
        return None
    local = local_wheel(version)
    if gpu:
        # Otherwise a CPU build in a local folder would win: its version is higher.
        wanted = f"torch=={version},!={version}+cpu"
        if local and not is_cpu_build(local.version):
            return Build(f"an NVIDIA GPU: the local wheel {local.name}", [wanted])
        return Build(f"an NVIDIA GPU: the build with CUDA, {CUDA_SIZES}", [wanted])
    reason = "no NVIDIA GPU" if device == "auto" else "no GPU wanted"
    if answers(cpu_index[1] + "/torch/"):
        return Build(f"{reason}: the CPU build, about 0.2 GB", ["--no-deps", *cpu_index, f"torch=={version}"])
    reason = f"{reason}, and {cpu_index[1]} does not answer"
    if local:
        return Build(f"{reason}: the local wheel {local.name}", ["--no-deps", "--no-index", f"torch=={version}"])
    return Build(f"{reason}: the registry's default build, with CUDA {CUDA_SIZES}", [f"torch=={version}"])


def is_cpu_build(version: str) -> bool:
    return version.partition("+")[2] == "cpu"


def installed() -> str:
    """The version of torch in this environment; empty if none is installed."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def has_nvidia_gpu() -> bool:
    if Path("/dev/nvidia0").exists():
        return True
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def answers(url: str, seconds: float = PROBE_SECONDS) -> bool:
    """Whether `url` returns a page within `seconds`, including name resolution. Tries once."""
    found = []

    def ask() -> None:
        # Use pip's certificates if it has others: a proxy may sign with its own.
        bundle = os.environ.get("PIP_CERT") or os.environ.get("REQUESTS_CA_BUNDLE")
        try:
            context = ssl.create_default_context(cafile=bundle)
            with urllib.request.urlopen(url, timeout=seconds, context=context) as answer:
                found.append(answer.status == 200)
        except (OSError, ValueError):
            found.append(False)

    # A separate thread, because name resolution ignores socket timeouts.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return found == [True]


def local_wheel(version: str) -> Wheel | None:
    """The wheel that pip would use for this version from its configured folders, without any index."""
    dry = ["--dry-run", "--no-index", "--no-deps", "--ignore-installed", "--quiet", "--report", "-"]
    asked = subprocess.run([*PIP, *dry, f"torch=={version}"], capture_output=True, text=True)
    if asked.returncode != 0:
        return None
    (found,) = json.loads(asked.stdout)["install"]
    return Wheel(found["metadata"]["version"], Path(unquote(urlsplit(found["download_info"]["url"]).path)))


PIP = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]


def pinned(constraints: str) -> str:
    """The version of torch in a constraints file. Raises `ValueError` if there is none."""
    found = re.search(r"^torch==([\w.]+)$", constraints, re.MULTILINE)
    if found is None:
        raise ValueError("the constraints name no version of torch: a line torch==X.Y.Z")
    return found[1]


def install(constraints: Path, device: str, arguments: list[str]) -> int:
    """Install the pinned torch for `device` and `arguments`, with pip's progress. Returns the exit status."""
    version = pinned(constraints.read_text())
    build = choose(version, device, CPU_INDEX)
    if build is None:
        print(f"torch {installed()} is installed", flush=True)
        return 0
    print(f"torch {version}: {build.why}", flush=True)
    return subprocess.run([*PIP, "-c", str(constraints), *arguments, *build.pip]).returncode
