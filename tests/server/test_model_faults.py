"""`weft serve` with faulty model directories: the operator's log line and the client's error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest
from live import Daemon, running

from weft.engine.demo import MODEL_PATH

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_PATH, tmp_path / "model"))


def test_a_broken_chat_template_is_logged_once_at_start_and_answered_with_500(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages }"}))
    with running(tmp_path, "--model", str(model), "--api-workers", "2") as daemon:
        assert "/v1/completions" in daemon.curl_line
        assert daemon.wait_for_log("chat template is broken: line 1: ").count("chat template is broken: line 1: ") == 1
        body = {"messages": [{"role": "user", "content": "What is 1 + 2?"}]}
        answer = httpx.post(f"{daemon.url}/v1/chat/completions", json=body, timeout=240)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "broken_chat_template")


@pytest.mark.parametrize("without", ["tokenizer", "weights"])
def test_a_start_with_a_missing_file_is_a_one_line_error(model: Path, tmp_path: Path, without: str) -> None:
    if without == "tokenizer":
        for file in model.glob("tokenizer*"):
            file.unlink()
        message = "has no tokenizer"
    else:
        (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
        message = "is a Git LFS pointer"
    daemon = Daemon(tmp_path / "stderr", "--model", str(model))
    try:
        assert daemon.process.wait(timeout=240) != 0
    finally:
        daemon.end()
    (line,) = (line for line in daemon.stderr().splitlines() if line.startswith("weft"))
    assert message in line
    assert "Traceback" not in daemon.stderr()
