"""`source_digest`: identifies the code of kernels, so that measurements made with other code are not trusted.

Comments, docstrings, formatting and import statements do not count. Callers list the modules they depend on.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).parent.parent
IGNORED_FIELDS = ("ctx", "kind", "type_comment")  # Fields of a syntax tree that do not change the code.


def _ignored(node: object) -> bool:
    """Return whether a statement changes no code: a docstring or an import (names count where they are used)."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _merged(values: list[ast.expr]) -> Iterator[ast.expr]:
    """Yield the values of an f-string with its text merged: Python 3.12.0 and 3.12.1 split it and add empty text."""
    for text, run in itertools.groupby(values, lambda value: isinstance(value, ast.Constant)):
        if not text:
            yield from run
        elif whole := "".join(ast.literal_eval(constant) for constant in run):
            yield ast.Constant(whole)


def _add_words(node: object, words: list[str]) -> None:
    """Append a syntax tree to `words`.

    Absent fields and empty lists are skipped because they depend on Python's version. So does the format of `ast.dump`.
    """
    if isinstance(node, list):
        for item in node:
            if not _ignored(item):
                _add_words(item, words)
    elif isinstance(node, ast.AST):
        words.append(f"({type(node).__name__}")
        kind: Any = type(node)
        for name in _fields(kind):
            value = [*_merged(node.values)] if isinstance(node, ast.JoinedStr) else getattr(node, name, None)
            if value is not None and value != []:
                words.append(f"{name}=")
                _add_words(value, words)
        words.append(")")
    else:
        words.append(ascii(node))  # `repr` depends on the version of Unicode


@functools.cache
def _fields(kind: Any) -> list[str]:
    """Return the fields of a node type that may change code."""
    return sorted(name for name in kind._fields if name not in IGNORED_FIELDS)


@functools.lru_cache(64)  # files that belong to several digests
def code_words(source: str) -> str:
    """Return a module's code as words that do not depend on comments, docstrings, formatting or Python's version."""
    words: list[str] = []
    _add_words(ast.parse(source), words)
    return " ".join(words)


@functools.cache
def source_digest(*sources: str) -> str:
    """Return 16 hexadecimal digits that identify the code of these modules, in the order given.

    sources: modules of `kernels` such as "matmul/gemm_hopper", or JSON tables such as "matmul/mid_h200.json". Raises
    `FileNotFoundError` for a name without a file.
    """
    digest = hashlib.sha256()
    for source in sources:
        if source.endswith(".json"):
            words = json.dumps(json.loads((KERNELS / source).read_text(encoding="utf-8")), sort_keys=True)
        else:
            words = code_words((KERNELS / f"{source}.py").read_text(encoding="utf-8"))
        digest.update(words.encode() + b"\0")
    return digest.hexdigest()[:16]
