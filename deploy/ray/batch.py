"""`python -m weft.deploy.ray.batch IN OUT`: the requests of a file, answered by many daemons, through Ray Data.

What `weft batch` promises holds: this process alone writes OUT, so that each line has one answer, and what OUT has is
not asked again.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import yaml

from weft.deploy.ray.child import Child
from weft.deploy.ray.settings import Model, read
from weft.engine.errors import ConfigError, WeftError
from weft.server.batches.lines import BatchLine
from weft.server.commands.batch import open_answers, open_requests
from weft.server.commands.batch_client import BatchClient
from weft.server.commands.endpoint import Refused
from weft.server.options import Parser

SAY_SECONDS = 30.0

Result = TypeVar("Result")


class Collected:
    """Answers that are not in a file yet."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.lines: list[tuple[str, bytes, bool]] = []

    def add(self, custom_id: str, line: bytes, *, failed: bool) -> None:
        self.done.add(custom_id)
        self.lines.append((custom_id, line, failed))


class Worker:
    """A daemon, in an actor of Ray Data."""

    def __init__(self, model: Model, concurrency: int, patience: float) -> None:
        """Raises `WeftError` when the daemon does not get ready."""
        self._concurrency, self._patience = concurrency, patience
        # A thread that lives as long as the actor: the daemon ends with it.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="weft", daemon=True).start()
        self._child = self._run(Child.start(model.serve_options(), model.start_timeout_s))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Columns: `line`, requests as JSON; returns `custom_id`, `answer`, `failed`. Raises `WeftError`."""
        answers = Collected()
        client = BatchClient(self._child.url, None, answers, patience=self._patience, told=lambda: None)
        requests = (BatchLine(*orjson.loads(line)) for line in batch["line"])
        try:
            self._run(client.run(requests, self._concurrency))
        except Refused as error:
            raise WeftError(str(error)) from None
        ids, lines, failed = zip(*answers.lines, strict=True)
        return {
            "custom_id": np.array(ids, object),
            "answer": np.array(lines, object),
            "failed": np.array(failed, bool),
        }


def answered(
    requests: Iterable[BatchLine], model: Model, *, workers: int, concurrency: int, rows: int, patience: float
) -> Iterator[tuple[str, bytes, bool]]:
    """custom_id, line of the answer, whether it is an error: in the order in which they come; one may come twice.

    rows: requests that an actor gets at a time, and that are asked again when it is lost. Ray must be up.
    """
    import ray

    items = [{"line": orjson.dumps(list(request))} for request in requests]
    data = ray.data.from_items(items, override_num_blocks=max(1, -(-len(items) // rows)))
    ray.data.DataContext.get_current().enable_progress_bars = False
    data = data.map_batches(
        Worker,
        fn_constructor_args=(model, concurrency, patience),
        batch_size=rows,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=model.num_cpus,
        num_gpus=model.gpus,
    )
    for row in data.iter_rows():
        yield row["custom_id"], row["answer"], bool(row["failed"])


def main(argv: list[str] | None = None) -> int:
    """0: every request has its answer; 1: some have an error for one, or it was given up; 2: the caller is wrong."""
    parser = Parser(prog="python -m weft.deploy.ray.batch", description=(__doc__ or "").split(": ", 1)[1])
    parser.add_argument("requests", type=Path, metavar="IN", help="requests in the form of OpenAI's Batch API")
    parser.add_argument("answers", type=Path, metavar="OUT", help="where answers are appended")
    parser.add_argument("--model", default="demo", help="what each daemon serves [demo]")
    parser.add_argument("--options", type=Path, metavar="FILE", help="YAML file of further options of weft serve")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="daemons [1]")
    parser.add_argument("--num-cpus", type=float, default=1.0, metavar="X", help="that Ray reserves for one [1]")
    parser.add_argument("--num-gpus", type=float, metavar="X", help="the same [one a rank; none for the demo]")
    parser.add_argument("--concurrency", type=int, default=256, metavar="N", help="open requests of a daemon [256]")
    parser.add_argument("--rows", type=int, default=1024, metavar="N", help="requests that a daemon is given at a time")
    parser.add_argument("--patience", type=float, default=300.0, metavar="S", help="seconds without any answer")
    parser.add_argument("--address", help="of a running Ray [that of RAY_ADDRESS, else one of its own]")
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments)
    except (ConfigError, WeftError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _run(arguments: Any) -> int:
    if min(arguments.workers, arguments.concurrency, arguments.rows) < 1:
        raise ConfigError("--workers, --concurrency and --rows must be 1 or more")
    requests = open_requests(arguments.requests)
    names = sorted(requests.models)
    if len(names) > 1:
        raise ConfigError(f"{arguments.requests} asks for {len(names)} models ({', '.join(names[:3])}); --model is one")
    model = _model(arguments, names[0] if names else None)
    answers = open_answers(arguments.answers, requests)
    try:
        missing = [request for request in requests if request.custom_id not in answers.done]
        if missing:
            _ask(arguments, model, missing, answers)
        print(f"{len(requests)} requests: {len(requests) - answers.failed} answered, {answers.failed} failed")
        return 1 if answers.failed else 0
    finally:
        answers.close(sync=True)
        requests.close()


def _model(arguments: Any, name: str | None) -> Model:
    try:
        options = yaml.safe_load(arguments.options.read_text()) if arguments.options is not None else {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--options {arguments.options}: {str(error).splitlines()[0]}") from None
    own = {"model": arguments.model, "name": name, "options": options or {}, "num_cpus": arguments.num_cpus}
    return read({**own, "num_gpus": arguments.num_gpus}).models[0]


def _ask(arguments: Any, model: Model, missing: list[BatchLine], answers: Any) -> None:
    """Raises `WeftError`."""
    import ray

    if not ray.is_initialized():
        ray.init(address=arguments.address, log_to_driver=False, logging_level="warning")
    said = time.monotonic()
    limits = {name: getattr(arguments, name) for name in ("workers", "concurrency", "rows", "patience")}
    try:
        for custom_id, line, failed in answered(missing, model, **limits):
            if custom_id not in answers.done:  # an actor that was lost may have told of it
                answers.add(custom_id, line, failed=failed)
            if time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                print(f"{len(answers.done)} are answered", file=sys.stderr, flush=True)
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[-1]
        raise WeftError(f"{why}. {len(answers.done)} are answered; the same command goes on") from None


if __name__ == "__main__":
    sys.exit(main())
