"""Reports a sweep of hybrid batches: floors, the paper's tables, its figures as pictures. Needs no GPU."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from weft.tools.kernels.hybrid_batches import SMALL_CHUNKS, Hybrid

Row = dict[str, Any]
POD = "pod rule"
SMALL = SMALL_CHUNKS
"""Chunk sizes with a separate floor."""
FLOORS = {"mean": 1.15, "small": 1.35, "sustained": 1.03, "worst": 1.01}
PEAK_FLOP_US, PEAK_BYTES_US = 989e6, 4.8e6
"""Peaks of an H200: dense bf16, and its memory."""
COLOURS = {
    "whole": "#000000", "cut": "#888888", POD: "#2f6db3", "streams": "#d98032", "batched": "#b04a7a",
    "flash-attn": "#3a9154", "flash-attn streams": "#9ccf8f", "sdpa": "#8a63c9",
}  # fmt: skip


def ways(row: Row) -> dict[str, float]:
    """Return microseconds by way; for two streams, the best SM shares."""
    us = {name: value for name, value in row["us"].items() if not name.startswith("streams ")}
    streams = [value for name, value in row["us"].items() if name.startswith("streams ")]
    return us | ({"streams": min(streams)} if streams else {})


def others(row: Row) -> dict[str, float]:
    """Return all ways to run the whole batch except our single launch."""
    alone = ("decode", "prefill")
    return {name: us for name, us in ways(row).items() if not name.startswith("pod ") and name not in alone}


def _hybrid(rows: Iterable[Row], regime: str = "burst", part: str = "") -> list[Row]:
    return [r for r in rows if r["regime"] == regime and r["part"].startswith(part) and POD in r["us"]]


def summary(rows: list[Row]) -> dict[str, Any]:
    """Return the figures with floors, and related ones; figures that were not measured are missing."""
    found: dict[str, Any] = {}
    bursts = _hybrid(rows, part="sweep")
    for serial in ("whole", "cut"):
        gains = np.array([r["us"][serial] / r["us"][POD] for r in bursts])
        small = np.array([r["us"][serial] / r["us"][POD] for r in bursts if r["chunk"] in SMALL])
        if len(gains):
            found[f"mean over {serial}"] = float(gains.mean())
            found[f"best over {serial}"] = float(gains.max())
        if len(small):
            found[f"chunks of 128 and 256 over {serial}"] = float(small.mean())
        held = [r["us"][serial] / r["us"][POD] for r in _hybrid(rows, "sustained")]
        saved = [1 - r["joules"][POD] / r["joules"][serial] for r in _hybrid(rows, "sustained")]
        if held:
            found[f"sustained over {serial}"] = float(np.mean(held))
            found[f"joules saved over {serial}"] = float(np.mean(saved))
    if bursts:
        worst = [(r["us"][POD] / min(others(r).values()), r) for r in bursts]
        found["batches"] = len(bursts)
        found["batches in every way"] = sum("decode" in r["us"] for r in bursts)
        found["worst ratio to the best other"] = max(ratio for ratio, _ in worst)
        found["worst batches"] = [
            f"{_name(r)}: {ratio:.3f} of {min(others(r), key=lambda n: others(r)[n])}"
            for ratio, r in sorted(worst, key=lambda pair: -pair[0])[:5]
        ]
        found["batches slower by more than 1 %"] = sum(ratio > FLOORS["worst"] for ratio, _ in worst)
        best = [min(us for name, us in r["us"].items() if name.startswith("pod ")) for r in bursts]
        best_gain = [r["us"]["whole"] / us for r, us in zip(bursts, best, strict=True)]
        found["mean over whole, best setting of each batch"] = float(np.mean(best_gain))
        if learnt := _of_table(bursts):
            found["mean over whole, setting of the nearest other batch"] = learnt
        ideal = [r for r in bursts if {"decode", "prefill"} <= r["us"].keys()]
        if ideal:
            near = [r["us"][POD] <= 1.1 * max(r["us"]["decode"], r["us"]["prefill"]) for r in ideal]
            found["share within 10 % of the longer half alone"] = float(np.mean(near))
        found["other bits than the two halves"] = sum(not r["same"] for r in bursts if "same" in r)
        found["host ms before a batch's first launch"] = float(np.median([r["load_ms"] for r in bursts]))
        if all("mhz" in r for r in bursts):
            found["MHz in bursts"] = float(np.median([r["mhz"] for r in bursts]))
            found["watts in bursts"] = float(np.median([r["watts"] for r in bursts]))
    held = _hybrid(rows, "sustained")
    if held:
        found["batches sustained"] = len(held)
        found["MHz sustained"] = float(np.median([r["mhz"][POD] for r in held]))
        found["watts sustained"] = float(np.median([r["watts"][POD] for r in held]))
    return found


def _of_table(rows: list[Row]) -> float | None:
    """Return the gain of a table of these rows: each batch takes the best setting of its model's nearest other batch.

    None: too few were measured in every setting.
    """
    gains = []
    for model in sorted({r["model"] for r in rows}):
        mine = [r for r in rows if r["model"] == model and {"pod all", "pod few", "pod half"} <= r["us"].keys()]
        if len(mine) < 10:
            continue
        at = np.log2([[r["chunk"], r["context"], r["decodes"]] for r in mine])
        best = [min((n for n in r["us"] if n.startswith("pod ")), key=r["us"].__getitem__) for r in mine]
        for i, row in enumerate(mine):
            away = np.abs(at - at[i]).sum(1)
            away[i] = np.inf
            gains.append(row["us"]["whole"] / row["us"].get(best[int(away.argmin())], row["us"][POD]))
    return float(np.mean(gains)) if gains else None


def _name(row: Row) -> str:
    return f"{row['model']} {row['chunk']}+{row['context']}, {row['decodes']} x {row['length']}"


def floor_lines(found: dict[str, Any]) -> list[str]:
    """Return a line per floor: the result and the requirement."""
    asked = (
        ("mean over {}", "in bursts, mean over {}", FLOORS["mean"]),
        ("chunks of 128 and 256 over {}", "in bursts, chunks of 128 and 256 over {}", FLOORS["small"]),
        ("sustained over {}", "sustained over {}", FLOORS["sustained"]),
    )
    lines = []
    for key, words, floor in asked:
        for serial, said in (("whole", "serial, tiles whole"), ("cut", "serial, tiles cut")):
            if (value := found.get(key.format(serial))) is not None:
                verdict = "reached" if value >= floor else "MISSED"
                lines.append(f"{words.format(said)}: {value:.3f} ({floor} asked for: {verdict})")
    if (worst := found.get("worst ratio to the best other")) is not None:
        verdict = "reached" if worst <= FLOORS["worst"] else "MISSED"
        late = found["batches slower by more than 1 %"]
        lines.append(
            f"beside the best other at worst: {worst:.3f} of its time ({FLOORS['worst']} allowed: {verdict}; "
            f"{late} of {found['batches']} batches are slower by more)"
        )
    return lines


def tables(rows: list[Row]) -> str:
    """Return the paper's tables of attention, and the sweep by chunk. Tables 5 to 7 are about serving."""
    text = [_by_chunk(rows), _table_one(rows), _table_eight(rows), _policies(rows)]
    return "\n".join(part for part in text if part)


