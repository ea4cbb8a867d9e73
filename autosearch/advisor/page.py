"""The advice as a self-contained HTML page."""

from __future__ import annotations

from html import escape

from weft.autosearch.advisor import plots
from weft.autosearch.advisor.advice import Advice
from weft.autosearch.advisor.terminal import COLUMNS, rows, sentences

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 66rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.25rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } div.table { overflow-x: auto }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap }
tr.advised { background: #e3f4ee; font-weight: 600 } .lead { font-size: 1.15rem } svg { width: 100%; height: auto }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto }
"""


def page(advice: Advice, yaml: str) -> str:
    """yaml: the configuration; empty if there is none. All input is escaped."""
    curve = advice.curve
    first, *others = sentences(advice)
    cells = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = [
        f"<h1>How many requests at once: {escape(curve.model)}</h1>",
        f"<p>Workload {escape(curve.workload)} (mean {curve.prompt:.0f} prompt, {curve.output:.0f} output tokens), "
        f"{escape(curve.machine.name)}, {escape(curve.machine.versions)}.</p>",
        f'<p class="lead">{escape(first)}</p>',
        "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in others) + "</ul>",
        plots.svg(plots.figure(advice), "Curves of the advice"),
        f'<h2>Measurements</h2><div class="table"><table><tr>{cells}</tr>',
    ]
    for row in rows(advice):
        marked = ' class="advised"' if row[-1].startswith("advised") else ""
        body.append(f"<tr{marked}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    body.append("</table></div>")
    body.append(
        "<p>slot limit: requests that may run; ran: mean number that ran. eff.: T(B) / (B T(1)). itl: time between two "
        "tokens of a request, as the engine commits them. ttft: from the first schedule, without the wait for a slot. "
        "KV: share of the pool held. idle: the device waited for the CPU. J/token: per output token.</p>"
    )
    if yaml:
        body.append(f"<h2>weft serve --config</h2><pre>{escape(yaml)}</pre>")
    text = "\n".join(body)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>weft advise</title>\n<style>{_STYLE}</style>\n{text}\n</html>\n"
    )
