"""BENCHMARKS.md is what benchmarks/page.py writes from complete results, and code changes mark results as outdated."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))
MOST_LINES = 400


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("page")


def test_the_page_is_generated_and_short(page: ModuleType) -> None:
    text = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    assert text == page.page(), "BENCHMARKS.md is out of date: run `make benchmarks`"
    assert len(text.splitlines()) <= MOST_LINES
    assert len(RESULTS) >= 20
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert len(set(headings)) == len(headings) == len(RESULTS)
    for title in headings:
        assert f"(#{page.anchor(title)})" in text


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_is_complete(path: Path, page: ModuleType) -> None:
    result = page.load()[path.stem]
    for field in ("title", "group", "summary", "hardware", "command"):
        assert isinstance(result[field], str), field
        assert result[field], field
    assert "python" in result["versions"]
    assert "torch" in result["versions"]
    assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", result["date"])
    assert result["sources"]
    for source, digest in result["sources"].items():
        assert (ROOT / source).exists(), source
        assert digest == page.CHANGED or re.fullmatch(r"[0-9a-f]{16}", digest), f"run page.py --stamp {path.stem}"
    assert result["rows"]
    for row in result["rows"]:
        assert len(row) == len(result["columns"]), row
        assert all(isinstance(value, str | int | float) for value in row)
        assert not any("|" in str(value) for value in row), "a cell breaks the table"
    for job in re.findall(r"benchmarks/jobs/[\w.-]+\.(?:sh|py)", result["command"]):
        assert (ROOT / job).exists(), job


def digests(page: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> str:
    """The digest of a source folder with these modules and nothing else."""
    monkeypatch.setattr(page, "ROOT", folder)
    page.file_digest.cache_clear()
    (folder / "code").mkdir(exist_ok=True)
    for old in (folder / "code").iterdir():
        old.unlink()
    for name, text in files.items():
        (folder / "code" / f"{name}.py").write_text(text)
    found: str = page.code_digest("code")
    return found


def test_a_digest_follows_code_and_ignores_prose_imports_and_names(
    page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(**files: str) -> str:
        return digests(page, tmp_path, monkeypatch, **files)

    base = digest(a='"""One."""\nimport os\n\n\ndef f(x):\n    return f"{x:>{3}}"\n', b="y = 1\n")
    same = digest(
        c="from sys import path\n# why\ndef f( x ):\n    'Two.'\n    return f'{x:>{3}}'\n", b="y = 1  # one\n"
    )
    assert base == same
    assert digest(a='def f(x):\n    return f"{x:>{4}}"\n', b="y = 1\n") != base
    assert digest(a='def f(x):\n    return f"{x:>{3}}"\n') != base


def test_changed_code_is_named_until_the_result_is_measured_again(
    page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result: dict[str, Any] = {
        "order": 1, "group": "g", "title": "T", "summary": "S.", "hardware": "h", "versions": {"python": "3"},
        "command": "c", "commit": "0" * 7, "date": "2026-01-01", "sources": {"code": "", "gone": "changed"},
        "columns": ["a"], "rows": [[1]], "notes": [],
    }  # fmt: skip
    (tmp_path / "gone").mkdir()
    digests(page, tmp_path, monkeypatch, a="x = 1\n")
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    page.save("one", result)
    page.stamp([])
    assert page.changed_sources(page.load()["one"]) == ["gone"]
    digests(page, tmp_path, monkeypatch, a="x = 2\n")
    assert page.changed_sources(page.load()["one"]) == ["code", "gone"]
    assert "**Measured before later changes to `code`, `gone`.**" in page.section("one", page.load()["one"])
    page.stamp(["one"])
    assert page.changed_sources(page.load()["one"]) == []
    assert page.load()["one"]["rows"] == result["rows"]
