"""Figures of the page at `/`: rates, means and quantiles computed from `/metrics`."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from browser import Page, in_browser
from stub import Script, Server
from ui_page import FOLDER, show

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


def exposition(observed: list[float], bounds: list[float], counters: dict[str, float]) -> str:
    """/metrics of a histogram `weft_h` and of a counter `weft_c_total{a=…}`."""
    lines = ["# TYPE weft_h histogram"]
    for bound in (*bounds, math.inf):
        le = "+Inf" if bound == math.inf else repr(bound)
        lines.append(f'weft_h_bucket{{le="{le}"}} {float(sum(value <= bound for value in observed))}')
    lines += [f"weft_h_count {float(len(observed))}", f"weft_h_sum {sum(observed)!r}"]
    labels = {name: name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name in counters}
    lines += [f'weft_c_total{{a="{labels[name]}",b="x"}} {value}' for name, value in counters.items()]
    return "\n".join(lines) + "\n"


def quantile(observed: list[float], bounds: list[float], q: float) -> float:
    """Interpolated within the bucket of the observation of this rank, in proportion to its position there."""
    rank, low, below = q * len(observed), 0.0, 0
    for bound in bounds:
        upto = sum(value <= bound for value in observed)
        if upto >= rank:
            return low + (bound - low) * (rank - below) / (upto - below)
        low, below = bound, upto
    return low


def cases() -> Iterator[tuple[list[float], list[float]]]:
    random.seed(4)
    for n in (1, 2, 17, 200):
        yield [random.expovariate(8) for _ in range(30)], [random.expovariate(3) for _ in range(n)]


@in_browser
async def test_rates_means_and_quantiles_are_those_of_the_time_between(page: Page) -> None:
    bounds = [0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0]
    source = (FOLDER / "metrics.js").read_text()
    for before, new in cases():
        odd = 'a"b\\c\nd'
        texts = (exposition(before, bounds, {odd: 5, "e": 1}), exposition(before + new, bounds, {odd: 11, "e": 4}))
        figures: dict[str, Any] = await page.run(
            f"(() => {{{source}; const [a, b] = {json.dumps(texts)};"
            "const span = new Span(new Scrape(a, 10), new Scrape(b, 12));"
            "return {q: [0.5, 0.9, 0.99].map(q => span.quantile('weft_h', q)), mean: span.mean('weft_h'),"
            f"rate: span.rate('weft_c_total'), one: span.grown('weft_c_total', {{a: {json.dumps(odd)}}}),"
            "missing: span.rate('weft_none') === undefined,"
            "idle: new Span(span.to, span.to).quantile('weft_h', 0.5) === null}})()"
        )
        assert figures["q"] == pytest.approx([quantile(new, bounds, q) for q in (0.5, 0.9, 0.99)])
        assert figures["mean"] == pytest.approx(sum(new) / len(new))
        assert (figures["rate"], figures["one"]) == (4.5, 6)
        assert figures["missing"] is True
        assert figures["idle"] is True


@in_browser
async def test_a_restart_of_the_server_or_a_pause_starts_over(page: Page) -> None:
    source = (FOLDER / "metrics.js").read_text()
    spans = await page.run(
        f"(() => {{{source}; const recent = new Recent(); const out = [];"
        "for (const [time, ticks] of [[0, 9], [1, 10], [2, 11], [3, 4], [4, 5], [60, 70], [61, 71]]) {"
        "recent.add(new Scrape(`weft_event_loop_lag_seconds_count ${ticks}\\n`, time));"
        "out.push(recent.over(10).from.time);} return out;})()"
    )
    assert spans == [0, 0, 0, 3, 3, 60, 60]


@in_browser
async def test_percentiles_are_limited_to_known_buckets(page: Page) -> None:
    source = (FOLDER / "metrics.js").read_text()
    texts = (exposition([], [0.001, 0.05], {}), exposition([0.02, 0.03, 0.04], [0.001, 0.05], {}))
    figures = await page.run(
        f"(() => {{{source}; const [a, b] = {json.dumps(texts)};"
        "const span = new Span(new Scrape(a, 1), new Scrape(b, 2));"
        "return [span.mean('weft_h'), span.bound('weft_h', 0.99), span.bound('weft_none', 0.5) ?? 'none']})()"
    )
    assert figures == [pytest.approx(0.03), 0.05, "none"]


@in_browser
async def test_a_figure_without_series_is_not_shown(
    server: Server, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = server.service.metrics.render

    def without_computed_tokens() -> bytes:
        return b"\n".join(line for line in render().split(b"\n") if b"weft_device_idle" not in line)

    shown = "[...document.querySelectorAll('.tile')].filter(t => !t.hidden).map(t => t.querySelector('h3').textContent)"
    monkeypatch.setattr(server.service.metrics, "render", without_computed_tokens)
    await page.go(server.url)
    titles = await page.until(f"({shown}).length && {shown}")
    assert "Device idle" not in titles
    assert "Iteration time" in titles
    monkeypatch.undo()
    await page.until(f"({shown}).includes('Device idle')")
    assert page.errors == []


@in_browser
@pytest.mark.parametrize("width", [390, 1000, 1400])
async def test_the_first_traffic_moves_nothing(server: Server, page: Page, width: int) -> None:
    places = (
        "[...document.querySelectorAll('.tile:not([hidden]), #chat, #engine h2')]"
        ".map(e => [e.querySelector('h3')?.textContent ?? e.id, Math.round(e.getBoundingClientRect().top + scrollY)])"
    )
    await page.size(width, 900)
    await show(page, server)
    await page.until("document.querySelectorAll('#internals .tile:not([hidden])').length > 4")
    before = dict(await page.run(places))
    server.engine.script = Script(ids=[5] * 200)
    for _ in range(4):
        await server.complete(max_tokens=200)
    await page.until("/mean\\s*[0-9]/.test(document.querySelectorAll('.tile .values')[1].innerText)")
    after = dict(await page.run(places))
    assert {name: after[name] for name in before if name in after} == before
