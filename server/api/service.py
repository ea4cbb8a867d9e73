"""`Service`: a model as the endpoints see it, and its phase."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from weft.engine.errors import ModelError
from weft.engine.wire.heartbeat import ENGINE, LATE_SECONDS, Watch
from weft.engine.wire.messages import EngineReady
from weft.engine.wire.streams import Streams
from weft.server.api.adapter_names import AdapterNames, Served
from weft.server.api.admission import Admission
from weft.server.api.media.model_images import Media, ModelImages, find_rule, make_media
from weft.server.api.model_text import ModelText
from weft.server.api.pooler import Pooler
from weft.server.api.scorer import Scorer, tasks_of
from weft.server.bodies import BodyBounds
from weft.server.config import ServeConfig
from weft.server.errors import ApiError, bad_request, clip, unavailable
from weft.server.keys import load_keys
from weft.server.observe.limits import RateLimits
from weft.server.observe.metrics import Metrics
from weft.server.observe.shared_state import ENTERED, WAITING, SharedState, SleepState
from weft.server.replicas.replicas import Replicas
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.grammar_compiler import GrammarCompiler

T = TypeVar("T")

logger = logging.getLogger("weft")

TASK_PATHS = {
    "generate": ("/v1/chat/completions", "/v1/completions"),
    "embed": ("/v1/embeddings", "/pooling"),
    "classify": ("/classify",),
    "score": ("/v1/rerank", "/v1/score"),
}
"""The main endpoints of what a model can do."""

UNKNOWN_CONTEXT = 2**15  # Context length assumed for bodies that arrive before the model is loaded.


class Phase(Enum):
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


_REFUSALS = {
    Phase.LOADING: ("The model is still loading.", 2),
    Phase.DRAINING: ("The server is shutting down.", 10),
    Phase.DEAD: ("The engine has died; this server is shutting down.", 10),
}


class OpenAnswer(Protocol):
    """An answer in progress."""

    @property
    def service(self) -> Service:
        """The service of its model."""
        ...

    def interrupt(self, error: ApiError, cause: str) -> None:
        """End the answer with this error."""
        ...


class LoadedModel(NamedTuple):
    """Everything that needs a ready engine."""

    replicas: Replicas
    ready: EngineReady  # all engines combined
    tokenizer: Tokenizer
    text: ModelText
    admission: Admission
    grammars: GrammarCompiler
    tasks: tuple[str, ...]  # see `tasks_of`
    images: ModelImages | None = None  # None if the model takes text only


class Service:
    """One API process's state of a model. It runs on the event loop; only `offload` uses threads.

    If there are several models, the first model's service is the `lead`. Endpoints start from it, and it holds
    everything that the models share."""

    def __init__(
        self, config: ServeConfig, shared_state: SharedState | None = None, row: int = 0,
        keys: Sequence[bytes] | None = None, best_priorities: Sequence[int] = (), watch: Watch | None = None, *,
        lead: Service | None = None,
    ) -> None:  # fmt: skip
        """`config`: the daemon's. `row`: this process's row of `shared_state`. `keys`: digests, if already read.
        `best_priorities`: of each key. `watch`: watches the daemon's processes. `lead`: None for the first model.
        """
        self.lead = lead or self
        self.model = 0 if lead is None else len(lead.models)  # the model's number
        whole, config = config, config.each[self.model]
        self.config = config  # the options of this model and of the daemon
        self.memory_share = whole.memory_shares[self.model]
        self.engines = whole.engine_numbers[self.model]  # the numbers of the model's engines
        if lead is None:
            self.models: list[Service] = [self]
            if keys is None:
                loaded = load_keys(config)
                keys, best_priorities = list(loaded), list(loaded.values())
            self.keys, self.best_priorities = list(keys), list(best_priorities)
            size = {"engines": whole.num_engines, "models": len(whole.each)}
            self.shared_state = shared_state or SharedState(1, len(self.keys), **size)
            models = {c.model_names[0]: e for c, e in zip(whole.each, whole.engine_numbers, strict=True)}
            self.metrics = Metrics(self.shared_state, row, watch, models)
            rates = config.rate_limit, config.rate_limit_tokens
            self.limits = RateLimits(self.shared_state, self.metrics.rejected, *rates)
            self.open: set[OpenAnswer] = set()
            self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        else:
            self.models, self.keys, self.shared_state = lead.models, lead.keys, lead.shared_state
            self.best_priorities = lead.best_priorities
            self.metrics, self.limits, self.open = lead.metrics, lead.limits, lead.open
            self._threads = lead._threads
            self.models.append(self)
        self.adapters = AdapterNames(None if config.lora_dir is None else Path(config.lora_dir).expanduser())
        self.replicas = Replicas(self.shared_state, row, stalled=self._stalls, engines=self.engines)
        self.body_bounds = BodyBounds.of(config.max_body_mib, UNKNOWN_CONTEXT)
        """The limits of request bodies, for any model. Lead only."""
        self.phase = Phase.LOADING
        self.media: Media | None = None  # Lead only; None until a model takes images.
        self.local_hosts: Sequence[str] = ()  # See `control.Start`. Lead only.
        self.handed_over = False  # Another daemon accepts the connections now. Lead only.
        self.created = int(time.time())
        self.restart_engines: Callable[[Sequence[int]], Awaitable[str]] | None = None
        """Asks the daemon to restart engines; returns a refusal or an empty string. Lead only."""
        self.wake: Callable[..., Awaitable[str]] | None = None
        """Asks the daemon to wake a model, and to resume a paused one if a second argument is true; returns once it is
        awake, or a refusal. Lead only."""
        self.sleep: Callable[[int, int, float | None], Awaitable[str]] | None = None
        """Asks the daemon to put a model to sleep or to pause it: model, level (0 pauses), seconds for open requests to
        finish. Lead only."""
        self.unshared_engines: set[int] = set()  # engines that other API processes may not serve with yet
        self.failures: dict[int, dict[str, Any]] = {}
        """The last unexpected end of each engine, for operators: a message and a time."""
        self._watch = watch
        self._expected = set(self.engines)  # engines that are running or starting
        self._row = row
        self._waking: asyncio.Future[str] | None = None
        limits = {"max_requests": config.max_queued_requests, "max_tokens": config.max_queued_tokens}
        rejected = self.metrics.rejected
        self._admission = Admission(self.replicas, self.shared_state, row, rejected, **limits, model=self.model)
        self.last_loaded: LoadedModel | None = None
        """The model as it was last loaded, even if it is not loaded now; None before its first load."""
        self._served = False  # every API process has served the model at least once
        self.scorer: tuple[Any, Scorer] | None = None  # how the model scores, and the key of what it was read from
        self.pooler: tuple[Any, Pooler] | None = None  # how the model embeds, likewise
        self._grammars: GrammarCompiler | None = None
        self.shared_state.load[row, self.model, ENTERED:] = 0
        if lead is None:
            for _ in whole.each[1:]:
                Service(whole, self.shared_state, row, watch=watch, lead=self)

    def attach(
        self, client: Streams, ready: EngineReady, tokenizer: Tokenizer, engine: int | None = None, *,
        alone: bool = False,
    ) -> None:  # fmt: skip
        """Serve with an engine (by default the first) that has loaded the model. `alone`: other API processes may not
        serve with it until `engine_shared`."""
        engine = self.engines[0] if engine is None else engine
        if alone:
            self.unshared_engines.add(engine)
        else:
            self._served = True
        figures = self.metrics.engines[engine]
        self.replicas.attach(engine, client, ready, figures.update)
        self._expected.add(engine)
        figures.loaded(self.config.model_names[0], ready)
        if self.config.adapters:
            self.adapters.attach(client)
        ready = self.replicas.ready
        if self._grammars is None:
            vocabulary = (tokenizer.to_json, ready.vocab_size, ready.eos_token_ids)
            self._grammars = GrammarCompiler(*vocabulary, self.metrics.grammar_tried)
        text = ModelText(tokenizer, ready, self._threads, control=self.config.allow_special_tokens)
        tasks = tasks_of(ready, self.config.model_path, self.config.classifier_from_token)
        images = self._find_images(ready, tokenizer) if "image" in ready.modalities else None
        self.last_loaded = LoadedModel(
            self.replicas, ready, tokenizer, text, self._admission, self._grammars, tasks, images
        )
        longest = max(each.last_loaded.ready.max_model_len for each in self.models if each.last_loaded is not None)
        image_mib = 0.0 if self.lead.media is None else self.config.limit_images * self.config.max_image_mib
        self.lead.body_bounds = BodyBounds.of(self.config.max_body_mib, longest, image_mib)
        if self.phase is Phase.LOADING:
            self.phase = Phase.SERVING

    def _find_images(self, ready: EngineReady, tokenizer: Tokenizer) -> ModelImages | None:
        """How the model takes images; None, with a line in the log, if this server cannot serve them."""
        try:
            rule = find_rule(self.config, tokenizer)
        except ModelError as error:
            logger.warning("%s takes text only here: %s", self.config.model_names[0], error)
            return None
        if rule is None:
            return None
        lead = self.lead
        if lead.media is None:
            lead.media = make_media(lead.config, ready.pixels, lead.metrics, client=self._row)
        return ModelImages(lead.media, rule)

    def engine_shared(self, engine: int) -> None:
        """Every API process serves with this engine now."""
        self.unshared_engines.discard(engine)
        self._served = True

    def engine_died(self, engine: int | None = None, *, restarting: bool = False) -> None:
        """An engine has ended. `restarting`: a replacement is starting."""
        engine = self.engines[0] if engine is None else engine
        self.replicas.detach(engine)
        self.unshared_engines.discard(engine)
        if not restarting:
            self._expected.discard(engine)
        if not self._expected:
            self.phase = Phase.DEAD
        elif self.phase is Phase.SERVING and not any(self.replicas):
            self.phase = Phase.LOADING
        self.metrics.engines[engine].died()

    def interrupt_all(self, error: ApiError, cause: str) -> None:
        """End every open answer of all models with this error."""
        for answer in list(self.open):
            answer.interrupt(error, cause)

    def interrupt_model(self, error: ApiError, cause: str) -> None:
        """End every open answer of this model with this error."""
        for answer in [answer for answer in self.open if answer.service is self]:
            answer.interrupt(error, cause)

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model. Raises `ApiError` if there is none. It may be asleep, see `enter`."""
        if self.last_loaded is None or self.phase is not Phase.SERVING:
            self.metrics.rejected.labels(self.phase.value).inc()
            raise self._refusal()
        return self.last_loaded

    def _refusal(self, phase: Phase | None = None) -> ApiError:
        phase = phase or self.phase
        message, retry_after = _REFUSALS[phase]
        if phase is Phase.DEAD and any(each.phase is not Phase.DEAD for each in self.models):
            message = "This model's engine has died; other models are served."
        return unavailable(message, phase.value, retry_after)

    @property
    def known(self) -> LoadedModel:
        """Like `last_loaded`. Raises `ApiError` before the first load."""
        return self.last_loaded or self.loaded

    @property
    def closing(self) -> bool:
        """Connections close after their next answer, so that clients reconnect elsewhere."""
        return self.lead.handed_over or all(each.phase in (Phase.DRAINING, Phase.DEAD) for each in self.models)

    @property
    def _any_loaded(self) -> bool:
        """A model has been loaded. The daemon wakes no model before that."""
        return any(each.last_loaded is not None for each in self.models)

    @property
    def sleep_level(self) -> int:
        """0: awake. 1: asleep with a running engine. 2: asleep without an engine."""
        return 0 if self.sleep_state is not SleepState.ASLEEP else 1 if any(self.replicas) else 2

    @property
    def sleep_state(self) -> SleepState:
        """Whether the model is asleep."""
        return SleepState(int(self.shared_state.sleep_states[self.model]))

    @property
    def state(self) -> str:
        """One of loading, awake, falling_asleep, asleep, waking, paused and dead."""
        if self.phase is Phase.DEAD:
            return SleepState.DEAD.word
        if self.sleep_state is SleepState.AWAKE and self.phase is Phase.LOADING:
            return "loading"
        return self.sleep_state.word

    async def enter(
        self, asked: str | None, scope: MutableMapping[str, Any], check: Callable[[], None] | None = None, *,
        task: str | None = "generate",
    ) -> Service:  # fmt: skip
        """The service of the requested model. Wakes the model and keeps it awake until `leave`. `check`: checks the
        request before the model wakes. `task`: what the model must be able to do; None for anything. Idempotent for a
        scope. Raises `ApiError`."""
        await self._load_adapter(asked)
        service = self.for_model(asked)
        if check is not None:
            check()
        service._check_task(task)
        entered: list[Service] = scope.setdefault("weft.entered", [])
        if service not in entered:
            await service._admit()
            entered.append(service)
            service._check_task(task)
        return service

    def _check_task(self, task: str | None) -> None:
        """Raises `ApiError` if the model, once loaded, is known not to do this."""
        if task is None or self.last_loaded is None or task in (tasks := self.last_loaded.tasks):
            return
        able = ", ".join(path for each in tasks for path in TASK_PATHS[each])
        what = f"The model '{self.config.model_names[0]}' ({self.last_loaded.ready.model_type}) does not {task}"
        raise bad_request(f"{what}; it serves {able}.", "model", "wrong_kind_of_model")

    @staticmethod
    def leave(scope: MutableMapping[str, Any]) -> None:
        """The request has ended. Idempotent."""
        for service in scope.pop("weft.entered", ()):
            service.shared_state.load[service._row, service.model, ENTERED] -= 1

    async def _admit(self) -> None:
        if self._admit_if_awake():
            return
        own = self.shared_state.load[self._row, self.model]
        own[WAITING] += 1  # keeps it awake until they are admitted
        try:
            async with asyncio.timeout(self.config.wake_timeout):
                await self._wake()
                while not self._admit_if_awake():
                    await self._wake()
        except TimeoutError:
            self.metrics.rejected.labels("model_waking").inc()
            raise unavailable("The model did not wake in time.", "model_waking", 5) from None
        finally:
            own[WAITING] -= 1

    def _admit_if_awake(self) -> bool:
        """Admit a request unless the model is asleep; returns whether it was admitted."""
        with self.shared_state.lock():  # the daemon holds it while it closes a model
            if self.shared_state.sleep_states[self.model] not in (SleepState.AWAKE, SleepState.DEAD):
                return False
            self.shared_state.load[self._row, self.model, ENTERED] += 1
            self.shared_state.used[self.model] = time.monotonic()
            return True

    async def _wake(self) -> None:
        """Ask the daemon to wake the model, once for all waiting requests. Raises `ApiError`."""
        wake = self.lead.wake
        if self.phase not in (Phase.SERVING, Phase.LOADING) or not self._any_loaded:
            _ = self.loaded  # raises the reason
        if wake is None or not self.config.wake_on_request:
            raise self._asleep("The model is asleep, and requests do not wake it.")
        if self.shared_state.load[:, self.model, WAITING].sum() > max(1, self.config.max_queued_requests):
            self.metrics.rejected.labels("queue_full").inc()
            raise unavailable("Too many requests are waiting for the model to wake.", "queue_full", 5)
        if self._waking is None or self._waking.done():
            self._waking = asyncio.ensure_future(wake(self.model))
        if refusal := await asyncio.shield(self._waking):
            raise self._asleep(f"The model is asleep and cannot be woken now: {refusal}.")

    def _asleep(self, why: str) -> ApiError:
        self.metrics.rejected.labels("model_asleep").inc()
        return unavailable(why, "model_asleep", 10)

    def _stalls(self, engine: int) -> bool:
        return self._watch is not None and self._watch.late(ENGINE + engine, LATE_SECONDS) is not None

    @property
    def stalled(self) -> ApiError | None:
        """The error if no engine makes progress according to its heartbeat, else None."""
        if self._watch is None:
            return None
        ages = [self._watch.late(ENGINE + engine, LATE_SECONDS) for engine in self._expected]
        late = [age for age in ages if age is not None]
        if not late or len(late) < len(ages) or self.sleep_state is not SleepState.AWAKE:
            return None
        subject = "No engine has shown"
        if len(self.engines) == 1:
            silent = self._watch.silent_rank(ENGINE + self.engines[0], LATE_SECONDS)
            rank = "" if silent is None else f"'s rank {silent[0]}"
            subject = f"The engine{rank} has shown no"
        return unavailable(f"{subject} progress for {min(late):.0f} seconds.", "engine_stalled", 10)

    def engine_stage(self, engine: int | None = None) -> str:
        """An engine's current long operation, such as loading, in words; else empty."""
        engine = self.engines[0] if engine is None else engine
        return self._watch.heartbeats.stage(ENGINE + engine) if self._watch is not None else ""

    def engine_states(self, *, failures: bool = False) -> list[dict[str, Any]]:
        """Number, state and current long operation of each engine. `failures`: include the last failure, which may name
        files and is for operators only."""
        states: list[dict[str, Any]] = []
        for engine in self.engines:
            state = self.replicas.state(engine)
            if state == "away":
                state = "loading" if engine in self._expected else "dead"
            if self.sleep_state is not SleepState.AWAKE and state != "dead":
                state = self.sleep_state.word
            stage = self.engine_stage(engine) if state != SleepState.ASLEEP.word else ""
            failed = {"last_failure": self.failures[engine]} if failures and engine in self.failures else {}
            states.append({"engine": engine, "state": state, **({"stage": stage} if stage else {}), **failed})
        return states

    @property
    def starting(self) -> bool:
        """The model should be awake but is not served by every API process yet; routers must wait."""
        return self.state in ("loading", "awake") and not self._served

    @property
    def unready(self) -> ApiError | None:
        """Why a router should send requests elsewhere, or None."""
        if (reason := self.stalled) is not None:
            return reason
        wakeable = self.phase in (Phase.SERVING, Phase.LOADING) and self._any_loaded
        if wakeable and self.sleep_state is SleepState.PAUSED:
            return unavailable("The model is paused.", "model_paused", 10)
        if wakeable and self.sleep_state is not SleepState.AWAKE:
            asleep = unavailable("The model is asleep.", "model_asleep", 10)
            return None if self.config.wake_on_request else asleep
        if self.phase is not Phase.SERVING:
            return self._refusal()
        if self.unshared_engines and all(replica.engine in self.unshared_engines for replica in self.replicas):
            return self._refusal(Phase.LOADING)
        return self.loaded.admission.refusal(1, 1)

    def for_model(self, asked: str | None) -> Service:
        """The service of a model by name, by default the first. Raises `ApiError` 404 for unknown names."""
        if asked is None:
            return self.lead
        for service in self.models:
            if asked in service.config.model_names or service.adapter(asked) is not None:
                return service
        for service in self.models:
            if service.config.any_name:
                return service
        names = ((*service.config.model_names, *service.adapters.served) for service in self.models)
        served = ", ".join(name for each in names for name in each)
        message = f"The model '{clip(asked)}' is not served here; served: {served}."
        raise ApiError(404, message, param="model", code="model_not_found")

    def adapter(self, asked: str | None) -> Served | None:
        """The LoRA adapter of this model that a request names, by its name or as BASE:NAME."""
        if asked is None:
            return None
        base, separator, name = asked.partition(":")
        inside = name if separator and base in self.config.model_names else asked
        return self.adapters.find(asked) or self.adapters.find(inside)

    async def _load_adapter(self, asked: str | None) -> None:
        """Load an adapter that is requested for the first time. Raises `ApiError`."""
        if asked is None or any(asked in each.config.model_names or each.adapter(asked) for each in self.models):
            return
        for each in self.models:
            if each.config.adapters and each.last_loaded is None:
                _ = each.loaded  # raises the reason: the engine has not reported its adapters yet
            base, separator, name = asked.partition(":")
            await each.adapters.load_from_folder(name if separator and base in each.config.model_names else asked)

    def name(self, asked: str | None) -> str:
        """The model name in answers."""
        return asked if asked is not None else self.config.model_names[0]

    async def offload(self, function: Callable[[], T]) -> T:
        """Run CPU work in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def close(self) -> None:
        for service in self.models:
            if service._grammars is not None:
                service._grammars.close()
        if self.media is not None:
            self.media.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
