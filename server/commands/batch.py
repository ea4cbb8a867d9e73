"""`weft batch`: the requests of a file, answered into another one; stopped anywhere, the same command goes on."""

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
from weft.server.batches.answers import AnswerFile, NoAnswers
from weft.server.batches.lines import LineError
from weft.server.batches.requests import RequestFile
from weft.server.commands.batch_client import BatchClient
from weft.server.commands.endpoint import Endpoint, Refused
from weft.server.commands.options import URL, key_of
from weft.server.commands.own_server import own_server

SAY_SECONDS = 30.0
"""between lines about the progress where there is no terminal"""


def run(arguments: argparse.Namespace) -> int:
    """The command. 0: every request has its answer; 1: some of them have an error for one."""
    if arguments.model is not None and arguments.url is not None:
        raise ConfigError("--model starts a server of its own: give it or --url")
    if arguments.concurrency < 1 or not arguments.patience >= 0:
        raise ConfigError("--concurrency must be 1 or more, and --patience no less than 0")
    for path in (arguments.requests, arguments.answers):
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no regular file: requests are read more than once, and answers too")
    requests = open_requests(arguments.requests)
    answers = open_answers(arguments.answers, requests)
    try:
        missing = len(requests) - len(answers.done)
        if len(answers.done) and missing:
            print(f"weft batch: {len(answers.done)} of {len(requests)} are answered; going on", file=sys.stderr)
        begun = time.monotonic()
        if missing:
            with _server(arguments, requests) as url:
                _ask(arguments, url, requests, answers)
        said = f"{len(requests)} requests: {len(requests) - answers.failed} answered, {answers.failed} failed"
        print(f"{said}; {missing} of them now, in {time.monotonic() - begun:.1f} s: {arguments.answers}")
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
        raise ConfigError(f"{path}, line {number} {first}{f'; and {more} more lines are wrong' if more else ''}")
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
        raise ConfigError(f"{path} answers other requests, {min(strange)!r} for one: give another file")
    return answers


@contextlib.contextmanager
def _server(arguments: argparse.Namespace, requests: RequestFile) -> Iterator[str]:
    """The URL of the server to ask: one that runs, or one of this command's own."""
    if arguments.model is None:
        yield arguments.url or URL
        return
    # The lines name the model as their author knew it.
    names = sorted(requests.models)
    if len(names) > 1:
        raise ConfigError(f"{arguments.requests} asks for {len(names)} models ({', '.join(names[:3])}); --model is one")
    with own_server(arguments.model, arguments.revision, Console(stderr=True), names) as url:
        yield url


def _ask(arguments: argparse.Namespace, url: str, requests: RequestFile, answers: AnswerFile) -> None:
    """Raises `WeftError`."""
    key = key_of(arguments)
    console = Console(stderr=True)
    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"))
    shown = console.is_terminal
    said = time.monotonic()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not shown) as bar:
        task = bar.add_task("", total=len(requests), completed=len(answers.done), failed="")

        def told() -> None:
            nonlocal said
            bar.update(task, completed=len(answers.done), failed=f"{answers.failed} failed" if answers.failed else "")
            if not shown and time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                print(f"weft batch: {len(answers.done)} of {len(requests)}", file=sys.stderr, flush=True)

        endpoint = Endpoint(url, key, None)
        client = BatchClient(url, key, answers, patience=arguments.patience, told=told)
        try:
            endpoint.connect()
            asyncio.run(client.run(requests, min(arguments.concurrency, len(requests))))
        except Refused as error:
            so_far = f"{len(answers.done)} of {len(requests)} are answered; the same command goes on"
            raise WeftError(f"{url}: {error}. {so_far}") from None
        except LineError as error:
            raise WeftError(f"{arguments.requests} was changed meanwhile: a line {error}") from None
        except OSError as error:
            raise WeftError(unwritable(arguments.answers, error)) from None
