"""Ten thousand lines of `weft batch` against a real daemon that is killed in the middle: every line is answered
once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from live import running

LINES = 10_000
KILL_AT = 4_000
PATIENCE = 1500.0
"""seconds for the whole test, on a machine with other work"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "weft.server", "batch", *words]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE)
def test_ten_thousand_lines_killed_in_the_middle(tmp_path: Path) -> None:
    requested, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "demo", "max_tokens": 1, "ignore_eos": True}
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": [300 + i % 700]}}
        for i in range(LINES)
    ]
    requested.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with running(tmp_path, "--device", "cpu", "--max-num-seqs", "64", "--max-model-len", "64") as daemon:
        words = (str(requested), str(answered), "--url", daemon.url)
        first = subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        end = time.monotonic() + PATIENCE
        while not answered.exists() or answered.read_bytes().count(b"\n") < KILL_AT:
            assert first.poll() is None, first.communicate()
            assert time.monotonic() < end, "it makes no progress"
            time.sleep(0.05)
        first.kill()
        first.communicate()
        before = answered.read_bytes().count(b"\n")
        assert KILL_AT <= before < LINES
        done = subprocess.run(command(*words), capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in answered.read_text().splitlines()]
    counts = Counter(line["custom_id"] for line in lines)
    print(f"killed at {before}; {len(lines)} lines")
    assert counts == {row["custom_id"]: 1 for row in rows}
    assert all(line["response"]["status_code"] == 200 for line in lines)
