"""Keeps the worst English out: phrases that read as if translated, and private words for what the field has names for.

A test can only catch words. docs/design.md has the glossary; CONTRIBUTING.md says how text should read.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft

ROOT = Path(weft.__file__).parent
PACKAGES = ("kernels", "engine", "autosearch", "server", "deploy", "loadgen", "tools", "examples", "tests")

BANNED = {
    r"\bwho(ever|mever)\b": "name the person or thing",
    r"\bwhatever\b": "any, whatever is rarely needed",
    r"\bwho (comes?|came|waits?|asks?|reads?|goes|went|runs?|edits?)\b": "a request that arrives, a client that reads",
    r"\bwhat (waits|lacks|is lent|one lacks)\b": "name the thing",
    r"\bone behind the other\b": "one after another, in sequence",
    r"\bby turns\b": "alternating",
    r"\bin company\b": "in a batch",
    r"\bof late\b": "recently",
    r"\btold\b": "logged, reported, notified, passed",
    r"\btells\b": "reports, logs, says",
    r"\bbeside\b": "next to, alongside, compared with, besides",
    r"\bbehind (it|them|its|their|each other|the (first|last|one|kernel|product|norm|other))\b": "after",
    r"\b(is|are) owed\b": "is missing, has not been measured",
    r"\btaken by itself\b": "used automatically",
    r"\bsuch as (took|take|are|is|have|has|came|come|need|were)\b": "those that",
    r"\bhas not,": "does not support",
    r"\bhave need of\b": "need",
    r"(?:^|[.!?]\s)Of (?!course)[a-z]": "do not start a sentence with Of",
    r"(?:^|[.!?]\s)Whose\b": "do not start a sentence with Whose",
    r"\b(doze|dozes|rouse|rouses|dormitory|rota|watchman)\b": "sleep, wake, watchdog",
    r"\bseats?\b": "slot",
    r"\btwins?\b": "reference, reference implementation",
    r"\bstands? apart\b": "is separate, is not fused",
    r"\bgive(s)? the lie\b": "contradicts",
    r"\bso many\b(?! (that|different))": "a number, up to N",
    r"\bnothing of ours\b": "no other package of weft",
    r"\bmay not go\b": "must not",
    r"\blet go of\b": "release",
}
"""Pattern and what to write instead."""


def texts_of(file: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of every docstring and comment of a Python file; in tests, also function and class names."""
    source = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ROOT / "tests" in file.parents:
            yield node.lineno, node.name.replace("_", " ")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def prose_of(file: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of every paragraph of a Markdown page, without its code."""
    text = re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), file.read_text(encoding="utf-8"), flags=re.S)
    text = re.sub(r"`[^`\n]*`", "`x`", text)
    line = 1
    for paragraph in re.split(r"\n\n+", text):
        yield line, paragraph
        line += paragraph.count("\n") + 2


def violations(text: str) -> list[str]:
    """Each banned phrase of a text with its surroundings and what to write instead."""
    flat = " ".join(re.sub(r"`[^`]*`", "x", text).split())
    found = []
    for pattern, instead in BANNED.items():
        if match := re.search(pattern, flat, 0 if pattern.startswith("(?:") else re.I):
            found.append(f"…{flat[max(0, match.start() - 30) : match.end() + 30]}… ({instead})")
    return found


def offences(file: Path) -> list[str]:
    texts = (texts_of if file.suffix == ".py" else prose_of)(file)
    return [f"{file.relative_to(ROOT)}:{line}: {found}" for line, text in texts for found in violations(text)]


def pages() -> list[Path]:
    folders = [ROOT / "docs", ROOT / "deploy", ROOT / "benchmarks", ROOT / "tools", ROOT / ".github", ROOT / "engine"]
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))])


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_comments_and_names_are_plain_english(package: str) -> None:
    found = [line for file in sorted((ROOT / package).rglob("*.py")) for line in offences(file)]
    assert not found, "\n" + "\n".join(found)


def test_pages_are_plain_english() -> None:
    found = [line for page in pages() for line in offences(page)]
    assert not found, "\n" + "\n".join(found)


def test_banned_phrases_are_found() -> None:
    assert ROOT / "docs" / "design.md" in pages()
    for text in (
        "Whoever reads it",
        "clients are told of it",
        "300 tokens/s behind its first",
        "the other one. Of these",
    ):
        assert violations(text), text
    assert not violations("The engine logs 300 tokens/s after the first token, compared with 200 before.")
