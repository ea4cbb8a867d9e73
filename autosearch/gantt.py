"""Draws a period on the terminal and as SVG: lanes as in NanoFlow's Figure 6, with SM shares as heights."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from weft.engine.plans.plan import NanoOperation, Period, Plan

if TYPE_CHECKING:
    from rich.console import Console

LANES = ("compute", "memory", "network", "copies")  # Rows: the lanes of a plan, and the copy engine.
COLORS = {
    "qkv": "#4c78a8", "o": "#72b7b2", "gate_up": "#f2a65a", "down": "#d1725b", "prefill": "#9d83c4",
    "decode": "#5aa469",
}  # fmt: skip
COLLECTIVES = {
    "_reduce": ("all-reduce", "#5b7fb0"), "_scatter": ("reduce-scatter", "#a97fb5"),
    "_gather": ("all-gather", "#7fb0c9"), "_gather_in": ("all-gather", "#7fb0c9"),
}  # fmt: skip
"""Suffix of an operation's name -> its kind and color."""
MAX_COLUMNS = 150  # Maximum width of a picture on a terminal.
OTHER_COLOR = "#8fa3bf"
ENDED_EARLY, OUT_OF_TIME = ", ended early", ", out of time"
"""Suffixes of `Plan.made` if the user or the time limit ended the search."""


class Bar(NamedTuple):
    """One nano-operation in time (ms)."""

    start: float
    ms: float
    op: NanoOperation


class Picture(NamedTuple):
    """The bars to draw. Times in ms."""

    ms: float
    bars: list[Bar]
    timed: bool  # False if the plan has no times; widths are then tokens.
    serial: list[tuple[str, float]]  # Operation and ms of the serial plan, if known.


def picture(period: Period) -> Picture:
    """Return the bars of a period. Without times they are in sequence in each lane, as wide as their tokens."""
    figures = period.figures
    if all(f"start.{i}" in figures and f"ms.{i}" in figures for i in range(len(period.operations))):
        bars = [Bar(figures[f"start.{i}"], figures[f"ms.{i}"], op) for i, op in enumerate(period.operations)]
        serial = [(k.removeprefix("serial."), v) for k, v in figures.items() if k.startswith("serial.")]
        ms = figures.get("predicted_ms", max(b.start + b.ms for b in bars))
        return Picture(ms, bars + _offload(period, bars), True, serial)
    at = dict.fromkeys(LANES, 0.0)
    bars = []
    for op in period.operations:
        bars.append(Bar(at[op.lane], op.end - op.begin, op))
        at[op.lane] += op.end - op.begin
    return Picture(max(at.values()), bars + _offload(period, bars), False, [])


def _offload(period: Period, bars: list[Bar]) -> list[Bar]:
    """Return bars for page offloads, during the first nano-operation that the plan names."""
    gate = period.gate
    return [b._replace(op=NanoOperation("offload", b.op.begin, b.op.end, 0)) for b in bars if b.op is gate]


def lane_of(op: NanoOperation) -> str:
    """The row of an operation."""
    return op.lane if op.sms else "copies"


def legend(picture: Picture) -> list[tuple[str, str]]:
    """Return (kind, color) of everything in the picture."""
    return list({_kind(bar.op.operation): _color(bar.op.operation) for bar in picture.bars}.items())


def wrapped(picture: Picture) -> list[Bar]:
    """Cut bars at the end of the period. The remainder is drawn at its beginning."""
    out = []
    for bar in picture.bars:
        start = bar.start % picture.ms if picture.ms else 0.0
        inside = min(bar.ms, picture.ms - start)
        out.append(bar._replace(start=start, ms=inside))
        if bar.ms - inside > 1e-9:
            out.append(bar._replace(start=0.0, ms=bar.ms - inside))
    return out


def summary(plan: Plan) -> str:
    """Summarize a plan in one line."""
    if not plan.periods:
        if plan.made.endswith(ENDED_EARLY):
            return "the search was ended before a pipeline beat the serial plan; the serial plan runs"
        if plan.made.endswith(OUT_OF_TIME):
            return "no pipeline beat the serial plan within the time limit; the serial plan runs"
        return "no pipeline beats the serial plan for this workload; the serial plan runs"
    gains = [p.figures["gain"] for p in plan.periods if "gain" in p.figures]
    kind = "measured" if any("measured_ms" in p.figures for p in plan.periods) else "predicted"
    count = len(plan.periods)
    text = f"{count} pipeline{'s' if count > 1 else ''}"
    text += "".join(f", {name} as {reduction.replace('_', ' ')}" for name, reduction in plan.sums.items())
    return f"{text}, {kind} gain over the serial plan {min(gains):.3f}-{max(gains):.3f}" if gains else text


