"""Changes one place of a module at a time and runs the tests nearest to it: `make mutants`.

Each mutant runs in a process forked from one that has imported the libraries and nothing of weft; there the module's
changed source is imported instead of the file, so the working tree stays as it is. Verdicts are kept in
build/mutants.json, so that an interrupted run resumes: they are valid while the module is unchanged, and "survived" is
valid only while the tests are unchanged too.

Fails if a mutant survives that equivalent.md does not explain, or if that file explains a mutant that does not exist.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from mutations import Mutant, mutants

ROOT = Path(__file__).parents[2]
VERDICTS = ROOT / "build/mutants.json"
EQUIVALENT = Path(__file__).with_name("equivalent.md")
SKIPPED_FUNCTIONS = ("check",)
"""self-checks, called only by tests"""
LIBRARIES = (
    "torch", "numpy", "xxhash", "pytest", "pytest_timeout", "pytest_asyncio.plugin", "hypothesis.stateful",
    "_hypothesis_pytestplugin", "transformers.utils.logging", "tokenizers", "msgspec", "fastapi",
)  # fmt: skip
PYTEST_OPTIONS = (
    "-x", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "pytest_asyncio.plugin",
    "-p", "_hypothesis_pytestplugin", "--hypothesis-profile", "unshrunk", "--timeout", "0",
)  # fmt: skip
"""Only the plugins that the tests need: every other installed plugin would be imported in each process."""

ORDER = ("tests/engine/test_scheduling_order.py", "tests/engine/test_memory_pressure.py")
FAIRNESS = "tests/engine/test_fairness.py"
TURNS = "tests/engine/test_fair_queue.py"
REUSE = "tests/engine/test_prefix_reuse.py"
MACHINE = "tests/engine/test_scheduler_machine.py"
TIER_MACHINE = "tests/engine/test_tier_machine.py"
NEAREST: dict[str, tuple[str, ...]] = {
    "engine/scheduling/scheduler.py": (
        *ORDER, "tests/engine/test_scheduler_chunks.py", "tests/engine/test_commit.py", REUSE, MACHINE, TIER_MACHINE,
    ),
    "engine/scheduling/fair_queue.py": (TURNS,),
    "engine/scheduling/fairness.py": (FAIRNESS,),
    "engine/scheduling/prefills.py": (FAIRNESS, *ORDER, "tests/engine/test_scheduler_chunks.py", MACHINE),
    "engine/scheduling/waiting.py": (TURNS, FAIRNESS, *ORDER, MACHINE),
    "engine/memory/pages.py": ("tests/engine/test_pages.py", *ORDER, MACHINE),
    "engine/memory/prefix_index.py": (
        "tests/engine/test_prefix.py", "tests/engine/test_pages.py", *ORDER, MACHINE, TIER_MACHINE,
    ),
    "engine/wire/page_keys.py": ("tests/engine/test_prefix.py", "tests/engine/test_page_ledger.py", *ORDER),
    "engine/scheduling/prefix_reuse.py": (
        "tests/engine/test_prefix.py", REUSE, *ORDER, "tests/engine/test_loads.py", MACHINE, TIER_MACHINE,
    ),
    "engine/scheduling/fences.py": ("tests/engine/test_fences.py", *ORDER, MACHINE),
    "engine/scheduling/admission.py": ("tests/engine/test_admission.py", *ORDER),
    "engine/scheduling/build.py": ("tests/engine/test_build.py", "tests/engine/test_grammar.py"),
    "engine/memory/tiers.py": (REUSE, "tests/engine/test_loads.py", TIER_MACHINE, "tests/engine/test_tiers.py"),
    "server/text/stops.py": ("tests/server/test_stops.py",),
    "server/text/detokenizer.py": ("tests/server/test_detokenizer.py",),
}  # fmt: skip
"""by module, the tests that should detect its mutants, the quickest first"""


class Task(NamedTuple):
    path: str
    mutant: Mutant
    key: str
    """of the mutant and the module's source"""
    tests: str
    """of the tests that are run"""

    @property
    def text(self) -> str:
        """As equivalent.md lists it."""
        m = self.mutant
        again = f" ({m.number})" if m.number > 1 else ""
        return f"{self.path} {m.function}{again}\n- {m.was}\n+ {m.becomes}\n"


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a source that is not its file."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name, self.path, self.source = name, path, source

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self, origin=str(self.path)) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self.path)
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


def start(path: str, source: str | None) -> int:
    """Fork a process that runs the module's tests, on its changed source if there is one; returns its id."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    code = 3
    try:
        import pytest

        if source is not None:
            name = "weft." + path.removesuffix(".py").replace("/", ".")
            sys.meta_path.insert(0, _Changed(name, ROOT / path, source))
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        code = int(pytest.main([*PYTEST_OPTIONS, *(str(ROOT / test) for test in NEAREST[path])]))
    finally:
        os._exit(code)


def kill(child: int) -> None:
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def baseline(path: str) -> float:
    """Seconds that the module's tests take on the unchanged file. They must pass."""
    begun = time.monotonic()
    _, status = os.waitpid(start(path, None), 0)
    if status:
        sys.exit(f"{path}: its tests fail without a mutation: {' '.join(NEAREST[path])}")
    return time.monotonic() - begun


