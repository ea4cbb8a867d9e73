"""`Profiling`: a Chrome trace of all threads, visible once it is complete."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import torch

from weft.engine.profiling import Profiling


def test_a_trace_includes_other_threads(tmp_path: Path) -> None:
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.wait()
        torch.ones(4, 4) @ torch.ones(4, 4)
        done.set()

    threading.Thread(target=work).start()
    profiling = Profiling(tmp_path / "trace.json", 0.0)
    begun.set()
    done.wait()
    assert profiling.due
    assert list(tmp_path.iterdir()) == []
    profiling.end()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert "aten::mm" in names
