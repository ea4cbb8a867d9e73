"""weft: a fast LLM server with OpenAI and Anthropic APIs.

The repository root is this package; its folders are the subpackages (`weft.engine`, `weft.kernels`, `weft.server`, …).
Offline use::

    from weft import LLM, SamplingParams
    print(LLM("demo").chat([{"role": "user", "content": "What is 12 + 30?"}])[0].text)
"""

from __future__ import annotations

import argparse
import os
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from weft.engine.llm import LLM, Completion
    from weft.engine.wire.sampling import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams", "__version__", "install_hint"]

_HOMES = {"LLM": "weft.engine.llm", "Completion": "weft.engine.llm", "SamplingParams": "weft.engine.wire.sampling"}


def install_hint(extra: str) -> str:
    """Return the pip command that installs an extra of pyproject.toml, for error messages.

    In a checkout it names the extra. Otherwise it lists the packages, because weft is not on a package index.
    """
    if (Path(__file__).parent / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]'"
    from importlib.metadata import PackageNotFoundError, requires

    try:
        listed = requires("weft-serve") or []
    except PackageNotFoundError:
        listed = []
    needed = [line.partition(";")[0].strip() for line in listed if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    if not needed:
        return f"install weft's extra {extra}"
    return "pip install " + " ".join(f"'{requirement}'" for requirement in needed)


def output_file(text: str, *, via_rename: bool = False) -> Path:
    """Check that an output file can be written, before the command starts its work. Used as the `type` of an option.

    via_rename: the command writes another file in the same folder and renames it. Raises `argparse.ArgumentTypeError`.
    """
    file = Path(text)
    folder = file.absolute().parent
    try:
        there, is_folder = file.exists(), file.is_dir()
    except OSError as error:  # the folder is not readable, or the name is too long
        raise argparse.ArgumentTypeError(unwritable(file, error)) from None
    if not folder.is_dir():
        why = f"there is no folder {file.parent}"
    elif is_folder:
        why = "it is a folder"
    elif there and not os.access(file, os.W_OK):
        why = "permission denied"
    elif (not there or (via_rename and file.is_file())) and not os.access(folder, os.W_OK):
        why = f"no permission to write in the folder {folder}"
    else:
        return file
    raise argparse.ArgumentTypeError(f"cannot write {file}: {why}")


def unwritable(file: str | Path, error: OSError) -> str:
    """Return an error message for a failed write, such as a full disk. `error` itself may lack the file name."""
    return f"cannot write {file}: {error.strerror or error}"


def __getattr__(name: str) -> Any:
    # Imports are lazy so that `weft --help` and the API process do not import torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
