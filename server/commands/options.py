"""Flags of the commands that people use around a server. Imports nothing heavy: `weft --help` reads this."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from weft import output_file

URL = "http://127.0.0.1:8000"


def key_of(arguments: argparse.Namespace) -> str | None:
    """The key to be sent; of several in the variable, as a server takes them, the first."""
    return arguments.api_key or os.environ.get("WEFT_API_KEY", "").partition(",")[0].strip() or None


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a model to serve for this conversation: 'demo', a directory or ORG/NAME; with --url, its name there "
        f"[what {URL} serves, else demo]",
    )
    parser.add_argument("--url", metavar="URL", help="a server that runs already, of weft or any other")
    parser.add_argument("--api-key", metavar="KEY", help="its key [$WEFT_API_KEY]")
    parser.add_argument("--insecure", action="store_true", help="accept a certificate that nobody vouches for")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of ORG/NAME [main]")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--temperature", metavar="X", type=float, help="[the server's own]")
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, help="of one answer [as many as the context has room for]"
    )


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "requests", metavar="IN.jsonl", type=Path, help="requests in the form of OpenAI's Batch API, one a line"
    )
    parser.add_argument(
        "answers",
        metavar="OUT.jsonl",
        type=output_file,
        help="answers, appended as they come; what it has is not asked again",
    )
    parser.add_argument("--url", metavar="URL", help=f"a server that runs already, of weft or any other [{URL}]")
    parser.add_argument(
        "--model", metavar="MODEL", help="serve this one for the batch instead: 'demo', a directory or ORG/NAME"
    )
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of ORG/NAME [main]")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key [$WEFT_API_KEY]")
    parser.add_argument("--concurrency", metavar="N", type=int, default=64, help="requests open at once [64]")
    parser.add_argument(
        "--patience",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="give up when the server has refused everything for so long [600]",
    )


def add_pull_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="ORG/NAME", help="repository of the hub")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit [main]")


def add_models_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", metavar="DIR", nargs="*", type=Path, help="look there too: a model, or a folder of some"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", metavar="HOST", default="127.0.0.1", help="address that is to be served on [127.0.0.1]"
    )
    parser.add_argument("--port", metavar="N", type=int, default=8000, help="port that is to be served on [8000]")
    parser.add_argument("--json", action="store_true", help="as JSON")


def add_health_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ready", action="store_true", help="ask whether new work is taken, not only whether it lives")
