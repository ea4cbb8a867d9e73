"""`python -m weft.deploy.ray.batch IN OUT`: answers a file of requests with many daemons on Ray Data.

As with `weft batch`, only this process writes OUT, so that each line gets one answer, and answered lines are skipped.
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

PROGRESS_SECONDS = 30.0

Result = TypeVar("Result")


class Collected:
    """Answers not written to a file yet."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.lines: list[tuple[str, bytes, bool]] = []

    def add(self, custom_id: str, line: bytes, *, failed: bool) -> None:
        self.done.add(custom_id)
        self.lines.append((custom_id, line, failed))


class Worker:
    """A daemon in a Ray Data actor."""

    def __init__(self, model: Model, concurrency: int, patience: float) -> None:
        """Start the daemon. Raises `WeftError` if it does not become ready."""
        self._concurrency, self._patience = concurrency, patience
        # This thread lives as long as the actor; the daemon ends with it.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="weft", daemon=True).start()
        self._child = self._run(Child.start(model.serve_options(), model.start_timeout_s))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Map column `line` (requests as JSON) to `custom_id`, `answer`, `failed`. Raises `WeftError`."""
        answers = Collected()
        client = BatchClient(self._child.url, None, answers, patience=self._patience, on_answer=lambda: None)
        requests = (BatchLine(*orjson.loads(line)) for line in batch["line"])
        try:
            self._run(client.run(requests, self._concurrency))
        except Refused as error:
            raise WeftError(str(error)) from None
        ids, lines, failed = zip(*answers.lines, strict=True)
        return {"custom_id": np.array(ids, object), "answer": np.array(lines, object), "failed": np.array(failed, bool)}


def answered(
    requests: Iterable[BatchLine], model: Model, *, workers: int, concurrency: int, rows: int, patience: float
) -> Iterator[tuple[str, bytes, bool]]:
    """Yield (custom_id, answer line, whether it is an error) in order of completion; an answer may appear twice.

    rows: requests per call of an actor, repeated if the actor is lost. Ray must be running.
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
    """Return 0 if every request was answered, 1 if some failed or the run was given up, 2 for bad input."""
    parser = Parser(prog="python -m weft.deploy.ray.batch", description=(__doc__ or "").split(": ", 1)[1])
    parser.add_argument("requests", type=Path, metavar="IN", help="requests in the format of OpenAI's Batch API")
    parser.add_argument("answers", type=Path, metavar="OUT", help="file to append answers to")
    parser.add_argument("--model", default="demo", help="model to serve [demo]")
    parser.add_argument("--options", type=Path, metavar="FILE", help="YAML file with more options of weft serve")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="number of daemons [1]")
    parser.add_argument(
        "--num-cpus", type=float, default=1.0, metavar="X", help="CPUs that Ray reserves per daemon [1]"
    )
    parser.add_argument(
        "--num-gpus",
        type=float,
        metavar="X",
        help="GPUs that Ray reserves per daemon [one per rank; none for the demo]",
    )
    parser.add_argument("--concurrency", type=int, default=256, metavar="N", help="open requests per daemon [256]")
    parser.add_argument("--rows", type=int, default=1024, metavar="N", help="requests per call of a daemon [1024]")
    parser.add_argument(
        "--patience",
        type=float,
        default=300.0,
        metavar="S",
        help="give up after this many seconds without an answer [300]",
    )
    parser.add_argument("--address", help="address of a running Ray [RAY_ADDRESS, or start one]")
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
        raise ConfigError(
            f"{arguments.requests} names {len(names)} models ({', '.join(names[:3])}), but --model serves one"
        )
    model = _model(arguments, names[0] if names else None)
    answers = open_answers(arguments.answers, requests)
    try:
        missing = [request for request in requests if request.custom_id not in answers.done]
        if missing:
            _run_missing(arguments, model, missing, answers)
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


def _run_missing(arguments: Any, model: Model, missing: list[BatchLine], answers: Any) -> None:
    """Answer the missing requests. Raises `WeftError`."""
    import ray

    if not ray.is_initialized():
        ray.init(address=arguments.address, log_to_driver=False, logging_level="warning")
    printed = time.monotonic()
    limits = {name: getattr(arguments, name) for name in ("workers", "concurrency", "rows", "patience")}
    try:
        for custom_id, line, failed in answered(missing, model, **limits):
            if custom_id not in answers.done:  # a lost actor may have answered it already
                answers.add(custom_id, line, failed=failed)
            if time.monotonic() - printed > PROGRESS_SECONDS:
                printed = time.monotonic()
                print(f"{len(answers.done)} answered", file=sys.stderr, flush=True)
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[-1]
        raise WeftError(f"{why}. {len(answers.done)} are answered; rerun the same command to continue") from None


if __name__ == "__main__":
    sys.exit(main())
