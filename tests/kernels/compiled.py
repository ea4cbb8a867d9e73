"""Kernels that a script collects, compiled for Hopper in a separate process, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMPILE = """
from weft.kernels.common.compilation import collect
from weft.kernels.common.gpu import KNOWN

for number, kernel in enumerate(collect(work, KNOWN["h200"])):
    compiled = kernel.function._do_compile(*kernel.arguments)
    assert compiled.metadata.shared <= 232448, kernel.name
    with open(f"{kernel.name}-{number}.ptx", "w") as file:
        file.write(compiled.asm["ptx"])
"""


def compiled(script: str, folder: Path) -> dict[str, str]:
    """The PTX of all kernels that the script's `work()` launches, by name and number. Each fits an SM."""
    ended = subprocess.run(
        (sys.executable, "-P", "-c", script + COMPILE),
        env=os.environ | {"TRITON_CACHE_DIR": str(folder / "cache")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return {file.stem: file.read_text() for file in folder.glob("*.ptx")}
