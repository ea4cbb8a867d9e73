"""`make chaos`: half an hour of faults on a CPU, from a seed, and a verdict.

It kills and stops processes, flips bits in the store, lets clients disconnect, overloads the daemon, with priorities
too, stops reading its log, moves its clock, breaks its disks, uses up its file descriptors, kills its image decoders,
and loads and unloads LoRA adapters. Meanwhile clients that know the right answers send requests, some as pages of other
sites would, some with pictures for a second model, and some for adapters, whose answers `transformers` gave. It passes
if no answer was wrong, every stored response was there, every request had a terminal answer, probes on `--admin-port`
were answered, the daemon's counters agree with the clients' ledger to the request, and no process grew.

    make chaos ARGS="--minutes 30 --seed 0"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from random import Random

from adapters import OPERATOR, ChaosAdapters
from broken_disk import BrokenDisk
from customers import PATIENCE_SECONDS, Customers, questions, references
from draft_heads import random_head
from ledger import Ledger, disagreements, totals
from live import Daemon
from mischief import API, ENGINE, Clock, Log, Mischief
from pictures import NAME, ChaosPictures
from stored import StoringClients

from weft.engine.config.speculation import MODEL_METHODS
from weft.engine.demo import MODEL_PATH

HERE = Path(__file__).parent
HANG_SECONDS = 6.0
"""hang timeouts of the daemon under test"""
MEMORY_STEP_MIB = 40
"""MiB that a process may grow by, plus a tenth, after its second minute"""
DESCRIPTORS = 400
"""file descriptors of each process of the daemon"""
MIB = 2**20


def options(
    port: int, admin_port: int, disk: Path, adapters: ChaosAdapters, pictures: ChaosPictures, speculation: str
) -> list[str]:
    """Small pools, so that pages move and requests are preempted, and limits that are reached within seconds."""
    given = {
        "port": port, "api-workers": 3, "dtype": "float32", "num-pages": 150, "page-size": 16, "max-num-seqs": 16,
        "max-num-batched-tokens": 256, "host-kv-gib": 0.01, "ssd-kv-path": disk / "store", "ssd-kv-gib": 0.05,
        "responses-dir": disk / "responses", "files-dir": disk / "files", "admin-port": admin_port,
        "max-queued-requests": 64, "request-timeout": 60, "drain-timeout": 20, "hang-timeout": HANG_SECONDS,
        "step-timeout": HANG_SECONDS, "api-hang-timeout": HANG_SECONDS, "engine-restart-limit": 100_000,
        "admin-api-key": OPERATOR,
    }  # fmt: skip
    models = (f"demo {speculation} {adapters.options}", f"{pictures.model} served_model_name={NAME}")
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [*words, *(word for model in models for word in ("--model", model))]


def drafting(how: str, folder: Path) -> str:
    """The options of a model whose drafts are made like this. Models draft a fixed number, whether or not that pays."""
    if how not in MODEL_METHODS:
        return f"speculation={how}"
    model = MODEL_PATH if how == "draft_model" else random_head(folder / "head")
    fixed = {"num_speculative_tokens": 3, "enable_adaptive_verification": False}
    return "speculative_config=" + shlex.quote(json.dumps({"method": how, "model": str(model), **fixed}))


class Watched(Daemon):
    """A daemon whose stderr is a pipe, with a clock of its own where there is a C compiler."""

    def __init__(self, folder: Path, disk: BrokenDisk | None, *words: str) -> None:
        self.clock = Clock(folder / "clock")
        environment = {**os.environ, "CHAOS_CLOCK": str(folder / "clock"), "OMP_NUM_THREADS": "1"}
        shim = folder / "clock.so"
        if subprocess.run(
            ("cc", "-shared", "-fPIC", "-O2", "-o", shim, HERE / "clock.c", "-ldl"), check=False
        ).returncode:
            print("there is no C compiler: the clock does not jump")
        else:
            environment["LD_PRELOAD"] = str(shim)
        if disk is not None:
            environment |= disk.env | {"LD_PRELOAD": f"{shim}:{disk.env['LD_PRELOAD']}"}
        self.process = subprocess.Popen(
            (
                "bash",
                "-c",
                f'ulimit -n {DESCRIPTORS}; exec "$@"',
                "-",
                sys.executable,
                "-P",
                "-m",
                "weft.server.daemon.cli",
                "serve",
                *words,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=False,
        )
        assert self.process.stderr is not None
        self.log = Log(self.process.stderr, folder / "log")


class Memory:
    """Resident memory of each process of the daemon since its start."""

    def __init__(self, daemon: Watched) -> None:
        self._daemon = daemon
        self.seen: dict[int, list[tuple[float, float]]] = defaultdict(list)
        """(monotonic seconds, MiB) by process"""
        self.names: dict[int, str] = {}

    async def watch(self) -> None:
        while True:
            pids = {self._daemon.process.pid: "daemon"}
            for name, module in (("engine", ENGINE), ("api", API)):
                pids |= dict.fromkeys(self._daemon.children(module), name)
            for pid, name in pids.items():
                try:
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                except (OSError, IndexError):
                    continue
                self.names[pid] = name
                self.seen[pid].append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE") / MIB))
            await asyncio.sleep(2)

    def grown(self) -> list[str]:
        found = []
        for pid, samples in self.seen.items():
            settled = [mib for at, mib in samples if at - samples[0][0] > 60]
            if settled and settled[-1] > 1.1 * settled[0] + MEMORY_STEP_MIB:
                found.append(f"{self.names[pid]} {pid} grew from {settled[0]:.0f} to {settled[-1]:.0f} MiB")
        return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


async def fetched(port: int, path: str, seconds: float = 240) -> str:
    """The body of a 200 response. Waits for it."""

    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as response:
            return str(response.read().decode())

    end = time.monotonic() + seconds
    while True:
        try:
            return await asyncio.to_thread(get)
        except OSError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.3)


async def run(folder: Path, minutes: float, seed: int, crowd: int, speculation: str) -> list[str]:
    """Return what was found wrong."""
    rng = Random(seed)
    port = free_port()
    admin_port = free_port()
    store = folder / "disk" / "store"
    try:
        disk: BrokenDisk | None = BrokenDisk(folder / "disk", folder / "shim")
    except RuntimeError:
        disk = None
        print("there is no C compiler: the disk does not fail")
    store.mkdir(parents=True)
    adapters = ChaosAdapters(folder / "adapters", rng)
    pictures = ChaosPictures(folder / "vision", rng)
    daemon = Watched(
        folder, disk, *options(port, admin_port, folder / "disk", adapters, pictures, drafting(speculation, folder))
    )
    ledger = Ledger()
    findings: list[str] = []
    try:
        ready = asyncio.create_task(fetched(port, "/ready"))
        while not (await asyncio.wait((ready,), timeout=1))[0]:
            if daemon.process.poll() is not None:
                return ["the daemon did not start"]
        await ready
        shown = list(pictures.questions())
        answers = await references(port, [*questions(rng, 120), *shown])
        findings += pictures.alike(shown, answers)
        adapted = dict(adapters.questions())
        undisturbed = await references(port, list(adapted))
        findings += [
            f"{q.body}: {undisturbed[q]} instead of {adapted[q]}" for q in adapted if not undisturbed[q] <= adapted[q]
        ]
        answers |= adapted
        begun = await fetched(port, "/metrics")
        customers = Customers(port, ledger, answers, rng)
        data = max((file for file in store.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
        storing = StoringClients(port, ledger, rng)
        mischief = Mischief(
            daemon, customers, data, daemon.log, daemon.clock, rng, 2 * HANG_SECONDS, disk, port, admin_port, adapters
        )
        memory = Memory(daemon)
        watching = asyncio.create_task(memory.watch())
        customers.come(crowd)
        storing.come(max(1, crowd // 8))
        storm = asyncio.create_task(mischief.go_on(60 * minutes, (1.0, 6.0)))
        while not storm.done():
            await asyncio.wait((storm,), timeout=30)
            print(
                f"{ledger.total} requests, {ledger.right} right, {len(ledger.wrong)} wrong, "
                f"{ledger.broken.total()} broken, {ledger.refused} refused; {mischief.done.total()} accidents",
                flush=True,
            )
            if daemon.process.poll() is not None:
                return [f"the daemon ended with status {daemon.process.returncode}"]
        await storm
        await mischief.calm()
        await asyncio.wait_for(asyncio.gather(customers.stop(), storing.stop()), 4 * PATIENCE_SECONDS)
        await asyncio.sleep(2 * HANG_SECONDS)  # this finds processes that still hang
        exposition = await fetched(port, "/metrics")
        watching.cancel()
        print("accidents:", dict(mischief.done))
        print(f"responses: {storing.stored} stored, {storing.not_stored} not, {storing.read} read")
        print("answers:", {" ".join(key): count for key, count in sorted(ledger.answered.items())})
        print("drafts:", dict(totals(exposition, "weft_speculation_accepted_tokens_total", "drafter")))
        print("pictures:", dict(totals(exposition, "weft_images_total", "outcome")))
        print(
            "restarts:",
            *(dict(totals(exposition, f"weft_{name}_restarts_total")) for name in ("engine", "api_process")),
        )
        findings += mischief.findings + ledger.wrong + [f"no terminal answer: {what}" for what in ledger.unanswered]
        findings += disagreements(ledger, exposition, begun) + memory.grown()
        for gauge in ("weft_requests_running", "weft_requests_waiting", "weft_storage_failing"):
            line = next((line for line in exposition.splitlines() if line.startswith(gauge)), f"{gauge} 0")
            if float(line.split()[-1]):
                findings.append(f"afterwards {line}")
        children = daemon.children("weft")
        daemon.process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(daemon.process.wait, 240)
        if status:
            findings.append(f"the daemon ended with status {status} after SIGTERM")
        findings += [f"process {pid} outlived the daemon" for pid in children if Path(f"/proc/{pid}").exists()]
        return findings
    finally:
        daemon.end()


def main() -> int:
    parser = argparse.ArgumentParser(description="accidents by the minute: see the docstring of this file")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--crowd", type=int, default=24, help="clients that ask all the time")
    parser.add_argument("--speculation", default="suffix", choices=["off", "auto", "suffix", "ngram", *MODEL_METHODS])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-chaos-") as name:
        folder = Path(name)
        findings = ["the run ended early"]
        try:
            findings = asyncio.run(
                run(folder, arguments.minutes, arguments.seed, arguments.crowd, arguments.speculation)
            )
        finally:
            if findings:
                kept = Path(f"build/chaos-{arguments.seed}.log")
                kept.parent.mkdir(exist_ok=True)
                kept.write_bytes((folder / "log").read_bytes())
                print(f"the daemon's log is in {kept}")
    for finding in findings[:40]:
        print("BAD:", finding)
    print(
        f"chaos, seed {arguments.seed}, {arguments.minutes:g} minutes:",
        f"{len(findings)} findings" if findings else "passed",
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
