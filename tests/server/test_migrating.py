"""docs/migrating.md: `weft serve` parses every option listed for another server's, with its value."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from weft.server.config import ServeConfig
from weft.server.daemon.cli import _parser
from weft.server.options import load

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")


def rows() -> list[tuple[str, str, str]]:
    """(server, its option, ours)."""
    found = []
    for section in PAGE.split("\n## From ")[1:]:
        server = section.split("\n")[0]
        found += [(server, theirs, ours) for theirs, ours in re.findall(r"^\| `(.+?)` \| `(.+?)` \|", section, re.M)]
    return found


def test_the_tables_exist() -> None:
    tables = re.findall(r"^\|[^|\n]+\| weft serve \|", PAGE, re.M)
    assert len(tables) == 3
    assert len(rows()) == len(re.findall(r"^\| `", PAGE[PAGE.index("\n## From ") :], re.M)) > 40


@pytest.mark.parametrize(("server", "theirs", "ours"), rows())
def test_an_option_is_accepted_as_documented(server: str, theirs: str, ours: str) -> None:
    assert re.match(r"--[a-z]|[A-Z]+_", theirs), server
    parsed = _parser().parse_args(["serve", *shlex.split(ours)])
    given = {name: value for name in ServeConfig.model_fields if (value := getattr(parsed, name, None)) is not None}
    config = load(ServeConfig, given, None)
    assert given
    default = ServeConfig()
    for name in given:
        if name not in ("host", "port", "gpu_memory_utilization", "page_size"):
            assert getattr(config, name) != getattr(default, name), "the option changes nothing"
