"""`choose`: selects a GGUF file of a repository."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from weft.engine.errors import ModelError
from weft.engine.model.gguf.file import SPLIT

NAMED = 8
"""Number of files that an error lists."""


def models_in(files: Iterable[str]) -> dict[str, list[str]]:
    """Return files by their first part, without image projectors."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        name = PurePosixPath(file).name
        if not name.lower().endswith(".gguf") or name.lower().startswith("mmproj"):
            continue
        split = SPLIT.fullmatch(name)
        first = file if split is None else file.replace(f"-{split['part']}-of-", "-00001-of-")
        found.setdefault(first, []).append(file)
    return found


def choose(repository: str, files: Iterable[str], wanted: str = "") -> list[str]:
    """Return the parts of the file `wanted`: its name, or a word of it such as Q4_K_M; "": the only file.

    Raises `ModelError`, one line, with the available files.
    """
    models = models_in(files)
    if not models:
        raise ModelError(f"{repository} has no GGUF file")
    if wanted in models:
        return models[wanted]
    fitting = {
        first: parts
        for first, parts in models.items()
        if wanted.lower().removesuffix(".gguf") in PurePosixPath(first).name.lower()
    }
    if wanted and len(fitting) > 1:  # Q4_K also occurs in Q4_K_M
        ends = {f: p for f, p in fitting.items() if PurePosixPath(f).stem.lower().endswith(wanted.lower())}
        fitting = ends or fitting
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    among = list(fitting or models)
    names = ", ".join(among[:NAMED]) + (f" and {len(among) - NAMED} more" if len(among) > NAMED else "")
    which = f"no GGUF file that {wanted!r} names" if wanted and not fitting else f"{len(among)} GGUF files"
    raise ModelError(f"{repository} has {which}; there are {names}: give {repository}:FILE")
