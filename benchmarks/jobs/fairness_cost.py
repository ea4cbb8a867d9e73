"""Measures what slots for a waiting key cost, end to end on a CPU: one key fills all slots, another one waits.

    python benchmarks/jobs/fairness_cost.py OUT

Two daemons serve the demo model with 16 slots. The greedy key sends 32 long requests at once, and the other one 20
short ones, one after the other. In daemon B, a key without a slot never gets one from another key (with `--control`,
B is as A, to show the noise). The engines run in turns of a quarter of a second, A B B A, and the other one is stopped,
so that a busy machine affects both alike. Both answer the same requests. Each ratio is A's total divided by B's;
iterations and computed tokens do not depend on the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

GREEDY, WAITING = "greedy", "waiting"
SLOTS, LONG, SHORT = 16, 32, 20
SHORT_TOKENS = 30
TURN_SECONDS = 0.25
INERT = """
import sys
if "weft.engine.process" in sys.orig_argv:
    from weft.engine.scheduling.fairness import Fairness
    Fairness.__init__.__kwdefaults__["patience"] = 10**9
"""
TOTALS = {
    "generated": "weft_generation_tokens_total", "computed": "weft_computed_tokens_total",
    "prompts": "weft_prompt_tokens_total", "iterations": "weft_iterations_total",
    "preemptions": "weft_preemptions_total",
}  # fmt: skip


class Daemon:
    """A daemon and its clients. Its engine is stopped, except in `turn`. `totals`: of the whole work, once done."""

    def __init__(self, long: int, patch: Path | None) -> None:
        environment = dict(os.environ)
        if patch is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(patch), environment.get("PYTHONPATH"))))
        options = {"port": 0, "max-num-seqs": SLOTS, "hang-timeout": 0, "step-timeout": 1e6, "request-timeout": 1e6}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._process = subprocess.Popen(
            (sys.executable, "-P", "-m", "weft.server", "serve", *words, "--api-key", GREEDY, WAITING),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.url = re.findall(r"http://\S+", self._process.stdout.readline())[0]
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        (self._engine,) = (int(p) for p in children if "weft.engine.process" in Path(f"/proc/{p}/cmdline").read_text())
        self._seconds, self._left, self._lock = 0.0, LONG + SHORT, threading.Lock()
        self.totals: dict[str, float] | None = None
        self._before = self._now()
        os.kill(self._engine, signal.SIGSTOP)
        draw = random.Random(0)
        for _ in range(LONG):  # contexts of different lengths, as attention on a CPU computes equal ones together
            body = _body(draw.choices(range(20, 400), k=draw.randrange(20, 200)), draw.randrange(2 * long // 3, long))
            threading.Thread(target=self._send, args=(GREEDY, [body]), daemon=True).start()
        shorts = [_body(draw.choices(range(20, 400), k=20), SHORT_TOKENS) for _ in range(SHORT)]
        threading.Thread(target=self._send, args=(WAITING, shorts), daemon=True).start()

    def _send(self, key: str, bodies: list[dict[str, Any]]) -> None:
        with httpx.Client(timeout=None) as http:
            for body in bodies:
                headers = {"Authorization": f"Bearer {key}"}
                http.post(f"{self.url}/v1/completions", json=body, headers=headers).raise_for_status()
                with self._lock:
                    self._left -= 1
                    if not self._left:
                        now = self._now()
                        self.totals = {name: now[name] - self._before[name] for name in now}

    def _now(self) -> dict[str, float]:
        fields = Path(f"/proc/{self._engine}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        lines = httpx.get(f"{self.url}/metrics", timeout=None).text.splitlines()
        sums = {
            name: sum(float(line.split()[-1]) for line in lines if re.match(rf"{metric}[ {{]", line))
            for name, metric in TOTALS.items()
        }
        return {"CPU seconds": cpu, "seconds": self._seconds, **sums}

    def turn(self) -> None:
        if self.totals is not None:
            return
        os.kill(self._engine, signal.SIGCONT)
        begin = time.monotonic()
        time.sleep(TURN_SECONDS)
        self._seconds += time.monotonic() - begin
        os.kill(self._engine, signal.SIGSTOP)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._engine, signal.SIGCONT)
        self._process.kill()
        self._process.wait()


def _body(prompt: list[int], tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--long", type=int, default=1800, help="tokens of a long answer")
    parser.add_argument("--control", action="store_true", help="compare A with itself")
    arguments = parser.parse_args()
    daemons: list[Daemon] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(INERT)
        try:
            for patch in (None, None if arguments.control else Path(folder)):
                daemons.append(Daemon(arguments.long, patch))
            for i in cycle((0, 1, 1, 0)):
                daemons[i].turn()
                if all(daemon.totals is not None for daemon in daemons):
                    break
        finally:
            for daemon in daemons:
                daemon.end()
    a, b = (daemon.totals or {} for daemon in daemons)
    result: dict[str, Any] = {
        "control": arguments.control,
        "ratios": {name: round(a[name] / b[name], 4) for name in a if b[name]},
        "A": a,
        "B": b,
    }
    arguments.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
