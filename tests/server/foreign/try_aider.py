"""aider: a question about a repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from trial import URL, run, tries


def aider(model: str, **env: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        quiet = "--no-git --yes-always --no-show-model-warnings --no-check-update --analytics-disable --no-pretty"
        requested = (
            "--chat-mode",
            "ask",
            "--map-tokens",
            "0",
            "--no-show-release-notes",
            "--message",
            "What is 12 + 30?",
        )
        command = [str(Path(sys.executable).parent / "aider"), "--model", model, *quiet.split(), *requested]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "HOME": folder, **env}, capture_output=True, text=True, timeout=240
        )
        return done.stdout + done.stderr


@tries("chat", "streamed")
def chat() -> None:
    output = aider("openai/demo", OPENAI_API_BASE=f"{URL}/v1", OPENAI_API_KEY="none")
    assert "Tokens:" in output, output


@tries("messages", "streamed")
def messages() -> None:
    output = aider("anthropic/demo", ANTHROPIC_API_BASE=URL, ANTHROPIC_API_KEY="none")
    assert "Tokens:" in output, output


run()