def run(tasks: list[Task], limits: dict[str, float], jobs: int, verdicts: dict[str, str]) -> None:
    """Run the mutants without a verdict, `jobs` at a time."""
    queue, running, done = list(tasks), {}, 0
    try:
        while queue or running:
            while queue and len(running) < jobs:
                task = queue.pop(0)
                running[start(task.path, task.mutant.source)] = task, time.monotonic()
            time.sleep(0.05)
            for child, (task, begun) in list(running.items()):
                ended, status = os.waitpid(child, os.WNOHANG)
                if not ended and time.monotonic() - begun < limits[task.path]:
                    continue
                if not ended:
                    kill(child)
                verdict = "timeout" if not ended else "killed" if status else "survived"
                del running[child]
                verdicts[task.key] = f"survived {task.tests}" if verdict == "survived" else verdict
                done += 1
                print(f"[{done}/{len(tasks)}] {verdict:8} {task.text.replace(chr(10), ' ')}", flush=True)
                VERDICTS.write_text(json.dumps(verdicts, indent=0))
    finally:
        for child in running:
            kill(child)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def collect(paths: list[str]) -> list[Task]:
    tasks = []
    helpers = sorted(path for folder in ("engine", "server") for path in (ROOT / "tests" / folder).glob("[!t]*.py"))
    for path in paths:
        source = (ROOT / path).read_text()
        read = [ROOT / test for test in NEAREST[path]] + helpers
        tests = _digest(b"".join(p.read_bytes() for p in read))
        for mutant in mutants(source, skip=SKIPPED_FUNCTIONS):
            tasks.append(Task(path, mutant, _digest(repr((source, path, *mutant[:4])).encode()), tests))
    return tasks


def explained() -> dict[str, str]:
    """Reasons by mutant: four lines each in equivalent.md, the last one `= reason`."""
    reasons, lines = {}, EQUIVALENT.read_text().splitlines()
    for i, line in enumerate(lines):
        if line.startswith("= "):
            reasons["\n".join(lines[i - 3 : i]) + "\n"] = line[2:]
    return reasons


def verdict_of(task: Task, verdicts: dict[str, str]) -> str:
    """Empty if there is no verdict, or only one of other tests."""
    verdict, _, tests = verdicts.get(task.key, "").partition(" ")
    return verdict if tests in ("", task.tests) else ""


def report(tasks: list[Task], verdicts: dict[str, str], known: dict[str, str]) -> list[Task]:
    """Print the score of each module; returns the survivors that nobody explained."""
    print(f"\n| {'module':22} | mutants | run | killed | timed out | equivalent | unexplained |")
    print("|---|---|---|---|---|---|---|")
    left = [t for t in tasks if verdict_of(t, verdicts) == "survived" and t.text not in known]
    for path in dict.fromkeys(t.path for t in tasks):
        of_module = [t for t in tasks if t.path == path]
        counts = Counter(verdict for t in of_module if (verdict := verdict_of(t, verdicts)))
        unknown = sum(t.path == path for t in left)
        cells = (counts.total(), counts["killed"], counts["timeout"], counts["survived"] - unknown, unknown)
        print(f"| {path:22} | {len(of_module)} | {' | '.join(map(str, cells))} |")
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", help=f"of {' '.join(NEAREST)} (all)")
    parser.add_argument("--sample", type=int, metavar="N", help="at most N mutants a module, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time (one a core)")
    parser.add_argument("--report", action="store_true", help="only print the verdicts that there are")
    args = parser.parse_args()
    if unknown := [path for path in args.modules if path not in NEAREST]:
        parser.error(f"{unknown[0]} has no tests named in {Path(__file__).name}")
    tasks, known = collect(args.modules or list(NEAREST)), explained()
    there = {t.text for t in tasks}
    stale = [text for text in known if text.split()[0] in {t.path for t in tasks} and text not in there]
    VERDICTS.parent.mkdir(exist_ok=True)
    verdicts: dict[str, str] = json.loads(VERDICTS.read_text()) if VERDICTS.exists() else {}
    if not args.report:
        chosen: list[Task] = []
        for path in dict.fromkeys(t.path for t in tasks):
            of_module = [t for t in tasks if t.path == path]
            if args.sample is not None:
                of_module = random.Random(args.seed).sample(of_module, min(args.sample, len(of_module)))
            chosen += [t for t in of_module if not verdict_of(t, verdicts)]
        for name in LIBRARIES:
            importlib.import_module(name)
        limits = {path: 20 + 4 * baseline(path) for path in dict.fromkeys(t.path for t in chosen)}
        run(chosen, limits, args.jobs, verdicts)
    left = report(tasks, verdicts, known)
    for task in left:
        print(f"\nsurvived, and {EQUIVALENT.name} has no reason:\n{task.text}")
    for text in stale:
        print(f"\n{EQUIVALENT.name} explains a mutant that is not there:\n{text}")
    return 1 if left or stale else 0


if __name__ == "__main__":
    sys.exit(main())
