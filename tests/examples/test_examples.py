"""Every example runs as its first lines say, against the real daemon with the demo model, and prints the expected
output."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "PYTHONSAFEPATH": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a daemon with the demo model."""
    log = tmp_path_factory.mktemp("daemon") / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "weft.server.daemon.cli", "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=ENVIRONMENT,
        )
    try:
        assert process.stdout is not None
        match = re.search(r"http://\S+", process.stdout.readline())
        assert match, log.read_text()
        yield match[0]
    finally:
        process.terminate()
        try:
            process.wait(240)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def output(name: str, *arguments: str) -> str:
    """What the example prints on stdout; it must succeed."""
    command = [str(EXAMPLES / name)] if name.endswith(".sh") else [sys.executable, "-P", str(EXAMPLES / name)]
    run = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    return run.stdout


def test_offline() -> None:
    assert output("offline.py").splitlines() == [
        "chat: 579",
        "completion: 5 6 7 8 (length after 8 tokens)",
        "sorted: pear apple fig -> apple fig pear",
        "sorted: kiwi plum cherry -> cherry kiwi plum",
    ]


def test_streaming(daemon: str) -> None:
    text, account, latency = output("streaming.py", daemon, "What is 123 + 456?").splitlines()
    assert text == "579"
    assert re.fullmatch(r"\d+ tokens in, [34] out", account)
    first, last = map(int, re.findall(r"(\d+) ms", latency))
    assert 0 < first <= last


def test_structured_output(daemon: str) -> None:
    json_line, choice, regex = output("structured_output.py", daemon).splitlines()
    answer = ast.literal_eval(json_line.removeprefix("json: "))
    assert 0 <= answer["sum"] <= 999
    assert answer["even"] in (True, False)
    assert answer["kind"] in ("small", "large")
    assert (choice, regex) == ("choice: 42", "regex: 579")


def test_tools(daemon: str) -> None:
    assert output("tools.py", daemon).splitlines() == ["call: add(12, 30) = 42", "answer: 42"]


def test_load_test(daemon: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    begin = time.monotonic()
    text = output("load_test.sh", daemon, str(report))
    assert time.monotonic() - begin > 4, "requests come over five seconds"
    assert "requests answered (none failed)" in text
    assert re.search(r"^met +Time to first token", text, re.MULTILINE)
    assert json.loads(report.read_text())["format"] == "weft-load-1"


def test_attention_backend() -> None:
    difference, answers = output("attention_backend.py").split("answers: ")
    assert float(difference.split()[-1]) < 1e-5
    assert answers.startswith("['579', 'apple fig pear'], ")


def test_each_example_is_run_and_describes_itself_and_its_command() -> None:
    tested = set(re.findall(r'output\("([^"]+)"', Path(__file__).read_text()))
    examples = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert examples == tested
    for name in examples:
        text = (EXAMPLES / name).read_text()
        head = ast.get_docstring(ast.parse(text)) if name.endswith(".py") else text.split("\n\n")[0]
        assert head, f"{name} does not say what it shows"
        assert re.search(rf"run it:  (python )?examples/{re.escape(name)}", head, re.IGNORECASE), name
