"""Writes the table of docs/architectures.md by testing a tiny random checkpoint of every decoder in `transformers`.

    make architectures

Each runs in a separate process, under every condition of `architecture_parity`. The exit status is 1 if fewer than
`ENOUGH` pass. ARGS="--check" writes nothing and fails if an architecture that passes in the table does not pass.
ARGS="llama opt" tests only these and writes nothing.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from architecture_parity import Parity
from architectures import CLASSES, save_architecture
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weft.engine.config import EngineConfig
from weft.engine.errors import ModelError, WeftError
from weft.engine.model.families import FAMILIES
from weft.engine.model.implementation import choose_spec
from weft.engine.model.transformers_impl.reading import one_line, quiet, spec_of
from weft.engine.model.transformers_impl.spec import TransformersSpec

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
BEGIN = "<!-- made by make architectures -->"
ENOUGH = 160
MEMORY_BYTES, SECONDS = 4 << 30, 600
"""Limits per architecture."""
SINGLE = ", one request at a time"
NATIVE = {name for family in FAMILIES for name in family.architectures}


def rejection(kind: str) -> str:
    """Return why the default configuration is rejected, if there is no tiny checkpoint."""
    try:
        spec_of(CONFIG_MAPPING[kind](), CLASSES[kind], trusted=False)
    except ModelError as error:
        return str(error)
    except Exception as error:  # its default configuration is invalid
        return f"no tiny checkpoint to test ({one_line(error)[:80]})"
    return "no tiny checkpoint to test"


def attempt(kind: str) -> tuple[str, str]:
    """Return (`transformers` or `no`, the reason for `no` or how many results were taken at a tie)."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with quiet():
                path = save_architecture(kind, Path(folder))
        except Exception as error:
            reason = rejection(kind)
            return "no", reason if "(" in reason or "tiny" not in reason else f"{reason} ({one_line(error)[:80]})"
        condition = "loading"
        try:
            parity = Parity(path)
            for condition in parity.CONDITIONS:
                getattr(parity, condition)()
            spec, _ = choose_spec(EngineConfig(model=str(path), model_impl="transformers"))
            return "transformers", SINGLE if isinstance(spec, TransformersSpec) and spec.single else ""
        except WeftError as error:
            return "no", str(error).rpartition(" here: ")[2]
        except Exception as error:
            return "no", f"tokens differ from transformers ({condition}: {type(error).__name__})"
    return "transformers", f"({parity.ties} at a tie)" if parity.ties else ""


def in_child(do: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Run in a child process with limited time and memory."""
    receiver, sender = os.pipe()
    if (child := os.fork()) == 0:
        os.close(receiver)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        signal.alarm(SECONDS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            answer = do()
        except BaseException as error:
            answer = ("no", f"the attempt failed: {one_line(error)[:120]}")
        os.write(sender, json.dumps(answer).encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return tuple(json.loads(result)) if result else ("no", "the attempt was killed: too much time or memory")


def table(found: dict[str, tuple[str, str]]) -> str:
    """Return the part of the document from `BEGIN` on."""
    native = {kind for kind in found if CLASSES[kind] in NATIVE}
    counts = Counter(how for how, _ in found.values())
    lines = [
        BEGIN,
        "",
        f"`transformers` {transformers.__version__}: {len(found)} entries. {counts['transformers']} pass on "
        f"`transformers`' code, {len(native)} have native layers, {counts['no']} are rejected.",
        "",
        "| `model_type` | class | native | `transformers`' code |",
        "|---|---|---|---|",
    ]
    for kind, (how, why) in found.items():
        words = f"yes{why}" if how == "transformers" else f"no: {why.replace('|', '/')[:120]}"
        lines.append(f"| {kind} | `{CLASSES[kind]}` | {'yes' if kind in native else ''} | {words} |")
    return "\n".join(lines) + "\n"


def passing(page: str) -> set[str]:
    """Return the `model_type`s that pass in the document's table."""
    rows = [line.strip("| ").split(" | ") for line in page.partition(BEGIN)[2].splitlines() if line.count("|") > 4]
    return {row[0] for row in rows if row[-1].startswith("yes")}


def main(arguments: list[str]) -> int:
    if unknown := set(arguments) - {*CLASSES, "--check"}:
        print(f"neither --check nor a model_type of transformers: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [kind for kind in arguments if not kind.startswith("-")]
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, Any] = {}
    for kind in chosen or CLASSES:
        found[kind] = in_child(lambda kind=kind: attempt(kind))
        print(kind, *found[kind], flush=True)
    passed = sum(how == "transformers" for how, _ in found.values())
    print(f"{passed} of {len(found)} pass")
    if chosen:
        return 0 if passed == len(chosen) else 1
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in arguments:
        lost = passing(page) - {kind for kind, (how, _) in found.items() if how == "transformers"}
        print(f"pass in the table but not now: {', '.join(sorted(lost)) or 'none'}")
        return 0 if passed >= ENOUGH and not lost else 1
    PAGE.write_text(page.partition(BEGIN)[0] + table(found), encoding="utf-8")
    return 0 if passed >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
