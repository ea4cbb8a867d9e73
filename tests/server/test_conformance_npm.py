"""npm clients against the real daemon. `make clients` installs them under build/ if there is a node."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Daemon, running

ROOT = Path(__file__).parents[2]
MODULES = ROOT / "build" / "npm" / "node_modules"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODULES.is_dir() or shutil.which("node") is None, reason="make clients installs them"),
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


def results(name: str, daemon: Daemon, tmp_path: Path) -> dict[str, Any]:
    """The client's view of the daemon's answers."""
    script = tmp_path / "clients.mjs"  # next to its modules, where node looks for them
    script.write_text((Path(__file__).parent / "npm" / "clients.mjs").read_text())
    (tmp_path / "node_modules").symlink_to(MODULES)
    done = subprocess.run(["node", str(script), name, daemon.url], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_openai(daemon: Daemon, tmp_path: Path) -> None:
    answer = results("openai", daemon, tmp_path)
    assert "42" in answer["whole"]
    assert answer["streamed"] == answer["response"] == answer["whole"]
    assert answer["last"] == "response.completed"
    assert answer["call"] == "add"
    assert all("42" in text for text in answer["answers"])
    assert set(answer["kinds"]) <= {"cat", "dog"}
    assert answer["completed"]
    assert answer["lengths"] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert answer["refused"] == 404


@pytest.mark.parametrize(
    "provider", ["@ai-sdk/openai", "@ai-sdk/openai, chat", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"]
)
def test_ai_sdk(provider: str, daemon: Daemon, tmp_path: Path) -> None:
    answer = results(provider, daemon, tmp_path)
    assert "42" in answer["whole"]
    assert answer["streamed"] == answer["whole"]
    assert answer["results"] == ["42"]
    assert "42" in answer["answer"]
    assert "42" in answer["flow"]
    assert answer["call"] == "adder"
    assert answer["kind"] in ("cat", "dog")
    assert answer.get("embeddings", 2) == 2


def test_anthropic(daemon: Daemon, tmp_path: Path) -> None:
    answer = results("@anthropic-ai/sdk", daemon, tmp_path)
    assert "42" in answer["whole"]
    assert answer["streamed"] == answer["whole"]
    assert answer["call"] == "add"
    assert "42" in answer["answer"]
    assert answer["counted"] > 3
