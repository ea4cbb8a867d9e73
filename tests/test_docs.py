"""Documents name what exists: files, links, `make` targets, options of `weft`, metrics, decisions, one version.

Each test also bounds how much it must have found, so that a change of format cannot empty it.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import weft
from weft.server.daemon.cli import all_commands, main

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob(".github/**/*.md"),
        *ROOT.glob(".github/**/*.yml"),
        ROOT / "deploy/README.md",
        ROOT / "benchmarks/jobs/README.md",
        ROOT / "engine/demo/model/README.md",
    ]
)
FOLDERS = (
    "autosearch", "benchmarks", "deploy", "docs", "engine", "examples", "kernels", "loadgen", "server", "tests",
    "tools", ".github",
)  # fmt: skip
ENDINGS = "py|md|json|toml|yml|yaml|txt|svg|png|gz|js|css|html|sh"
NOT_OURS = {
    "model.safetensors",
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "modules.json",
    "special_tokens_map.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
}
"""names of files that a user has"""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def files() -> frozenset[str]:
    """Paths of the files of every folder, from the root."""
    found = (p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file())
    return frozenset(name_of(p) for p in (*found, *(p for p in ROOT.iterdir() if p.is_file())))


@cache
def basenames() -> frozenset[str]:
    return frozenset(Path(path).name for path in files())


def code_of(text: str) -> str:
    """The content of fenced blocks and backticks, one piece per line."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return "\n".join([*blocks, *inline])


def test_every_file_that_is_named_exists() -> None:
    wrong, found = [], 0
    for document in (*DOCUMENTS, *(ROOT / "examples").iterdir()):
        text = re.sub(r"https?://\S+", "", text_of(document))
        # Paths that start with a folder of the root may stand anywhere in the text. Bare file names count in backticks
        # and may be anywhere in the tree.
        for path in re.findall(rf"(?<![\w/.$~-])((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]+)", text):
            found += 1
            # NAME.json stands for any file of that folder.
            looked_for = Path(path).parent if Path(path).stem.isupper() else Path(path.rstrip("./"))
            if not (ROOT / looked_for).exists() and not (document.parent / looked_for).exists():
                wrong.append(f"{name_of(document)}: {path}")
        for name in re.findall(rf"`([\w.-]+\.(?:{ENDINGS}))`", text):
            found += 1
            if name not in basenames() | NOT_OURS and not (document.parent / name).exists():
                wrong.append(f"{name_of(document)}: {name}")
    assert not wrong
    assert found > 200


def test_every_relative_link_leads_somewhere() -> None:
    wrong, found = [], 0
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)\s]+)\)", text_of(document)):
            if re.match(r"[a-z]+:", link):
                continue
            found += 1
            path, _, anchor = link.partition("#")
            target = (document.parent / path).resolve() if path else document
            exists = target.exists() and target.is_relative_to(ROOT)
            if not exists or (anchor and anchor not in anchors(target)):
                wrong.append(f"{name_of(document)}: {link}")
    assert not wrong
    assert found > 100


