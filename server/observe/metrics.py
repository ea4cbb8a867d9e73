"""Prometheus metrics. Names and labels are an API, pinned by a test; label values are fixed sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from weft.engine.wire.child import has_ended
from weft.engine.wire.heartbeat import ENGINE, LATE_SECONDS, Watch
from weft.engine.wire.messages import EngineStats, PlanStats, SchedulerStats, Started
from weft.server.observe.counters import Counter, Histogram, Store
from weft.server.observe.engine_metrics import TIERS, EngineMetrics
from weft.server.observe.exposition import CONTENT_TYPE, family, head, labelled
from weft.server.observe.shared_state import SharedState, SleepState
from weft.server.observe.storage import Storage

LAG_INTERVAL = 0.05
_SCRAPE_HEAD = f"HTTP/1.1 200 OK\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: ".encode()

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5, 5.0)
_CPU = (0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_LAG = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)
_WAIT = (0.1, 1.0, 10.0, 60.0)
KEYS_SHOWN = 100  # API keys with metrics of their own
_SIZE = tuple(float(2**i) for i in range(17))

PROBES = ("/health", "/ready", "/metrics", "/version", "/ping")  # Paths that need no key.
ENDPOINTS = (
    *PROBES, "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings",
    "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling", "/v1/conversations",
    "/tokenize", "/detokenize", "/tokenizer_info", "/v1/files", "/v1/batches",
    "/v1/completions/render", "/v1/chat/completions/render", "/v1/messages", "/v1/messages/count_tokens",
    "/invocations", "/server_info", "/load", "/props", "/apply-template", "/slots", "/completion", "/api/chat",
    "/api/generate", "/api/embed", "/api/embeddings", "/api/tags", "/api/show", "/api/ps", "/api/version",
)  # fmt: skip
STORED_PATHS = ("/v1/files/", "/v1/batches/", "/v1/responses/", "/v1/conversations/")
_ENDPOINTS = frozenset(ENDPOINTS)
_CAUSES = ["disconnect", "stall", "timeout", "drain", "engine", "error", "crash", "sleep"]
_STATUSES = [
    "200", "400", "401", "403", "404", "405", "408", "413", "415", "429", "431", "499", "500", "501", "503", "504",
    "505", "507", "529",
]  # fmt: skip
_REFUSALS = [
    "loading", "draining", "dead", "queue_full", "queue_tokens_full", "rate_limit_exceeded",
    "grammar_compilers_busy", "model_asleep", "model_waking",
]  # fmt: skip
IMAGE_SOURCES = ("data", "url", "file", "local")
GRAMMAR_OUTCOMES = ("compiled", "invalid", "too_large", "busy", "abandoned")

_PER_MODEL: tuple[tuple[str, str, str, Callable[[SchedulerStats], int]], ...] = (
    ("weft_model_requests_running", "gauge", "Sequences running, by model", lambda s: s.running),
    ("weft_model_requests_waiting", "gauge", "Sequences waiting, by model", lambda s: s.waiting),
    ("weft_model_prompt_tokens_total", "counter", "Prompt tokens of started requests, by model",
     lambda s: s.prompt_tokens),
    ("weft_model_generation_tokens_total", "counter", "Tokens generated, by model", lambda s: s.generation_tokens),
)  # fmt: skip


def endpoint_of(path: str) -> str:
    """Return the endpoint label of a path. Paths of stored objects count as their collection."""
    if path.startswith(STORED_PATHS):
        path = "/".join(path.split("/")[:3])
    return path if path in _ENDPOINTS else "other"


class Metrics:
    """The metrics of a daemon. A process counts in its row of the shared state; `render` sums all rows."""

    def __init__(
        self, shared_state: SharedState | None = None, row: int = 0, watch: Watch | None = None, models: Mapping[str,
        Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        """`models`: engine numbers by model name."""
        shared_state = shared_state or SharedState(1)
        self._shared_state = shared_state
        self._watch = watch
        self._store = store = Store(shared_state, row)
        self._http = shared_state.http
        self.storage = Storage(shared_state, row)
        self._row = row

        def histogram(name: str, help: str, buckets: tuple[float, ...], **labels: Sequence[str]) -> Histogram:
            return Histogram(store, f"weft_{name}", help, buckets, **labels)

        def counter(name: str, help: str, **labels: Sequence[str]) -> Counter:
            return Counter(store, f"weft_{name}", help, **labels)

        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token", _LATENCY)
        self.itl = histogram("inter_token_latency_seconds", "Gap between consecutive deliveries of tokens", _GAP)
        self.tpot = histogram("time_per_output_token_seconds", "(Latency - TTFT) / (output tokens - 1)", _GAP)
        self.latency = histogram("request_latency_seconds", "Arrival to last token", _LATENCY)
        self.normalized = histogram("normalized_latency_seconds", "Latency / output tokens", _GAP)
        self.queue_time = histogram("queue_time_seconds", "Arrival in the engine to first schedule", _LATENCY)
        waits = "Arrival in the engine to first schedule or abort, by number of the API key"
        numbers = [str(i) for i in range(min(KEYS_SHOWN, len(shared_state.buckets)))]
        self.key_queue_time = histogram("key_queue_time_seconds", waits, _WAIT, key=numbers)
        self.prefill_time = histogram("prefill_time_seconds", "First schedule to first token", _LATENCY)
        self.decode_time = histogram("decode_time_seconds", "First token to last token", _LATENCY)
        self.iteration_tokens = histogram("iteration_tokens", "Tokens in an iteration", _SIZE)
        self.iteration_seconds = histogram("iteration_seconds", "Duration of an iteration", _GAP)
        self.batch_requests = histogram("batch_requests", "Requests in an iteration", _SIZE[:13])
        self.load_seconds = histogram("kv_load_seconds", "Time to load a KV page to the GPU", _LATENCY, tier=TIERS)
        self.schedule_seconds = histogram("schedule_seconds", "CPU time of schedule and commit per iteration", _CPU)
        self.event_loop_lag = histogram("event_loop_lag_seconds", "Delay of a timer in an API process", _LAG)
        self.requests = counter("requests", "HTTP requests answered", endpoint=ENDPOINTS, status=_STATUSES)
        self.finished = counter(
            "finished", "Sequences that ended", reason=("stop", "length", "tool_calls", "abort", "error")
        )
        self.rejected = counter("rejected", "Requests rejected before any work", reason=_REFUSALS)
        self.aborted = counter("aborted", "Sequences ended before they finished", cause=_CAUSES)
        self.grammar_seconds = histogram("grammar_compile_seconds", "CPU time to compile a client's grammar", _LATENCY)
        self.grammars = counter("grammar_compiles", "Clients' grammars by outcome", outcome=GRAMMAR_OUTCOMES)
        self.images = counter("images", "Images in requests", source=IMAGE_SOURCES, outcome=("ready", "refused"))
        self.image_pixels = counter("image_pixels", "Pixels handed to engines, after resizing")
        self.image_fetch_seconds = histogram("image_fetch_seconds", "Time to fetch an image by URL", _LATENCY)
        self.image_decode_seconds = histogram("image_decode_seconds", "Time to decode and resize an image", _LATENCY)
        numbers = [str(i) for i in range(shared_state.engines)]
        self.engine_restarts = counter("engine_restarts", "Restarts of engine processes", engine=numbers)
        self.api_restarts = counter("api_process_restarts", "Restarts of API processes")
        self.requests_lost = counter("requests_lost", "HTTP requests lost with an API process")
        self.clients_stalled = counter("clients_stalled", "Clients disconnected because they did not read")
        self.accepts_refused = counter("accepts_refused", "Connections refused without a free file descriptor")
        self.log_lines_dropped = counter("log_lines_dropped", "Log lines dropped because the log was read too slowly")
        self.engine_hangs = counter("engine_hangs", "Engine processes killed without progress", engine=numbers)
        self.api_hangs = counter("api_process_hangs", "API processes killed without progress")
        self.restarts_given_up = counter("restarts_given_up", "Engines given up after too many restarts")
        self.retried = counter("retried", "Sequences retried on another engine")
        self._models = dict(models or {})
        names = list(self._models)
        self.model_sleeps = counter("model_sleeps", "Times a model went to sleep", model_name=names)
        self.model_wakes = counter("model_wakes", "Times a model woke", model_name=names)
        self.model_wake_seconds = histogram("model_wake_seconds", "Seconds to wake a model", _LATENCY)
        self._model_ttft: Histogram | None = None
        if len(names) > 1:
            what = "Arrival to first token, by model"
            self._model_ttft = histogram("model_time_to_first_token_seconds", what, _LATENCY, model_name=names)
        self._engine_metrics = EngineMetrics(shared_state.engines)
        self.engines = self._engine_metrics.engines
        self._iterations = [0] * shared_state.engines
        self._engine_lines_dropped = [0] * shared_state.engines

    @property
    def plan(self) -> PlanStats:
        """Plan statistics of all engines."""
        return self._engine_metrics.plan

    def count_iteration(self, stats: EngineStats, engine: int = 0) -> None:
        """Count an iteration. Called for every message of an engine, in one process of the daemon."""
        for tier, seconds in stats.load_seconds:
            self.load_seconds.labels(tier).observe(seconds)
        if (dropped := stats.log_lines_dropped) != (before := self._engine_lines_dropped[engine]):
            self.log_lines_dropped.inc(dropped - (before if dropped > before else 0))  # less: it was restarted
            self._engine_lines_dropped[engine] = dropped
        if stats.iterations == self._iterations[engine]:
            return  # the message had no iteration
        self._iterations[engine] = stats.iterations
        last = stats.iteration
        self.iteration_tokens.observe(last.tokens)
        self.iteration_seconds.observe(last.seconds)
        self.batch_requests.observe(last.requests)
        self.schedule_seconds.observe(last.schedule_seconds)

    def sequence_started(self, started: Started, ttft: float, model: str = "") -> None:
        self.ttft.observe(ttft)
        if self._model_ttft is not None:
            self._model_ttft.labels(model).observe(ttft)
        self.queue_time.observe(started.queue_seconds)
        self.prefill_time.observe(started.prefill_seconds)

    def sequence_finished(self, reason: str, *, ttft: float, latency: float, num_tokens: int) -> None:
        self.finished.labels(reason).inc()
        self.latency.observe(latency)
        self.decode_time.observe(latency - ttft)
        if num_tokens:
            self.normalized.observe(latency / num_tokens)
        if num_tokens > 1:
            self.tpot.observe((latency - ttft) / (num_tokens - 1))

    def sequence_aborted(self, cause: str) -> None:
        self.finished.labels("abort").inc()
        self.aborted.labels(cause).inc()

    def request_began(self) -> None:
        """Count an open HTTP request, until `request_ended` or `process_lost`."""
        self._http[self._row] += 1

    def request_dismissed(self) -> None:
        """Undo `request_began`, for a request that is not answered."""
        self._http[self._row] -= 1

    def request_ended(self, endpoint: str, status: int) -> None:
        self._http[self._row] -= 1
        self.requests.labels(endpoint, str(status)).inc()

    def process_lost(self, sequences: int, requests: int) -> None:
        """Count the open requests of a dead API process as lost."""
        self.requests_lost.inc(requests)
        self.finished.labels("abort").inc(sequences)
        self.aborted.labels("crash").inc(sequences)

    def grammar_tried(self, outcome: str, seconds: float) -> None:
        """`seconds`: CPU time; 0 if it was never compiled."""
        self.grammars.labels(outcome).inc()
        if outcome == "busy":
            self.rejected.labels("grammar_compilers_busy").inc()
        if seconds:
            self.grammar_seconds.observe(seconds)

    async def watch_event_loop(self) -> None:
        """Measure the delay of the loop's timers until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self.event_loop_lag.observe(max(0.0, loop.time() - due))

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        watch = self._watch
        rows = range(ENGINE, ENGINE + len(self.engines))
        figures = self._store.text() + self._model_metrics() + self.storage.text()
        if watch is None:
            return figures + self._engine_metrics.text([False for _ in rows])
        late = [watch.late(row, LATE_SECONDS) is not None for row in rows]
        return figures + self._engine_metrics.text(late) + _heartbeats(watch, len(rows)) + _ranks(watch, rows)

    def scrape(self) -> bytes:
        """Return the response to `GET /metrics`, head and body. The next scrape counts this one."""
        body = self.render()
        self.requests.labels("/metrics", "200").inc()
        return b"%b%d\r\n\r\n%b" % (_SCRAPE_HEAD, len(body), body)

    def _model_metrics(self) -> bytes:
        """Return the metrics per model: sleep states and request counts."""
        if not self._models:
            return b""
        state = "weft_model_state"
        states = {
            name: SleepState(int(self._shared_state.sleep_states[model])) for model, name in enumerate(self._models)
        }
        lines = [head(state, "gauge", "1 for the current state of a model")]
        for name, current in states.items():
            lines += [
                f"{state}{labelled({'model_name': name, 'state': each.word})} {float(each is current)}\n"
                for each in SleepState
            ]
        sleeping = {
            str(i): states[name] is SleepState.ASLEEP for name, engines in self._models.items() for i in engines
        }
        help = "1 while its model sleeps, so that it need not be up"
        lines.append(family("weft_engine_asleep", "gauge", help, "engine", sleeping))
        totals = {name: self._engine_metrics.together(engines) for name, engines in self._models.items()}
        for metric, kind, help, of in _PER_MODEL:
            lines.append(family(metric, kind, help, "model_name", {name: of(s) for name, s in totals.items()}))
        return "".join(lines).encode()


