"""`Service`: a model as the endpoints see it, and the phase of life that it is in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from weft.engine.wire.heartbeat import ENGINE, LATE_SECONDS, Watch
from weft.engine.wire.messages import EngineReady
from weft.engine.wire.streams import Streams
from weft.server.api.admission import Admission
from weft.server.api.model_text import ModelText
from weft.server.bodies import BodyBounds
from weft.server.config import ServeConfig
from weft.server.errors import ApiError, clip, unavailable
from weft.server.keys import load_keys
from weft.server.observe.limits import RateLimits
from weft.server.observe.metrics import Metrics
from weft.server.observe.shared_state import ENTERED, WAITING, SharedState, SleepState
from weft.server.replicas.replicas import Replicas
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.grammar_compiler import GrammarCompiler

T = TypeVar("T")

UNKNOWN_CONTEXT = 2**15
"""tokens, as far as bodies are concerned that come before the model is loaded"""


class Phase(Enum):
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


_REFUSALS = {
    Phase.LOADING: ("The model is still loading.", 2),
    Phase.DRAINING: ("The server is shutting down.", 10),
    Phase.DEAD: ("The engine has ended; this server is going down.", 10),
}


class OpenAnswer(Protocol):
    """An answer under way."""

    @property
    def service(self) -> Service:
        """of its model"""
        ...

    def interrupt(self, error: ApiError, cause: str) -> None:
        """End it with this error."""
        ...


class LoadedModel(NamedTuple):
    """Everything that exists only once an engine is ready."""

    replicas: Replicas
    ready: EngineReady
    """of all engines together"""
    tokenizer: Tokenizer
    text: ModelText
    admission: Admission
    grammars: GrammarCompiler


class Service:
    """One API process's state of a model. Lives on the event loop; only `offload` leaves it.

    Of several models the first one's is the `lead`: the endpoints begin with it, and what all of them share is its.
    """

    def __init__(
        self,
        config: ServeConfig,
        shared_state: SharedState | None = None,
        row: int = 0,
        keys: Sequence[bytes] | None = None,
        watch: Watch | None = None,
        *,
        lead: Service | None = None,
    ) -> None:
        """`config`: the daemon's. `row`: of this process on the daemon's `shared_state`. `keys`: digests, when they have been
        read already. `watch`: over the daemon's processes. `lead`: as above, of all models but the first.
        """
        self.lead = lead or self
        self.model = 0 if lead is None else len(lead.models)
        """its number"""
        whole, config = config, config.each[self.model]
        self.config = config
        """what is said of this model, and of the daemon"""
        self.memory_share = whole.memory_shares[self.model]
        self.engines = whole.engine_numbers[self.model]
        """the numbers of its engines"""
        if lead is None:
            self.models: list[Service] = [self]
            self.keys = load_keys(config) if keys is None else list(keys)
            self.shared_state = shared_state or SharedState(
                1, len(self.keys), engines=whole.num_engines, models=len(whole.each)
            )
            models = {c.model_names[0]: e for c, e in zip(whole.each, whole.engine_numbers, strict=True)}
            self.metrics = Metrics(self.shared_state, row, watch, models)
            self.limits = RateLimits(
                self.shared_state, self.metrics.rejected, config.rate_limit, config.rate_limit_tokens
            )
            self.open: set[OpenAnswer] = set()
            self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        else:
            self.models, self.keys, self.shared_state, self.metrics = (
                lead.models,
                lead.keys,
                lead.shared_state,
                lead.metrics,
            )
            self.limits, self.open, self._threads = lead.limits, lead.open, lead._threads
            self.models.append(self)
        self.replicas = Replicas(self.shared_state, row, stalled=self._stalls, engines=self.engines)
        self.body_bounds = BodyBounds.of(config.max_body_mib, UNKNOWN_CONTEXT)
        """of the lead: what any of the models takes"""
        self.phase = Phase.LOADING
        self.handed_over = False
        """of the lead: another daemon takes the connections from now on"""
        self.created = int(time.time())
        self.restart_engines: Callable[[Sequence[int]], Awaitable[str]] | None = None
        """of the lead: has the daemon start engines anew; returns why it does not, or nothing"""
        self.wake: Callable[[int], Awaitable[str]] | None = None
        """of the lead: has the daemon wake a model; returns, once that is so, nothing, or why it does not"""
        self.sleep: Callable[[int, int, float | None], Awaitable[str]] | None = None
        """of the lead: has the daemon put a model to sleep, at a level, after so many seconds for open requests"""
        self.alone_with: set[int] = set()
        """engines that other API processes may not serve with yet: who hears "ready" here may ask one of those next"""
        self.failures: dict[int, dict[str, Any]] = {}
        """of each engine, the last end that nobody had asked for: a message and a time, for operators"""
        self._watch = watch
        self._coming = set(self.engines)
        """engines that are there, or on their way"""
        self._row = row
        self._waking: asyncio.Future[str] | None = None
        self._admission = Admission(
            self.replicas,
            self.shared_state,
            row,
            self.metrics.rejected,
            max_requests=config.max_queued_requests,
            max_tokens=config.max_queued_tokens,
            model=self.model,
        )
        self._loaded: LoadedModel | None = None
        self._served = False
        """by every API process, at least once"""
        self._grammars: GrammarCompiler | None = None
        self.shared_state.load[row, self.model, ENTERED:] = 0
        if lead is None:
            for _ in whole.each[1:]:
                Service(whole, self.shared_state, row, watch=watch, lead=self)

    def attach(
        self,
        client: Streams,
        ready: EngineReady,
        tokenizer: Tokenizer,
        engine: int | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """An engine, the first by default, has loaded the model: serve it. `alone`: until `together`, other API
        processes may not."""
        engine = self.engines[0] if engine is None else engine
        if alone:
            self.alone_with.add(engine)
        else:
            self._served = True
        figures = self.metrics.engines[engine]
        self.replicas.attach(engine, client, ready, figures.hear)
        self._coming.add(engine)
        figures.loaded(self.config.model_names[0], ready)
        ready = self.replicas.ready
        if self._grammars is None:
            vocabulary = (tokenizer.to_json, ready.vocab_size, ready.eos_token_ids)
            self._grammars = GrammarCompiler(*vocabulary, self.metrics.grammar_tried)
        text = ModelText(tokenizer, ready, self._threads, control=self.config.allow_special_tokens)
        self._loaded = LoadedModel(self.replicas, ready, tokenizer, text, self._admission, self._grammars)
        longest = max(each._loaded.ready.max_model_len for each in self.models if each._loaded is not None)
        self.lead.body_bounds = BodyBounds.of(self.config.max_body_mib, longest)
        if self.phase is Phase.LOADING:
            self.phase = Phase.SERVING

    def together(self, engine: int) -> None:
        """Every API process serves with this engine."""
        self.alone_with.discard(engine)
        self._served = True

    def engine_died(self, engine: int | None = None, *, restarting: bool = False) -> None:
        """There is no such engine any more. `restarting`: another one is on its way."""
        engine = self.engines[0] if engine is None else engine
        self.replicas.detach(engine)
        self.alone_with.discard(engine)
        if not restarting:
            self._coming.discard(engine)
        if not self._coming:
            self.phase = Phase.DEAD
        elif self.phase is Phase.SERVING and not any(self.replicas):
            self.phase = Phase.LOADING
        self.metrics.engines[engine].died()

    def interrupt_all(self, error: ApiError, cause: str) -> None:
        """End every open answer of all models with this error."""
        for answer in list(self.open):
            answer.interrupt(error, cause)

    def interrupt_own(self, error: ApiError, cause: str) -> None:
        """End every open answer of this model with this error."""
        for answer in [answer for answer in self.open if answer.service is self]:
            answer.interrupt(error, cause)

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model. Raises `ApiError` while there is none to work with. It may sleep: see `enter`."""
        if self._loaded is None or self.phase is not Phase.SERVING:
            self.metrics.rejected.labels(self.phase.value).inc()
            raise self._refusal()
        return self._loaded

    def _refusal(self, phase: Phase | None = None) -> ApiError:
        phase = phase or self.phase
        message, retry_after = _REFUSALS[phase]
        if phase is Phase.DEAD and any(each.phase is not Phase.DEAD for each in self.models):
            message = "This model has ended; others are served."
        return unavailable(message, phase.value, retry_after)

    @property
    def ever(self) -> LoadedModel | None:
        """What is known of the model, once it has ever been loaded."""
        return self._loaded

    @property
    def known(self) -> LoadedModel:
        """What is known of a model that has ever been loaded. Raises `ApiError`."""
        return self.loaded if self._loaded is None else self._loaded

    @property
    def closing(self) -> bool:
        """Connections end behind their next answer: who asks again shall ask elsewhere."""
        return self.lead.handed_over or all(each.phase in (Phase.DRAINING, Phase.DEAD) for each in self.models)

    @property
    def _begun(self) -> bool:
        """A model has been loaded: before that the daemon wakes none."""
        return any(each.ever is not None for each in self.models)

    @property
    def sleep_level(self) -> int:
        """1: its engine is there, without its memory; 2: it is not; 0: the model does not sleep."""
        return 0 if self.sleep_state is not SleepState.ASLEEP else 1 if any(self.replicas) else 2

    @property
    def sleep_state(self) -> SleepState:
        """Whether the model sleeps."""
        return SleepState(int(self.shared_state.sleep_states[self.model]))

    @property
    def state(self) -> str:
        """Of the model, in a word: loading, awake, falling_asleep, asleep, waking or dead."""
        if self.phase is Phase.DEAD:
            return SleepState.DEAD.word
        if self.sleep_state is SleepState.AWAKE and self.phase is Phase.LOADING:
            return "loading"
        return self.sleep_state.word

    async def enter(self, asked: str | None, scope: MutableMapping[str, Any]) -> Service:
        """The service of the model that a request asks for, which stays awake until `leave` is called for the scope.

        Wakes it if need be. Idempotent for a scope. Raises `ApiError`.
        """
        service = self.of(asked)
        entered: list[Service] = scope.setdefault("weft.entered", [])
        if service not in entered:
            await service._let_in()
            entered.append(service)
        return service

    @staticmethod
    def leave(scope: MutableMapping[str, Any]) -> None:
        """The request has ended. Idempotent."""
        for service in scope.pop("weft.entered", ()):
            service.shared_state.load[service._row, service.model, ENTERED] -= 1

    async def _let_in(self) -> None:
        if self._let_in_now():
            return
        own = self.shared_state.load[self._row, self.model]
        own[WAITING] += 1  # once it is awake, it does not sleep before they are in
        try:
            async with asyncio.timeout(self.config.wake_timeout):
                await self._wake()
                while not self._let_in_now():
                    await self._wake()
        except TimeoutError:
            self.metrics.rejected.labels("model_waking").inc()
            raise unavailable("The model has not woken in time.", "model_waking", 5) from None
        finally:
            own[WAITING] -= 1

    def _let_in_now(self) -> bool:
        """Unless it sleeps."""
        with self.shared_state.lock():  # the daemon has it while it closes a model
            if self.shared_state.sleep_states[self.model] not in (SleepState.AWAKE, SleepState.DEAD):
                return False
            self.shared_state.load[self._row, self.model, ENTERED] += 1
            self.shared_state.used[self.model] = time.time()
            return True

    async def _wake(self) -> None:
        """Have the daemon wake the model, once for all who wait. Raises `ApiError`."""
        wake = self.lead.wake
        if self.phase not in (Phase.SERVING, Phase.LOADING) or not self._begun:
            _ = self.loaded  # says why not
        if wake is None or not self.config.wake_on_request:
            raise self._asleep("The model sleeps, and requests do not wake it.")
        if self.shared_state.load[:, self.model, WAITING].sum() > max(1, self.config.max_queued_requests):
            self.metrics.rejected.labels("queue_full").inc()
            raise unavailable("Too many requests wait for the model to wake.", "queue_full", 5)
        if self._waking is None or self._waking.done():
            self._waking = asyncio.ensure_future(wake(self.model))
        if refusal := await asyncio.shield(self._waking):
            raise self._asleep(f"The model sleeps and cannot be woken now: {refusal}.")

    def _asleep(self, why: str) -> ApiError:
        self.metrics.rejected.labels("model_asleep").inc()
        return unavailable(why, "model_asleep", 10)

    def _stalls(self, engine: int) -> bool:
        return self._watch is not None and self._watch.late(ENGINE + engine, LATE_SECONDS) is not None

    @property
    def stalled(self) -> ApiError | None:
        """No engine shows progress, as each tells all processes itself; else None."""
        if self._watch is None:
            return None
        ages = [self._watch.late(ENGINE + engine, LATE_SECONDS) for engine in self._coming]
        late = [age for age in ages if age is not None]
        if not late or len(late) < len(ages):
            return None
        if self.sleep_state is not SleepState.AWAKE:
            return None
        who = "The engine has shown no" if len(self.engines) == 1 else "No engine has shown"
        if (
            len(self.engines) == 1
            and (silent := self._watch.silent_rank(ENGINE + self.engines[0], LATE_SECONDS)) is not None
        ):
            who = f"The engine's rank {silent[0]} has shown no"
        return unavailable(f"{who} progress for {min(late):.0f} seconds.", "engine_stalled", 10)

    def engine_stage(self, engine: int | None = None) -> str:
        """The long work an engine is at, a start for example, in words; else empty."""
        engine = self.engines[0] if engine is None else engine
        return self._watch.heartbeats.stage(ENGINE + engine) if self._watch is not None else ""

    def engine_states(self, *, failures: bool = False) -> list[dict[str, Any]]:
        """Of each of its engines, for people and probes: its number and state, and the long work that it is at.
        failures: and why and when it failed last, which may name files: for operators alone."""
        states: list[dict[str, Any]] = []
        for engine in self.engines:
            state = self.replicas.state(engine)
            if state == "away":
                state = "loading" if engine in self._coming else "dead"
            if self.sleep_state is not SleepState.AWAKE and state != "dead":
                state = self.sleep_state.word
            stage = self.engine_stage(engine) if state != SleepState.ASLEEP.word else ""
            failed = {"last_failure": self.failures[engine]} if failures and engine in self.failures else {}
            states.append({"engine": engine, "state": state, **({"stage": stage} if stage else {}), **failed})
        return states

    @property
    def starts(self) -> bool:
        """The model is to be awake, and has not been served in every API process yet: nobody is sent here before."""
        return self.state in ("loading", "awake") and not self._served

    @property
    def unready(self) -> ApiError | None:
        """Why a router should send its work elsewhere, or None."""
        if (reason := self.stalled) is not None:
            return reason
        if self.sleep_state is not SleepState.AWAKE and self.phase in (Phase.SERVING, Phase.LOADING) and self._begun:
            if self.config.wake_on_request:
                return None
            return unavailable("The model sleeps.", "model_asleep", 10)
        if self.phase is not Phase.SERVING:
            return self._refusal()
        if self.alone_with and all(replica.engine in self.alone_with for replica in self.replicas):
            return self._refusal(Phase.LOADING)
        return self.loaded.admission.refusal(1, 1)

    def of(self, asked: str | None) -> Service:
        """The service of the model of this name, the first by default. Raises `ApiError` 404 where none has it."""
        if asked is None:
            return self.lead
        for service in self.models:
            if asked in service.config.model_names:
                return service
        served = ", ".join(name for service in self.models for name in service.config.model_names)
        raise ApiError(
            404,
            f"The model '{clip(asked)}' is not served here; served: {served}.",
            param="model",
            code="model_not_found",
        )

    def name(self, asked: str | None) -> str:
        """The name that an answer of this model carries."""
        return self.config.model_names[0] if asked is None else asked

    async def offload(self, function: Callable[[], T]) -> T:
        """Run CPU work in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def close(self) -> None:
        for service in self.models:
            if service._grammars is not None:
                service._grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
