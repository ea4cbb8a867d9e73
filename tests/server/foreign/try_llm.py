"""The llm command: its models of OpenAI and Anthropic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from trial import URL, run, tries

folder = Path(tempfile.mkdtemp())
(folder / "extra-openai-models.yaml").write_text(
    json.dumps(
        [
            {
                "model_id": "weft",
                "model_name": "demo",
                "api_base": f"{URL}/v1",
                "supports_schema": True,
                "supports_tools": True,
            },
            {"model_id": "weft-text", "model_name": "demo", "api_base": f"{URL}/v1", "completion": True},
        ]
    )
)


def llm(*arguments: str) -> str:
    env = {**os.environ, "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
    command = [str(Path(sys.executable).parent / "llm"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout


OPTIONS = ("-o", "temperature", "0", "-o", "max_tokens", "60")


@tries("chat", "plain")
def plain() -> None:
    assert "42" in llm("-m", "weft", "--no-stream", *OPTIONS, "What is 12 + 30?")


@tries("chat", "streamed")
def streamed() -> None:
    assert "42" in llm("-m", "weft", *OPTIONS, "What is 12 + 30?")


@tries("chat", "tool result")
def tools() -> None:
    function = "def add(a: float, b: float) -> str:\n    '''Add two numbers.'''\n    return f'{a + b:g}'\n"
    assert "42" in llm("-m", "weft", *OPTIONS, "--functions", function, "What is 12 plus 30?")


@tries("chat", "schema")
def schema() -> None:
    form = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"]}
    assert json.loads(llm("-m", "weft", *OPTIONS, "--schema", json.dumps(form), "A pet?"))["kind"] in ("cat", "dog")


@tries("completions", "plain")
def completed() -> None:
    assert llm("-m", "weft-text", *OPTIONS, "What is 12 + 30?")


run()
