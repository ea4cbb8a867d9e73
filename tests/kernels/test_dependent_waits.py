"""Kernels that may start early wait for the previous one, so that a wait for a kernel is a wait for all before it. The
test checks that a wait is in the code, not that every program reaches it."""

from __future__ import annotations

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"
WAITS = ("begin(PDL)", "follow_previous(PDL)", "await_previous()", "griddepcontrol.wait")


def _with_pdl(path: Path) -> dict[str, str]:
    """The code of each device function that takes `PDL`, by name."""
    text = path.read_text()
    return {
        f"{path.stem}.{f.name}": ast.get_source_segment(text, f) or ""
        for f in ast.walk(ast.parse(text))
        if isinstance(f, ast.FunctionDef) and f.decorator_list and any(a.arg == "PDL" for a in f.args.args)
    }


def test_each_kernel_that_may_start_early_waits() -> None:
    found = {name: text for path in KERNELS.glob("*/*.py") for name, text in _with_pdl(path).items()}
    assert {"push_gemm.push_kernel", "push_gemm._reduce_pushed_kernel", "peer.meet_kernel"} <= set(found)
    waiting = {name for name, text in found.items() if any(wait in text for wait in WAITS)}
    # in some of them the partitions wait
    partitions = [f"({name.split('.')[1]}, (" for name in waiting]
    idle = {name for name in set(found) - waiting if not any(each in found[name] for each in partitions)}
    made_of = {f"dependent_launch.{name}" for name in ("begin", "begin_with_previous", "release")}
    assert idle == made_of, "what the waits are made of, and no kernel"
