"""`weft batch` sends the requests in a file and appends the responses to another file. A rerun resumes it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from weft import unwritable
from weft.engine.errors import ConfigError, WeftError
from weft.server.batches.lines import AnswerFile, LineError, NoAnswers, RequestFile
from weft.server.commands.batch_client import BatchClient
from weft.server.commands.endpoint import Endpoint, Refused
from weft.server.commands.options import URL, key_of
from weft.server.commands.own_server import own_server

MAX_CONCURRENCY = 65_536
PROGRESS_SECONDS = 30.0  # Seconds between progress lines if there is no terminal.


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns 0 if all requests succeeded, 1 if some responses are errors."""
    if arguments.model is not None and arguments.url is not None:
        raise ConfigError("give --model or --url, not both: --model starts a separate server")
    if arguments.concurrency < 1 or not arguments.patience >= 0:
        raise ConfigError("--concurrency must be at least 1, and --patience at least 0")
    if arguments.concurrency > MAX_CONCURRENCY:
        raise ConfigError(f"--concurrency must be at most {MAX_CONCURRENCY}")
    for path in (arguments.requests, arguments.answers):
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a regular file: requests and responses are read more than once")
    requests = open_requests(arguments.requests)
    answers = open_answers(arguments.answers, requests)
    try:
        missing = len(requests) - len(answers.done)
        if len(answers.done) and missing:
            print(f"weft batch: {len(answers.done)} of {len(requests)} are answered; resuming", file=sys.stderr)
        begun = time.monotonic()
        if missing:
            with _server(arguments, requests) as url:
                _send(arguments, url, requests, answers)
        summary = f"{len(requests)} requests: {len(requests) - answers.failed} answered, {answers.failed} failed"
        print(f"{summary}; {missing} in this run, {time.monotonic() - begun:.1f} s: {arguments.answers}")
        return 1 if answers.failed else 0
    finally:
        answers.close(sync=True)
        requests.close()


def open_requests(path: Path) -> RequestFile:
    """Raises `ConfigError`."""
    try:
        requests = RequestFile(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if requests.errors:
        (number, first), more = requests.errors[0], len(requests.errors) - 1
        raise ConfigError(f"{path}, line {number} {first}{f'; {more} more lines are invalid' if more else ''}")
    return requests


def open_answers(path: Path, requests: RequestFile) -> AnswerFile:
    """Raises `ConfigError`."""
    try:
        answers = AnswerFile(path)
    except OSError as error:
        raise ConfigError(unwritable(path, error)) from None
    except NoAnswers as error:
        raise ConfigError(f"{path}: {error}") from None
    if strange := answers.done - requests.ids:
        answers.close()
        raise ConfigError(f"{path} has responses to other requests, such as {min(strange)!r}: give another file")
    return answers


@contextlib.contextmanager
def _server(arguments: argparse.Namespace, requests: RequestFile) -> Iterator[str]:
    """Yield the URL of a running server, or of one started by this command."""
    if arguments.model is None:
        yield arguments.url or URL
        return
    # Serve the model under the name that the requests use.
    names = sorted(requests.models)
    if len(names) > 1:
        raise ConfigError(
            f"{arguments.requests} names {len(names)} models ({', '.join(names[:3])}); --model serves only one"
        )
    with own_server(arguments.model, arguments.revision, Console(stderr=True), names) as url:
        yield url


def _send(arguments: argparse.Namespace, url: str, requests: RequestFile, answers: AnswerFile) -> None:
    """Raises `WeftError`."""
    key = key_of(arguments)
    console = Console(stderr=True)
    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"))
    shown = console.is_terminal
    reported = time.monotonic()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not shown) as bar:
        task = bar.add_task("", total=len(requests), completed=len(answers.done), failed="")

        def on_answer() -> None:
            nonlocal reported
            bar.update(task, completed=len(answers.done), failed=f"{answers.failed} failed" if answers.failed else "")
            if not shown and time.monotonic() - reported > PROGRESS_SECONDS:
                reported = time.monotonic()
                print(f"weft batch: {len(answers.done)} of {len(requests)}", file=sys.stderr, flush=True)

        endpoint = Endpoint(url, key, None)
        client = BatchClient(url, key, answers, patience=arguments.patience, on_answer=on_answer)
        try:
            endpoint.connect()
            asyncio.run(client.run(requests, min(arguments.concurrency, len(requests))))
        except Refused as error:
            so_far = f"{len(answers.done)} of {len(requests)} are answered; run the same command to resume"
            raise WeftError(f"{url}: {error}. {so_far}") from None
        except LineError as error:
            raise WeftError(f"{arguments.requests} was changed during the run: a line {error}") from None
        except OSError as error:
            raise WeftError(unwritable(arguments.answers, error)) from None