# -- terminal


def draw(period: Period, console: Console, title: str = "") -> None:
    """Draw bars, one row per lane, then a table of the operations in launch order."""
    from rich.table import Table
    from rich.text import Text

    shown = picture(period)
    width = min(max(40, console.width - 10), MAX_COLUMNS)
    unit, digits = ("ms", 3) if shown.timed else ("tokens", 0)
    console.print(f"\n[bold]{escape(title) or 'pipeline'}[/bold]: {_loads(period)}", highlight=False)
    if times := _times(period):
        console.print(times, highlight=False)
    bars = wrapped(shown)
    for lane in LANES:
        own = sorted((b for b in bars if lane_of(b.op) == lane), key=lambda b: b.start)
        if not own:
            continue
        text, at = Text(f"{lane:8} "), 0
        for bar in own:
            begin, end = (round(t / shown.ms * width) for t in (bar.start, bar.start + bar.ms))
            begin = max(begin, at)
            text.append("·" * (begin - at), style="dim")
            label = f"{bar.op.operation}{chr(39) if bar.op.next_layer else ''}"
            text.append(label[: max(0, end - begin)].center(end - begin), style=f"black on {_color(bar.op.operation)}")
            at = max(at, end)
        text.append("·" * max(0, width - at), style="dim")
        console.print(text, no_wrap=True, overflow="crop")
    key = Text(f"{'':8} ")
    for what, color in legend(shown):
        key.append(f" {what} ", style=f"black on {color}").append(" ")
    console.print(key)
    table = Table(box=None, pad_edge=False)
    for name in ("#", "operation", "tokens", "SMs", "lane", "layer", f"start {unit}", unit, "kernel"):
        table.add_column(name, justify="right" if name in ("#", "SMs", f"start {unit}", unit) else "left")
    for i, bar in enumerate(shown.bars):
        op, config = bar.op, bar.op.config
        kernel = f"{config.tokens}x{config.features}x{config.depth}" if config else ""
        kernel += " special" if config and config.special else ""
        table.add_row(
            str(i), op.operation, f"{op.begin}-{op.end}", str(op.sms or "-"), lane_of(op),
            "next" if op.next_layer else "this",
            f"{bar.start:.{digits}f}", f"{bar.ms:.{digits}f}", kernel,
        )  # fmt: skip
    console.print(table)
    for edge in period.waits:
        away = " of the previous period" if edge.distance else ""
        console.print(f"{edge.after} waits for {edge.before}{away}", highlight=False)


def _loads(period: Period) -> str:
    """The loads of a period, and its gain."""
    parts = [f"up to {period.tokens} tokens"]
    if period.min_tokens > 1:
        parts[0] = f"{period.min_tokens}-{period.tokens} tokens"
    if period.min_kv_tokens or period.max_kv_tokens < 2**62:
        top = f"-{period.max_kv_tokens - 1:,}" if period.max_kv_tokens < 2**62 else " or more"
        parts.append(f"{period.min_kv_tokens:,}{top} KV tokens")
    if "gain" in period.figures:
        parts.append(f"gain {period.figures['gain']:.3f}")
    return "; ".join(parts)


def _times(period: Period) -> str:
    f = period.figures
    parts = []
    for kind in ("predicted", "measured"):
        if f"{kind}_ms" in f:
            parts.append(f"{kind} {f[f'{kind}_ms']:.3f} ms per layer")
            if f"serial_{kind}_ms" in f:
                parts[-1] += f" (serial {f[f'serial_{kind}_ms']:.3f})"
            if f"{kind}_joules" in f:
                parts[-1] += f", {f[f'{kind}_joules'] / period.tokens * 1e3:.3f} mJ per token and layer"
    return "; ".join(parts)


def _kind(operation: str) -> str:
    return next((kind for end, (kind, _) in COLLECTIVES.items() if operation.endswith(end)), operation)


def _color(operation: str) -> str:
    known = COLORS.get(operation.removesuffix("_columns"))
    return known or next((color for end, (_, color) in COLLECTIVES.items() if operation.endswith(end)), OTHER_COLOR)


# -- SVG

WIDTH, LEFT, LANE_HEIGHT, GAP, TOP = 1180, 92, 92, 14, 79


