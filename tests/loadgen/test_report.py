"""The HTML report in a real browser: it loads nothing, every plot is there, and no label hides another."""

from __future__ import annotations

from array import array
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Page, browsing

from weft.loadgen.measures import Measures
from weft.loadgen.page import page
from weft.loadgen.record import Outcome, Record
from weft.loadgen.run import Run, RunOptions
from weft.loadgen.server_view import ServerView
from weft.loadgen.slo import parse
from weft.loadgen.sweep import SweepOptions, search
from weft.loadgen.workload import Clipping

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

OPTIONS = RunOptions((*parse("ttft:p99:500ms"), *parse("tpot:p90:60ms")))
OVERLAPS = """
[...document.querySelectorAll('svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  return texts.flatMap(([a, p], i) => texts.slice(i + 1)
    .filter(([b, q]) => Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
      && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3)
    .map(([b, q]) => svg.ariaLabel + ': ' + a + ' / ' + b));
})
"""


def run_at(rate: float, name: str, capacity: float, *, failures: int = 0) -> Run:
    """40 requests that get slower beyond the capacity, whose gaps differ by four decades."""
    rng = np.random.default_rng(int(rate * 100))
    records = []
    for i in range(40):
        record = Record(i, i / rate, 100, 20, outcome=Outcome.OVERLOADED if i < failures else Outcome.OK)
        record.start = record.due
        if record.ok:
            slow = max(1.0, rate / capacity) ** 3
            record.first = record.start + 0.05 * slow * rng.lognormal(0, 0.5)
            gaps = 0.02 * slow * 10 ** rng.uniform(-3, 1, 19)
            record.times = array("d", record.first + np.concatenate(([0.0], np.cumsum(gaps))))
            record.end = record.times[-1]
        else:
            record.error = "The queue is full."
        records.append(record)
    measures, span = Measures(records), max(r.end for r in records if r.ok)
    view = ServerView({"ttft": 0.05, "queue": 0.01}, {"ttft": 38, "queue": 38}, {"prompt_tokens": 3800})
    return Run(
        name, "http://s", "m", "", rate, 0, 40 / rate, span, measures, measures, np.full(100, 0.001), 0.1, OPTIONS,
        Clipping(), view,
    )  # fmt: skip


@pytest.fixture
def report_of_a_run() -> str:
    return page(
        [run_at(4.0, "a <server>", 20.0, failures=2)],
        [],
        {"arrivals": "poisson", "extra": {}, "exact_output_asked": True},
    )


@pytest.fixture
def report_of_a_sweep() -> str:
    sweeps = [
        search(name, SweepOptions(5.0, 2.0, 0.2), partial(run_at, name=name, capacity=capacity))
        for name, capacity in (("fast", 60.0), ("slow", 20.0))
    ]
    assert all(sweep.best and sweep.missed for sweep in sweeps)
    return page([run for sweep in sweeps for run in sweep.runs], sweeps, {})


async def shown(browser: Page, text: str, file: Path, width: int) -> list[str]:
    """The plots that the page shows at this width, after checks that apply to any report."""
    file.write_text(text, encoding="utf-8")
    await browser.open()
    await browser.size(width, 900)
    await browser.go(file.as_uri())
    assert browser.errors == []
    assert {url for url in browser.requests if not url.startswith("data:image/png;base64,")} == {file.as_uri()}
    assert await browser.run("document.documentElement.scrollWidth") <= width
    plots = await browser.run(
        "[...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().height > 50).map(s => s.ariaLabel)"
    )
    assert len(plots) == text.count("<svg")
    return list(plots)


async def test_the_reports_are_readable(report_of_a_run: str, report_of_a_sweep: str, tmp_path: Path) -> None:
    of_a_run = [
        "Distributions of the measures",
        "Throughput and requests running over time",
        "Timeline of requests",
        "Share of requests that meet a pair of limits",
    ]
    of_a_sweep = [
        "Latency against offered rate",
        *["Share of requests within each limit, at each rate"] * 2,
        *of_a_run,
        *of_a_run[1:],
    ]
    file = tmp_path / "report.html"
    async with browsing(tmp_path / "chromium") as browser:
        for width in (390, 1200):
            assert await shown(browser, report_of_a_run, file, width) == of_a_run
        assert "a <server> received 4 requests/s" in await browser.text(".lead")
        assert await browser.run(OVERLAPS) == []
        assert await shown(browser, report_of_a_sweep, file, 1200) == of_a_sweep
        assert await browser.run(OVERLAPS) == []
        assert "fast: highest rate within the objectives" in await browser.text(".lead")