@cache
def anchors(document: Path) -> frozenset[str]:
    """The anchor of a heading: lower case, words joined by dashes, everything else dropped."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text_of(document), flags=re.M | re.S), re.M)
    return frozenset(re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings)


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):(?!=)", text_of(ROOT / "Makefile"), re.MULTILINE))
    assert {"test", "serve"} <= targets
    named = [(d, t) for d in DOCUMENTS for t in re.findall(r"\bmake ([a-z]+)\b", code_of(text_of(d)))]
    assert len(named) > 10
    assert not [f"{name_of(d)}: make {t}" for d, t in named if t not in targets]


def commands() -> Iterator[tuple[Path, list[str]]]:
    """(document, words) of every `weft …` in code: without comments, and up to a pipe or the end of the command."""
    for document in DOCUMENTS:
        code = re.sub(r"\\\n\s*", " ", code_of(text_of(document)))
        for line in re.findall(r"(?:^|[/\s;])weft (?!import )([a-z]+\b[^\n;|&]*)", code, re.MULTILINE):
            yield document, shlex.split(re.sub(r"\s#.*|\s{2,}\(.*|[\[\]…]", " ", line))


@cache
def help_of(command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help-all" if command == "serve" else "--help"])
    assert not ended.value.code, f"weft {command} --help"
    return out.getvalue()


def test_every_subcommand_and_option_exists() -> None:
    names, wrong, flags = {c.name for c in all_commands()[0]}, [], 0
    groups = {name.split()[0] for name in names if " " in name}
    for document, words in commands():
        command = " ".join(words[: 2 if words[0] in groups else 1])
        if words[0] in groups and len(words) == 1:
            continue
        if command not in names:
            wrong.append(f"{name_of(document)}: weft {command}")
            continue
        for word in words:
            if word.startswith("--"):
                flags += 1
                if not re.search(rf"{word.partition('=')[0]}(?![\w-])", help_of(command)):
                    wrong.append(f"{name_of(document)}: weft {command} {word}")
    assert not wrong
    assert flags > 30


def test_options_named_alone_exist() -> None:
    """`--plan auto` in prose: a command must define the option, or one of the few other tools that the documents
    show."""
    known = "\n".join(help_of(c.name) for c in all_commands()[0] if not c.own_parser)
    others = {"--help", "--local-dir", "--build-arg", "--seconds"}  # hf, docker, weft bench kernels
    wrong, found = [], 0
    for document in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", text_of(document), flags=re.MULTILINE | re.DOTALL)
        if document.name == "migrating.md":  # its own test has the options of weft
            text = re.sub(r"^\|.*", "", text, flags=re.MULTILINE)
        for code in re.findall(r"`([^`\n]+)`", text):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code if code.startswith("--") else ""):
                found += 1
                if flag not in others and not re.search(rf"{flag}(?![\w-])", known):
                    wrong.append(f"{name_of(document)}: {flag}")
    assert not wrong
    assert found > 30


def test_every_metric_exists() -> None:
    pinned = set(re.findall(r'"((?:weft_|vllm:)\w+)": "', text_of(ROOT / "tests/server/test_metrics.py")))
    assert len(pinned) > 30
    wrong, found = [], 0
    for document in DOCUMENTS:
        for name in re.findall(r"`(weft_[a-z_]+[a-z])(?:\{[^`]*\})?`", text_of(document)):
            found += 1
            if re.sub(r"_(total|bucket|count|sum)$", "", name) not in pinned:
                wrong.append(f"{name_of(document)}: {name}")
    assert not wrong
    assert found > 10


def test_decisions_are_all_listed_and_have_their_parts() -> None:
    folder = ROOT / "docs/decisions"
    pages = sorted(p.name for p in folder.glob("[0-9]*.md"))
    assert re.findall(r"\]\((\d{4}-[a-z-]+\.md)\)", text_of(folder / "README.md")) == pages
    for number, page in enumerate(pages, 1):
        text = text_of(folder / page)
        assert page.startswith(f"{number:04d}-")
        assert text.startswith(f"# {number}. ")
        for part in ("Question", "Tried", "Figures", "Decision", "What would change it"):
            assert f"**{part}.**" in text, f"{page} lacks {part}"


def test_what_comments_cite_exists() -> None:
    """`docs/pitfalls.md 19`, `docs/design.md invariant 4`, and quoted headings."""
    design, pitfalls = text_of(ROOT / "docs/design.md"), text_of(ROOT / "docs/pitfalls.md")
    invariants = set(re.findall(r"^(\d+)\. \*\*", design.partition("## Invariants")[2], re.MULTILINE))
    rules = set(re.findall(r"^(\d+)\. \*\*", pitfalls, re.MULTILINE))
    assert rules == {str(i) for i in range(1, len(rules) + 1)}
    source = "\n".join(text_of(ROOT / f) for f in files() if f.endswith(".py") and f != name_of(Path(__file__)))
    cited_rules = re.findall(r"docs/pitfalls\.md (\d+)", source)
    cited = re.findall(r"docs/design\.md invariants? (\d+)(?: and (\d+))?", source)
    headings = re.findall(r'docs/design\.md, "([^"]+)"', source)
    assert set(cited_rules) <= rules
    assert {n for pair in cited for n in pair if n} <= invariants
    assert all(f"## {heading}\n" in design for heading in headings)
    assert (len(cited_rules), len(cited), len(headings)) >= (3, 2, 1)
    assert not re.findall(r"\b(?:DESIGN|PITFALLS)[ :§]", source)


QUESTIONS = (
    "where does a request wait",
    "who may free a page",
    "how do i add a model",
    "how do i add a kernel",
    "how do i add a metric",
    "how do i add a sampling field",
    "how is a release made",
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_newcomers_question_is_answered_two_clicks_from_the_readme(question: str) -> None:
    assert "(docs/README.md)" in text_of(ROOT / "README.md")
    index = text_of(ROOT / "docs/README.md")
    (link,) = re.findall(rf"^\| {question}[^|]*\| \[[^\]]+\]\(([^)]+)\)", index, re.MULTILINE | re.IGNORECASE)
    path, _, anchor = link.partition("#")
    page = ROOT / "docs" / path
    assert len(text_of(page)) > 1000
    assert not anchor or anchor in anchors(page)


def test_version_is_the_same_everywhere() -> None:
    (project,) = re.findall(r'^version = "([^"]+)"', text_of(ROOT / "pyproject.toml"), re.MULTILINE)
    assert project == weft.__version__
    changelog = text_of(ROOT / "CHANGELOG.md")
    sections = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(project)} - \d{{4}}-\d\d-\d\d", sections[1])


def test_hooks_are_tools_of_the_project() -> None:
    hooks = re.findall(r"entry: (.+)", text_of(ROOT / ".pre-commit-config.yaml"))
    assert [hook.split()[0] for hook in hooks] == [".venv/bin/ruff", ".venv/bin/ruff", "make"]
    assert "repo: http" not in text_of(ROOT / ".pre-commit-config.yaml")
