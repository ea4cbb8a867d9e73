"""schemathesis against the real daemon: thousands of requests made from its own OpenAPI schema, valid and invalid.

Every answer has a status, a content type and a body as in the schema, so every error has OpenAI's form, and none is a
5xx.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import running

SECONDS = 900
"""a multiple of the expected time"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]

KEY = "root"


def statuses(report: Path) -> Counter[tuple[str, int]]:
    """The number of answers by (endpoint, status)."""
    found: Counter[tuple[str, int]] = Counter()
    for line in report.read_text().splitlines():
        recorder: Any = json.loads(line).get("ScenarioFinished", {}).get("recorder") or {}
        for interaction in recorder.get("interactions", {}).values():
            if interaction["response"] is not None:
                found[recorder["label"], interaction["response"]["status_code"]] += 1
    return found


NEVER = "^/admin/profile$|/input_tokens$|/count_tokens$|^/pause$|^/sleep$"
"""paths: the first takes as long as the request says, the next take other endpoints' bodies, and after the last two
later requests would wait for an operator"""
ALL_PHASES = "examples,coverage,fuzzing"
SAME_BODIES = "^/invocations$|/render$|^/rerank$|^/v2/rerank$|^/score$|^/classify$|^/pooling$"
"""paths with the bodies and rules of other paths"""


@pytest.mark.parametrize(
    ("cases", "without", "phases"),
    [(10, SAME_BODIES, "examples,fuzzing"), pytest.param(60, "^$", ALL_PHASES, marks=pytest.mark.nightly)],
)
def test_every_answer_is_described_by_the_schema(tmp_path: Path, cases: int, without: str, phases: str) -> None:
    """`cases`: random cases per endpoint at most, in addition to those for every single rule of the schema in the phase
    "coverage". `without`: excluded paths."""
    with running(tmp_path, "--max-model-len", "96", "--admin-api-key", KEY) as daemon:
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"),
                *("--header", f"Authorization: Bearer {KEY}", "--generation-deterministic", "--continue-on-failure"),
                *("--max-examples", str(cases), "--phases", phases, "--request-timeout", "240"),
                *("--exclude-path-regex", f"{NEVER}|{without}"),
                # No schema expresses errors of combined fields: prompt + max_tokens beyond the context …
                *("--exclude-checks", "positive_data_acceptance"),
                *("--report", "ndjson", "--report-ndjson-path", "report", "--no-color"),
                daemon.url + "/openapi.json",
            ],
            cwd=tmp_path,
            env={
                **os.environ,
                "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path),
                "PYTHONPATH": str(Path(__file__).parent),
                "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            },
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        answered = statuses(tmp_path / "report")
        generating = ("completions", "chat/completions", "responses", "messages", "embeddings")
        for endpoint in ("POST /tokenize", *(f"POST /v1/{name}" for name in generating)):
            assert answered[endpoint, 200] >= (5 if phases == ALL_PHASES else 1)
            assert answered[endpoint, 400] >= (20 if phases == ALL_PHASES else 1)
        assert answered.total() > (1000 if phases == ALL_PHASES else 300)
        assert max(status for _, status in answered) < 500
        assert daemon.process.poll() is None
        assert "Traceback" not in daemon.stderr()
        wanted = {"weft_requests_running 0.0", "weft_kv_cache_usage_ratio 0.0", "weft_api_process_restarts_total 0.0"}
        end = time.monotonic() + 240
        while missing := wanted - set(httpx.get(daemon.url + "/metrics", timeout=240).text.splitlines()):
            assert time.monotonic() < end, missing
            time.sleep(0.1)
