"""weft: an OpenAI-compatible serving daemon for large language models.

The repository root is this package; `weft.engine`, `weft.kernels`, `weft.server` are the folders beside this file.
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
    """The pip command that brings what the extra `extra` of pyproject.toml lists, for error messages.

    Where the source lies it names the checkout; else the packages themselves, because weft is on no index.
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


def output_file(text: str, *, beside: bool = False) -> Path:
    """A file that a command is to write, as the `type` of its flag: looked at before the work whose result it gets.

    beside: another file is written in its folder first, and takes its place. Raises `argparse.ArgumentTypeError`.
    """
    file = Path(text)
    folder = file.absolute().parent
    try:
        there, is_folder = file.exists(), file.is_dir()
    except OSError as error:  # a folder that this user may not look into, a name that is too long
        raise argparse.ArgumentTypeError(unwritable(file, error)) from None
    if not folder.is_dir():
        why = f"there is no folder {file.parent}"
    elif is_folder:
        why = "it is a folder"
    elif there and not os.access(file, os.W_OK):
        why = "this user may not"
    elif (not there or (beside and file.is_file())) and not os.access(folder, os.W_OK):
        why = f"this user may not write in the folder {folder}"
    else:
        return file
    raise argparse.ArgumentTypeError(f"cannot write {file}: {why}")


def unwritable(file: str | Path, error: OSError) -> str:
    """A line about what went wrong while the file was written, a full disk, say. The error itself may name none."""
    return f"cannot write {file}: {error.strerror or error}"


def __getattr__(name: str) -> Any:
    # Lazy, so that `weft --help` and the API process do not import torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