def _table(title: str, head: list[str], body: list[list[str]]) -> str:
    if not body:
        return ""
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in [head, *body]]
    return "\n".join([title, *lines, ""])


def _by_chunk(rows: list[Row]) -> str:
    bursts, held = _hybrid(rows, part="sweep"), _hybrid(rows, "sustained")
    names = [name for name in COLOURS if name != "whole" and any(name in ways(r) for r in bursts)]
    body = []
    for model, chunk in sorted({(r["model"], r["chunk"]) for r in bursts}):
        mine = [r for r in bursts if (r["model"], r["chunk"]) == (model, chunk)]
        line = [model, str(chunk), str(len(mine))]
        for name in names:
            gains = [r["us"]["whole"] / ways(r)[name] for r in mine if name in ways(r)]
            line.append(f"{np.mean(gains):.3f}" if gains else "-")
        late = [r["us"]["whole"] / r["us"][POD] for r in held if (r["model"], r["chunk"]) == (model, chunk)]
        joules = [r["joules"][POD] / r["joules"]["whole"] for r in held if (r["model"], r["chunk"]) == (model, chunk)]
        line += [f"{np.mean(late):.3f}" if late else "-", f"{np.mean(joules):.3f}" if joules else "-"]
        body.append(line)
    head = ["model", "chunk", "batches", *names, "pod, sustained", "joules of whole's"]
    return _table("Speed over our serial kernels with whole tiles, means, in bursts", head, body)


def _table_one(rows: list[Row]) -> str:
    body = []
    for row in rows:
        if row["part"].startswith("table 1"):
            batch = Hybrid(**{field: row[field] for field in Hybrid._fields})
            for name, us in ways(row).items():
                if name in others(row) or name == POD:
                    flop, read = batch.flop / us / PEAK_FLOP_US, batch.read_bytes / us / PEAK_BYTES_US
                    name_of = f"{row['part'][8:]} {row['model']}"
                    body.append([name_of, name, f"{us:.0f}", f"{100 * flop:.0f} %", f"{100 * read:.0f} %"])
    return _table("Table 1 and Figure 1: use of compute and of memory", ["batch", "way", "us", "FLOP", "bytes"], body)


def _table_eight(rows: list[Row]) -> str:
    body = []
    for row in rows:
        if row["part"].startswith("table 8"):
            us = row["us"]
            body.append(
                [row["part"][14:], f"{us['whole']:.0f}"]
                + [f"{us[n]:.0f} ({us[n] / us['whole']:.2f}x)" if n in us else "-" for n in ("cut", POD, "flash-attn")]
            )
    head = ["chunk id", "serial", "serial, tiles cut to two waves", "one launch", "flash-attn"]
    return _table("Table 8: the last chunks of a prompt of 16K, 512 tokens, beside 64 decodes; us", head, body)


