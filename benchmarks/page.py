"""Writes BENCHMARKS.md from benchmarks/results/*.json.

    python benchmarks/page.py              # write the page: `make benchmarks`
    python benchmarks/page.py --stamp      # code was moved or renamed without other changes: refresh all digests
    python benchmarks/page.py --stamp NAME # NAME.json was measured with the code as it is now

Each file is one table. `sources` maps the folders and files that a result depends on to a digest of their code when the
result was stamped. If the digest differs, the page says that the result was measured before later changes to that
source. The digest "changed" records this for good. Digests ignore comments, docstrings, imports and file names.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "BENCHMARKS.md"
CHANGED = "changed"
DEFAULT_VERSIONS = "python 3.12, torch 2.11.0+cu130, triton 3.6.0"
IGNORED_FIELDS = ("ctx", "kind", "type_comment")
"""Fields of syntax trees that do not affect code."""
HEAD = "# Benchmarks\n\n<!-- Written by benchmarks/page.py (`make benchmarks`) from benchmarks/results. -->"
INTRODUCTION = f"""
Throughput counts input and output tokens unless a column says otherwise. Weights are random unless a model is named as
published or trained. Versions are {DEFAULT_VERSIONS} unless a table says otherwise. H200 cards and hosts differ by up
to 10 %, so compare only within a table. A table says if its code has changed since it was measured. Earlier
measurements are in the history of this file and in the [decision records](docs/decisions/README.md). The
[benchmark jobs](benchmarks/jobs/README.md) measure most tables again.
"""


def load() -> dict[str, dict[str, Any]]:
    """All results by name, in the page's order."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
    return dict(sorted(results.items(), key=lambda item: (item[1]["order"], item[0])))


def save(name: str, result: dict[str, Any]) -> None:
    """Writes a result with one table row a line."""
    rows = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in result["rows"])
    text = json.dumps({**result, "rows": []}, indent=2, ensure_ascii=False)
    text = text.replace('"rows": []', f'"rows": [\n{rows}\n  ]')
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def code_digest(source: str) -> str:
    """Digest of the code of a file, or of all Python files below a folder, given from the repository root."""
    path = ROOT / source
    files = [path] if path.is_file() else path.rglob("*.py")
    digests = sorted(file_digest(file) for file in files)
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


@functools.cache
def file_digest(path: Path) -> str:
    """Digest of a module's syntax tree, the same for every supported version of Python."""
    words: list[str] = []
    add_words(ast.parse(path.read_text(encoding="utf-8")), words)
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


def add_words(node: object, words: list[str]) -> None:
    """Appends a syntax tree in words. Empty fields are left out, because their set depends on Python's version."""
    if isinstance(node, list):
        for item in node:
            if not is_prose_or_import(item):
                add_words(item, words)
    elif isinstance(node, ast.AST):
        words.append(f"({type(node).__name__}")
        for name in sorted(set(node._fields) - set(IGNORED_FIELDS)):
            value = getattr(node, name, None)
            if isinstance(node, ast.JoinedStr):  # Python 3.12.0 and 3.12.1 add empty strings
                value = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
            if value is not None and value != []:
                words.append(f"{name}=")
                add_words(value, words)
        words.append(")")
    else:
        words.append(repr(node))


def is_prose_or_import(node: object) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def changed_sources(result: dict[str, Any]) -> list[str]:
    """Sources whose code differs from the code that was measured."""
    sources = result["sources"].items()
    return [source for source, digest in sources if digest == CHANGED or digest != code_digest(source)]


def stamp(names: list[str]) -> None:
    """Refreshes digests: all but those that are recorded as changed, or every digest of the named results."""
    for name, result in load().items():
        if names and name not in names:
            continue
        result["sources"] = {
            source: digest if digest == CHANGED and not names else code_digest(source)
            for source, digest in result["sources"].items()
        }
        save(name, result)


def anchor(title: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def contents(results: dict[str, dict[str, Any]]) -> str:
    """Links to all sections, one line a group."""
    groups: dict[str, list[str]] = {}
    for result in results.values():
        groups.setdefault(result["group"], []).append(f"[{result['title']}](#{anchor(result['title'])})")
    return "\n".join(f"- {group}: {', '.join(links)}" for group, links in groups.items())


def cell(value: str | float) -> str:
    return str(value) if isinstance(value, str) else f"{value:,}"


def section(name: str, result: dict[str, Any]) -> str:
    """One result: heading, summary, table, notes, and the circumstances of the measurement."""
    columns = result["columns"]
    table = [columns, ["---"] * len(columns), *result["rows"]]
    notes = [" ".join(result["notes"])] if result["notes"] else []
    versions = ", ".join(f"{tool} {version}" for tool, version in result["versions"].items())
    circumstances = [result["hardware"], *([versions] if versions != DEFAULT_VERSIONS else [])]
    facts = f"{result['date']}, commit {result['commit']}, {'; '.join(circumstances)}. "
    if sources := changed_sources(result):
        facts += f"**Measured before later changes to {', '.join(f'`{source}`' for source in sources)}.** "
    facts += f"[Data](benchmarks/results/{name}.json). `{result['command']}`"
    rows = (f"| {' | '.join(map(cell, row))} |" for row in table)
    lines = "\n".join(rows), "\n".join(f"- {line}" for line in [*notes, facts])
    return "\n\n".join([f"## {result['title']}", result["summary"], *lines])


def page() -> str:
    results = load()
    parts = [HEAD, " ".join(INTRODUCTION.split()), contents(results), *itertools.starmap(section, results.items())]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="write BENCHMARKS.md from benchmarks/results")
    parser.add_argument("--stamp", nargs="*", metavar="NAME", help="record the current code for results that "
                        "were just measured, or for all results after a pure move or rename")  # fmt: skip
    given = parser.parse_args()
    if given.stamp is not None:
        if unknown := set(given.stamp) - set(load()):
            parser.error(f"no such result: {', '.join(sorted(unknown))}; choose from {', '.join(load())}")
        stamp(given.stamp)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
