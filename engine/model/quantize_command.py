"""`weft quantize`: its options, and the table of errors by layer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.engine.model.quantize import QuantizeResult


def add_quantize_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="MODEL", help="a directory, ORG/NAME on the hub, or 'demo'; in 16 or 32 bits")
    parser.add_argument("target", metavar="OUT", type=Path, help="the new directory")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of ORG/NAME [main]")
    parser.add_argument(
        "--keep", metavar="PATTERN", action="append", default=[],
        help="leave modules whose name matches this regular expression in 16 bits; repeatable",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, including each matrix")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Raises `WeftError`, one line."""
    from weft.engine.config import expanded
    from weft.engine.model.hub import find_model
    from weft.engine.model.quantize import quantize, refuse_unknown
    from weft.engine.progress import ProgressBar

    source = find_model(arguments.name, arguments.revision)
    refuse_unknown(source)
    with ProgressBar() as bar:
        made = quantize(source, expanded(arguments.target), tuple(arguments.keep), bar)
    print(json.dumps(_as_json(made), indent=2) if arguments.json else "\n".join(_table(made)))
    return 0


def _as_json(made: QuantizeResult) -> dict[str, Any]:
    from weft.engine.model.quantize import by_layer

    return {
        "path": str(made.path),
        "bytes_before": made.bytes_before,
        "bytes_after": made.bytes_after,
        "kept": made.kept,
        "layers": [
            {"layer": layer, "matrices": count, "error": error, "worst": worst.name, "worst_error": worst.error}
            for layer, count, error, worst in by_layer(made.errors)
        ],
        "matrices": [
            {"name": e.name, "shape": [e.out, e.inner], "error": e.error, "largest": e.largest} for e in made.errors
        ],
    }


def _table(made: QuantizeResult) -> list[str]:
    from weft.engine.model.download import amount
    from weft.engine.model.quantize import by_layer, relative

    lines = ["layer  matrices  error    worst"]
    for layer, count, error, worst in by_layer(made.errors):
        lines.append(f"{layer:>5}  {count:>8}  {error:6.3%}  {worst.error:6.3%} {worst.name}")
    together = relative(sum(e.lost for e in made.errors), sum(e.squares for e in made.errors))
    lines.append(f"  all  {len(made.errors):>8}  {together:6.3%}  (root mean square, of the weights)")
    again = f", {made.resumed} shards of an earlier run" if made.resumed else ""
    lines.append(
        f"{made.path}: {amount(made.bytes_before)} became {amount(made.bytes_after)}{again}; "
        f"in 16 bits: the embedding, {', '.join(made.kept[:3])}{' …' if len(made.kept) > 3 else ''}"
    )
    return lines