def _policies(rows: list[Row]) -> str:
    names = ("pod rule", "pod half", "pod share", "pod all", "pod few", "pod tiles", "pod together")
    body = []
    for row in rows:
        if row["part"] == "figure 14":
            body.append([row["model"], str(row["decodes"]), *(f"{row['us'].get(n, np.nan):.0f}" for n in names)])
    head = ["model", "decodes", "rule", "50:50", "proportional", "all decode", "40 do", "as tiles", "together"]
    return _table("Figure 14: who begins with decodes, chunk 1024, contexts of 8K; us", head, body)


def write(rows: list[Row], left_out: dict[str, str], folder: Path, say: Callable[[str], None]) -> None:
    """Report tables and summary to `say` and the folder; rows as CSV; pictures if matplotlib is installed."""
    found = summary(rows)
    text = [tables(rows), "Ways that were left out:", *(f"  {name}: {why}" for name, why in left_out.items()), ""]
    for key, value in found.items():
        text.append(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")
    text += ["", *floor_lines(found)]
    say("\n".join(text))
    (folder / "summary.txt").write_text("\n".join(text) + "\n")
    (folder / "summary.json").write_text(json.dumps({"summary": found, "left_out": left_out}, indent=1))
    _write_csv(rows, folder / "rows.csv")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        say("no pictures: matplotlib is not installed")
        return
    for name, draw in (("figure10", draw_tiles), ("figure11", draw_gains), ("figure6", draw_prompt)):
        draw(rows, folder / f"{name}.png")


def _write_csv(rows: list[Row], file: Path) -> None:
    flat = []
    for row in rows:
        line = {key: value for key, value in row.items() if not isinstance(value, dict)}
        for key in ("us", "joules", "mhz", "watts", "plan"):
            if isinstance(row.get(key), dict):
                line |= {f"{key} {name}": value for name, value in row[key].items()}
        flat.append(line)
    fields = list(dict.fromkeys(key for line in flat for key in line))
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, fields)
        writer.writeheader()
        writer.writerows(flat)


def draw_gains(rows: list[Row], file: Path) -> None:
    """Draw Figure 11: how many batches gain how much over our serial kernels, by way; below the power cap and at it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, regime in zip(figure.subplots(1, 2, sharey=True), ("burst", "sustained"), strict=True):
        measured = _hybrid(rows, regime, "sweep")
        for name, colour in COLOURS.items():
            gains = sorted(r["us"]["whole"] / ways(r)[name] for r in measured if name in ways(r))
            if gains and name != "whole":
                axes.plot(gains, np.linspace(0, 1, len(gains)), color=colour, label=f"{name} ({len(gains)})")
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_title({"burst": "in bursts, below the power cap", "sustained": "sustained"}[regime])
        axes.set_xlabel("speed over decodes and whole tiles in turn")
        if axes.lines[:-1]:
            axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("share of batches")
    figure.savefig(file)


def draw_tiles(rows: list[Row], file: Path) -> None:
    """Draw Figure 10: the cost of 128-row tiles for decodes: FLOPs and bytes read, by number of decodes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    compute, memory = figure.subplots(1, 2)
    mine = [r for r in rows if r["part"] == "figure 10"]
    labels = [f"{r['model']}\n{r['decodes']} x {r['length']}" for r in mine]
    for shift, (way, columns, colour) in enumerate((("decode", 8, "#2f6db3"), ("batched", 128, "#b04a7a"))):
        at = np.arange(len(mine)) + 0.4 * shift
        batches = [Hybrid(**{field: r[field] for field in Hybrid._fields}) for r in mine]
        us = np.array([r["us"].get(way, np.nan) for r in mine])
        # all columns are multiplied for each head of K and V, with or without a query in them
        flop = np.array([columns * b.read_bytes for b in batches])
        compute.bar(at, 100 * flop / us / PEAK_FLOP_US, 0.4, color=colour, label=f"tiles of {columns} rows")
        memory.bar(at, 100 * np.array([b.read_bytes for b in batches]) / us / PEAK_BYTES_US, 0.4, color=colour)
    for axes, title in ((compute, "tensor cores, % of peak"), (memory, "memory, % of peak")):
        axes.set_title(title)
        axes.set_xticks(np.arange(len(mine)) + 0.2, labels, fontsize=7)
    compute.legend()
    figure.savefig(file)


def draw_prompt(rows: list[Row], file: Path) -> None:
    """Draw Figure 6: the chunks of one prompt of 16K with 54 and 55 decodes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, decodes in zip(figure.subplots(1, 2, sharey=True), (54, 55), strict=True):
        mine = sorted((r for r in rows if r["part"] == "figure 6" and r["decodes"] == decodes),
                      key=lambda r: r["context"])  # fmt: skip
        for name, colour in COLOURS.items():
            points = [(r["context"] // r["chunk"], ways(r)[name]) for r in mine if name in ways(r)]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, label=name)
        axes.set_title(f"{decodes} decodes")
        axes.set_xlabel("chunk of the prompt")
    figure.axes[0].set_ylabel("microseconds of a layer")
    if figure.axes[0].lines:
        figure.axes[0].legend(fontsize=8)
    figure.savefig(file)
