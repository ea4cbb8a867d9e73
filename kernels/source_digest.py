"""`source_digest`: what identifies the code of kernels, so that what was measured with other code is not trusted."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
UNSEEN = ("ctx", "kind", "type_comment")
"""fields of a syntax tree that change no code"""


def _remark(node: object) -> bool:
    """A statement that is a string: a docstring of a module, class, function or attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _words(node: object) -> Iterator[str]:
    """A syntax tree in words. Absent fields and empty lists are left out: which there are depends on Python's version.

    `ast.dump` would not do, because its form differs from version to version as well.
    """
    if isinstance(node, list):
        for item in node:
            if not _remark(item):
                yield from _words(item)
    elif isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in sorted(ast.iter_fields(node), key=lambda field: field[0]):
            if name not in UNSEEN and value is not None and value != []:
                yield f"{name}="
                yield from _words(value)
        yield ")"
    else:
        yield repr(node)


def code_words(source: str) -> str:
    """A module's code in words that comments, docstrings and formatting do not change, nor Python's version."""
    return " ".join(_words(ast.parse(source)))


@functools.cache
def source_digest(*patterns: str) -> str:
    """Of the code of this folder's files that match a pattern, in the order of their names: 16 hexadecimal digits."""
    files = sorted({file for pattern in patterns for file in HERE.glob(pattern)})
    digest = hashlib.sha256()
    for file in files:
        digest.update(code_words(file.read_text(encoding="utf-8")).encode() + b"\0")
    return digest.hexdigest()[:16]
