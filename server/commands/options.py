"""Flags of the commands around a server. Imports nothing heavy, because `weft --help` imports it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from weft import output_file

URL = "http://127.0.0.1:8000"


def key_of(arguments: argparse.Namespace) -> str | None:
    """Return the API key to send. WEFT_API_KEY may list several, as for a server; the first is used."""
    return arguments.api_key or os.environ.get("WEFT_API_KEY", "").partition(",")[0].strip() or None


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="model to serve for this conversation: 'demo', a directory or ORG/NAME; with --url, its name there "
        f"[the model at {URL}, else demo]",
    )
    parser.add_argument("--url", metavar="URL", help="a running OpenAI-compatible server")
    parser.add_argument("--api-key", metavar="KEY", help="API key [$WEFT_API_KEY]")
    parser.add_argument("--insecure", action="store_true", help="accept an untrusted certificate")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of ORG/NAME [main]")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja chat template for MODEL, instead of its own; not with --url"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--temperature", metavar="X", type=float, help="sampling temperature [the server's default]")
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, help="maximum tokens per answer [the rest of the context]"
    )


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "requests", metavar="IN.jsonl", type=Path, help="requests in the format of OpenAI's Batch API, one per line"
    )
    text = "responses, appended as they arrive; requests with a response are skipped"
    parser.add_argument("answers", metavar="OUT.jsonl", type=output_file, help=text)
    parser.add_argument("--url", metavar="URL", help=f"a running OpenAI-compatible server [{URL}]")
    parser.add_argument(
        "--model", metavar="MODEL", help="serve this model for the batch instead: 'demo', a directory or ORG/NAME"
    )
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of ORG/NAME [main]")
    parser.add_argument("--api-key", metavar="KEY", help="API key [$WEFT_API_KEY]")
    parser.add_argument("--concurrency", metavar="N", type=int, default=64, help="concurrent requests [64]")
    text = "give up after this many seconds of failed requests only [600]"
    parser.add_argument("--patience", metavar="SECONDS", type=float, default=600.0, help=text)


def add_pull_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="ORG/NAME", help="repository on the hub")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit [main]")


def add_models_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", metavar="DIR", nargs="*", type=Path, help="further folders: a model, or a folder of models"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", metavar="HOST", default="127.0.0.1", help="address to check [127.0.0.1]")
    parser.add_argument("--port", metavar="N", type=int, default=8000, help="port to check [8000]")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_health_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ready", action="store_true", help="check whether it accepts requests, not only whether it is alive"
    )
