"""Third-party clients, each in a separate environment, against the real daemon and the demo model, on every path of the
API that they use. docs/clients.md has the table."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_encoders
from live import Daemon, running

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "foreign"
BUILT = ROOT / "build" / "clients"
NIGHTLY = {
    "haystack", "haystack_rerank", "smolagents", "autogen", "outlines", "guidance", "dspy", "cohere", "aider",
    "langchain", "pydantic_ai", "instructor", "llama_index", "llm", "openai_agents",
}  # fmt: skip
"""ten seconds of a core each; `make clients` runs all, and `make test` installs only the others"""
LISTED = re.findall(r"^(\w+):", (FOLDER / "clients.txt").read_text(), re.MULTILINE)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    path = tiny_encoders.save("xlm-roberta", tmp_path_factory.mktemp("reranker") / "model", labels=1)
    with running(tmp_path_factory.mktemp("ranking"), str(path), "--served-model-name", "reranker") as daemon:
        yield daemon


RERANKS = {"cohere", "haystack_rerank"}
"""clients that need a reranker instead of the demo"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ())
        for name in LISTED
        if name != "litellm"  # that one is test_conformance_proxy
    ],
)
def test_a_client_gets_valid_answers(name: str, request: pytest.FixtureRequest) -> None:
    daemon: Daemon = request.getfixturevalue("reranker" if name in RERANKS else "daemon")
    python = BUILT / name / "bin" / "python"
    if not python.exists():
        pytest.skip("it could not be installed")
    command = [str(python), f"try_{name}.py", daemon.url]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "DO_NOT_TRACK": "1",
    }  # otherwise the clients would fetch or send these
    done = subprocess.run(command, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=500)
    reported = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert reported, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    wrong = [f"{path}, {feature}:\n{why}" for path, feature, why, _ in reported if why]
    assert not wrong, "\n".join(wrong)


def test_each_script_has_its_client_and_its_row() -> None:
    scripts = {path.stem.removeprefix("try_") for path in FOLDER.glob("try_*.py")}
    assert scripts == {*LISTED} - {"litellm"}
    table = (ROOT / "docs" / "clients.md").read_text()
    for name, pin in re.findall(r"^(\w+): ([\w-]+)", (FOLDER / "clients.txt").read_text(), re.MULTILINE):
        assert f"| {pin}" in table, name


def test_the_clients_of_the_day_run_are_installed() -> None:
    names = re.search(r"^DAILY := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert names is not None
    assert set(names[1].split()) == {*LISTED} - NIGHTLY


def test_environments_are_read_from_their_file() -> None:
    spec = importlib.util.spec_from_file_location("environments", ROOT / "tools" / "install" / "environments.py")
    assert spec is not None
    assert spec.loader is not None
    environments = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environments)
    assert environments.wanted("# all\na: x==1 y[z]<2\n\nb: w # why\n# c: v\n") == {"a": ["x==1", "y[z]<2"], "b": ["w"]}
