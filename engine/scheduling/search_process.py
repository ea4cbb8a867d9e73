"""`SearchProcess`: the process that searches for an engine's plan, with low priority; `search_of` sets a search up."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import msgspec

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.choose import target_of
from weft.engine.plans.found import FoundPlans
from weft.engine.plans.plan import Plan
from weft.engine.runner.device.compile_job import CompileJob
from weft.engine.runner.device.preparation import Compiling, Preparation
from weft.engine.runner.device.runner import Runner
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.engine.scheduling.plan_search import BUDGET_SECONDS, News, PlanSearch, Recorder
from weft.engine.wire.search_gate import SearchGate

NICENESS = 19
MODULE = "weft.autosearch.background_search"  # A string, because engines do not import the search.


class SearchOrder(msgspec.Struct, frozen=True):
    """What the process gets on its first line of stdin."""

    config: str  # `EngineConfig` as JSON.
    gate: int  # Descriptor of the `SearchGate`.
    max_num_batched_tokens: int
    max_num_seqs: int
    seconds: float


class SearchProcess:
    """A running search. It ends when its stdin closes, so also with this process."""

    def __init__(self, order: SearchOrder, module: str = MODULE) -> None:
        """Raises `OSError`."""
        self._process = subprocess.Popen(
            (sys.executable, "-P", "-m", module), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            pass_fds=(order.gate,), start_new_session=True,  # signals of a terminal are for the daemon
        )  # fmt: skip
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._out, False)
        self._partial = b""
        self._over = False
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()

    def news(self) -> Sequence[News]:
        found: list[News] = []
        while not self._over:
            try:
                data = os.read(self._out, 1 << 16)
            except BlockingIOError:
                break
            self._over = not data
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(msgspec.MsgspecError):  # a library's line
                    found.append(msgspec.json.decode(line, type=News))
        return found

    @property
    def ended(self) -> str | None:
        if not self._over:
            return None
        code = self._process.poll()
        return None if code is None else f"the process ended with status {code}"

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            # A process inside the driver may end late, and the engine does not wait.
            threading.Thread(target=self._process.wait, name="weft-search-end", daemon=True).start()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@runtime_checkable
class PlanRunner(Protocol):
    """A runner that can use a plan found while serving."""

    def adopt(self, plan: Plan, compiling: Compiling | None) -> Preparation: ...

    def try_pipelines(self, chooses: Callable[[int, Batch], bool]) -> None: ...


class FoundPlanDevice:
    """`PlanDevice` on a runner. Another process compiles the kernels."""

    def __init__(self, runner: PlanRunner, compile_plan: Callable[[], Compiling | None]) -> None:
        self._runner, self._compile_plan = runner, compile_plan

    def adopt(self, plan: Plan) -> Preparation:
        return self._runner.adopt(plan, self._compile_plan())

    def try_pipelines(self, chooses: Callable[[int, Batch], bool]) -> None:
        self._runner.try_pipelines(chooses)


def search_of(
    config: EngineConfig, resolved: ResolvedConfig, spec: ModelSpec, runner: Runner, has_work: Callable[[], bool]
) -> PlanSearch:
    """Return the search for an engine. Raises `ConfigError` if this system or runner does not support it."""
    mode = config.search
    if mode == "off" or not isinstance(runner, PlanRunner):
        raise ConfigError(f"--search {mode}: this runner cannot use a plan that it did not start with")
    try:
        gate = SearchGate.create()
    except OSError as error:
        raise ConfigError(f"--search {mode}: no shared memory for it: {error}") from None
    found = FoundPlans(config.cache_path, target_of(spec, resolved.device, resolved.compute_dtype, resolved.kv.dtype))
    tokens = resolved.max_num_batched_tokens
    served = {"plan": str(found.file), "wait_for_plan": False, "max_num_batched_tokens": tokens}
    device = FoundPlanDevice(runner, partial(CompileJob.begin, config.model_copy(update=served)))
    order = SearchOrder(config.model_dump_json(), gate.fd, tokens, resolved.max_num_seqs, BUDGET_SECONDS)
    return PlanSearch(mode, partial(SearchProcess, order), gate, device, Recorder(found.record), has_work)
