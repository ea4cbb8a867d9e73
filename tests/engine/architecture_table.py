"""Writes the table of docs/architectures.md: every decoder of `transformers`, tried on a tiny random checkpoint.

    make architectures

Each runs in a process of its own, under every condition of `architecture_parity`; the exit status is 1 when fewer than
`ENOUGH` pass. ARGS="--check" writes nothing, and asks that all pass that pass in the table. ARGS="llama opt": those
alone, nothing is written.
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

from weft.engine.errors import ModelError, WeftError
from weft.engine.model.broad.reading import one_line, quiet, spec_of
from weft.engine.model.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
BEGIN = "<!-- made by make architectures -->"
ENOUGH = 110
MEMORY_BYTES, SECONDS = 4 << 30, 600
"""of one architecture"""
NATIVE = {name for family in FAMILIES for name in family.architectures}


def refusal_of_shape(kind: str) -> str:
    """Why a configuration as it comes is refused; for those that there is no tiny checkpoint of."""
    try:
        spec_of(CONFIG_MAPPING[kind](), CLASSES[kind], (), trusted=False)
    except ModelError as error:
        return str(error)
    except Exception as error:  # its configuration as it comes is none
        return f"there is no tiny checkpoint of it to test ({one_line(error)[:80]})"
    return "there is no tiny checkpoint of it to test"


def tried(kind: str) -> tuple[str, str]:
    """(`broad` or `no`, why not)."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with quiet():
                path = save_architecture(kind, Path(folder))
        except Exception as error:
            reason = refusal_of_shape(kind)
            return "no", reason if "(" in reason or "tiny" not in reason else f"{reason} ({one_line(error)[:80]})"
        condition = "loading"
        try:
            parity = Parity(path)
            for condition in parity.CONDITIONS:
                getattr(parity, condition)()
        except WeftError as error:
            return "no", str(error).rpartition(" here: ")[2]
        except Exception as error:
            return "no", f"not the tokens of transformers ({condition}: {type(error).__name__})"
    return "broad", ""


def apart(do: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """In a child, which may take so much time and memory."""
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
        told = pipe.read()
    os.waitpid(child, 0)
    return tuple(json.loads(told)) if told else ("no", "the attempt was killed: too much time or memory")


def table(found: dict[str, tuple[str, str]]) -> str:
    """As the document has it, below `BEGIN`."""
    native = {kind for kind in found if CLASSES[kind] in NATIVE}
    counts = Counter(how for how, _ in found.values())
    lines = [
        BEGIN,
        "",
        f"`transformers` {transformers.__version__}: {len(found)} entries. {counts['broad']} pass on `transformers`' "
        f"code, {len(native)} have native layers, {counts['no']} are rejected.",
        "",
        "| `model_type` | class | native | `transformers`' code |",
        "|---|---|---|---|",
    ]
    for kind, (how, why) in found.items():
        words = "yes" if how == "broad" else f"no: {why.replace('|', '/')[:120]}"
        lines.append(f"| {kind} | `{CLASSES[kind]}` | {'yes' if kind in native else ''} | {words} |")
    return "\n".join(lines) + "\n"


def passing(page: str) -> set[str]:
    """The `model_type`s that pass in the table of the document."""
    rows = [line.strip("| ").split(" | ") for line in page.partition(BEGIN)[2].splitlines() if line.count("|") > 4]
    return {row[0] for row in rows if row[-1] == "yes"}


def main(arguments: list[str]) -> int:
    chosen = [kind for kind in arguments if not kind.startswith("-")]
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, Any] = {}
    for kind in chosen or CLASSES:
        found[kind] = apart(lambda kind=kind: tried(kind))
        print(kind, *found[kind], flush=True)
    passed = sum(how == "broad" for how, _ in found.values())
    print(f"{passed} of {len(found)} pass")
    if chosen:
        return 0 if passed == len(chosen) else 1
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in arguments:
        lost = passing(page) - {kind for kind, (how, _) in found.items() if how == "broad"}
        print(f"in the table, and pass no more: {', '.join(sorted(lost)) or 'none'}")
        return 0 if passed >= ENOUGH and not lost else 1
    PAGE.write_text(page.partition(BEGIN)[0] + table(found), encoding="utf-8")
    return 0 if passed >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