def _ranks(watch: Watch, rows: range) -> bytes:
    """Return the metrics of engines with several ranks; empty if there are none."""
    heartbeats = watch.heartbeats
    others = {row: heartbeats.ranks(row) for row in rows}
    if not any(others.values()):
        return b""
    alive, ages = "weft_engine_ranks", "weft_rank_last_beat_seconds"
    text = head(alive, "gauge", "Live ranks of an engine")
    for i, row in enumerate(rows):
        pids = [heartbeats.of(row).pid, *(heartbeats.rank(row, rank).pid for rank in others[row])]
        text += f"{alive}{labelled({'engine': str(i)})} {sum(pid != 0 and not has_ended(pid) for pid in pids)}\n"
    text += head(ages, "gauge", "Seconds since the last heartbeat of a rank other than rank 0")
    for i, row in enumerate(rows):
        for rank in others[row]:
            labels = labelled({"engine": str(i), "rank": str(rank)})
            text += f"{ages}{labels} {watch.rank_age(row, rank):.3f}\n"
    return text.encode()


def _heartbeats(watch: Watch, engines: int) -> bytes:
    def ages(name: str, help: str, label: str, rows: range) -> str:
        lines = [f"{name}{labelled({label: str(i)})} {watch.age(row):.3f}\n" for i, row in enumerate(rows)]
        return head(name, "gauge", help) + "".join(lines)

    of_engines, of_api = range(ENGINE, ENGINE + engines), range(ENGINE + engines, watch.heartbeats.rows)
    since = "Seconds since the last heartbeat of an"
    engines_text = ages("weft_engine_last_beat_seconds", f"{since} engine", "engine", of_engines)
    api_text = ages("weft_api_process_last_beat_seconds", f"{since} API process", "process", of_api)
    return (engines_text + api_text).encode()
