"""`source_digest`: what identifies the code of kernels, so that what was measured with other code is not trusted."""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
UNSEEN = ("ctx", "kind", "type_comment")
"""fields of a syntax tree that change no code"""


def _remark(node: object) -> bool:
    """A statement that is a string: a docstring of a module, class, function or attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _add_words(node: object, words: list[str]) -> None:
    """A syntax tree in words, added to `words`.

    Absent fields and empty lists are left out: which there are depends on Python's version.
    `ast.dump` would not do, because its form differs from version to version as well.
    """
    if isinstance(node, list):
        for item in node:
            if not _remark(item):
                _add_words(item, words)
    elif isinstance(node, ast.AST):
        words.append(f"({type(node).__name__}")
        kind: Any = type(node)
        for name in _fields(kind):
            value = getattr(node, name, None)
            if value is not None and value != []:
                words.append(f"{name}=")
                _add_words(value, words)
        words.append(")")
    else:
        words.append(repr(node))


@functools.cache
def _fields(kind: Any) -> list[str]:
    """Of a type of node: what may change code."""
    return sorted(name for name in kind._fields if name not in UNSEEN)


@functools.lru_cache(64)  # files that belong to several digests
def code_words(source: str) -> str:
    """A module's code in words that comments, docstrings and formatting do not change, nor Python's version."""
    words: list[str] = []
    _add_words(ast.parse(source), words)
    return " ".join(words)


@functools.cache
def source_digest(*patterns: str) -> str:
    """Of the code of this folder's files that match a pattern, in the order of their names: 16 hexadecimal digits."""
    files = sorted({file for pattern in patterns for file in HERE.glob(pattern)})
    digest = hashlib.sha256()
    for file in files:
        digest.update(code_words(file.read_text(encoding="utf-8")).encode() + b"\0")
    return digest.hexdigest()[:16]