def svg(period: Period, title: str = "") -> str:
    """Return an SVG document. The x axis is time; the height of a bar is its share of the SMs."""
    shown = picture(period)
    bars = wrapped(shown)
    lanes = [lane for lane in LANES if any(lane_of(b.op) == lane for b in bars)]
    serial_ms = sum(ms for _, ms in shown.serial)
    scale = (WIDTH - LEFT - 24) / max(shown.ms, serial_ms, 1e-9)
    sms = max(op.sms for op in period.operations)
    starts = sorted(set(period.begins))
    out: list[str] = []
    y = TOP
    for lane in lanes:
        out.append(_rect(LEFT, y, shown.ms * scale, LANE_HEIGHT, "#f3f4f6"))
        out.append(_text(LEFT - 10, y + LANE_HEIGHT / 2 + 4, lane, "end", 13, bold=True))
        for bar in bars:
            if lane_of(bar.op) == lane:
                height = max(10.0, LANE_HEIGHT * bar.op.sms / sms)
                out += _bar(bar, LEFT + bar.start * scale, y + LANE_HEIGHT - height, bar.ms * scale, height, starts)
        y += LANE_HEIGHT + GAP
    if shown.serial:
        x = float(LEFT)
        out.append(_text(LEFT - 10, y + 24, "serial", "end", 13, bold=True))
        for name, ms in shown.serial:
            out.append(_rect(x, y, ms * scale, 38, _color(name), f"{name}: {ms:.3f} ms"))
            if ms * scale > 7 * len(name) + 6:
                out.append(_text(x + ms * scale / 2, y + 24, name, "middle", 11))
            x += ms * scale
        y += 38 + GAP
    out += _axis(max(shown.ms, serial_ms), scale, y, "ms" if shown.timed else "tokens")
    end = LEFT + shown.ms * scale
    out.append(f'<line x1="{end:.1f}" y1="{TOP - 6}" x2="{end:.1f}" y2="{y}" stroke="#222" stroke-dasharray="4 3"/>')
    out += _legend(shown, y + 40, len(starts) > 1)
    height = y + 66
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif">',
        _rect(0, 0, WIDTH, height, "#ffffff"),
        _text(LEFT, 24, title or "pipeline of one layer", "start", 15, bold=True),
        _text(LEFT, 44, _loads(period), "start", 12),
        _text(LEFT, 61, _times(period), "start", 12),
    ]
    return "\n".join([*head, *out, "</svg>", ""])


def _legend(picture: Picture, y: float, shaded: bool) -> list[str]:
    out, x = [], float(LEFT)
    for what, color in legend(picture):
        out += [_rect(x, y, 14, 14, color, what), _text(x + 19, y + 11, what, "start", 11)]
        x += 30 + 5.8 * len(what)
    rules = "height: share of the SMs" + ("; paler: later token ranges" if shaded else "")
    out.append(_text(x, y + 11, rules, "start", 11))
    return out


def _bar(bar: Bar, x: float, y: float, width: float, height: float, starts: list[int]) -> list[str]:
    op = bar.op
    share = f"{op.sms} SMs" if op.sms else "copy engine"
    tip = f"{op.label}: {bar.ms:.3f}, {share}"
    out = [
        _rect(x, y, width, height, _color(op.operation), tip, shade=starts.index(op.begin) if len(starts) > 1 else 0)
    ]
    name = op.operation + ("'" if op.next_layer else "")
    lines = [(name, 12, True), (f"{op.begin}-{op.end}", 10, False), (share, 10, False)]
    num_lines = int((height - 4) // 14)
    lines = [line for line in lines[: max(1, num_lines)] if width > 6.2 * len(line[0])]
    middle = y + height / 2 + 4 - 7 * (len(lines) - 1)
    for i, (text, size, bold) in enumerate(lines):
        out.append(_text(x + width / 2, middle + 14 * i, text, "middle", size, bold=bold))
    return out


def _axis(length: float, scale: float, y: float, unit: str) -> list[str]:
    step = next(s for k in range(-4, 7) for s in (10.0**k, 2 * 10.0**k, 5 * 10.0**k) if length / s <= 12)
    out = []
    for i in range(int(length / step) + 1):
        x = LEFT + i * step * scale
        out.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}" stroke="#555"/>')
        out.append(_text(x, y + 19, f"{i * step:g}" + (f" {unit}" if not i else ""), "middle", 11))
    return out


def _rect(x: float, y: float, width: float, height: float, fill: str, tip: str = "", shade: int = 0) -> str:
    """shade: index of the token range; later ranges are paler, as the second nano-batch in Figure 6."""
    opacity = f' fill-opacity="{max(0.4, 1 - 0.28 * shade):.2f}"' if shade else ""
    stroke = ' stroke="#333" stroke-width="0.7"' if tip else ""
    tip = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{opacity}{stroke}>'
        f"{tip}</rect>"
    )


def _text(x: float, y: float, text: str, anchor: str, size: int, *, bold: bool = False) -> str:
    style = f'font-size="{size}" fill="#111"' + (' font-weight="bold"' if bold else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(text)}</text>'
