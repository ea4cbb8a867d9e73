"""`Replicas`: the engines that an API process is connected to, their cached pages and their load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from weft.engine.errors import EngineDead
from weft.engine.wire.messages import EngineReady, EngineStats, Image, PageChanges
from weft.engine.wire.page_keys import BRIEF, chain, image_parts, page_keys, root, state_tokens
from weft.engine.wire.streams import Streams
from weft.server.observe.shared_state import SharedState
from weft.server.replicas.router import POLICY, Candidate, Policy, choose


class Replica:
    """A ready engine."""

    def __init__(self, engine: int, client: Streams, ready: EngineReady) -> None:
        self.engine, self.client, self.ready = engine, client, ready
        self.cached_pages = CachedPages(ready.pages)


class PromptPages:
    """A prompt and the brief keys of its pages, for each model version: weights may differ during a rollout. tokens:
    int32."""

    def __init__(
        self, tokens: Sequence[int], salt: str, readies: Iterable[EngineReady], images: Sequence[Image] = ()
    ) -> None:
        self.tokens: npt.NDArray[np.int32] = np.asarray(tokens, np.int32)
        self._keys: dict[tuple[str, int], list[bytes]] = {}
        self._states: dict[tuple[str, int], list[bytes]] = {}
        for ready in {(ready.model_id, ready.page_size): ready for ready in readies}.values():
            parts = image_parts(images, ready.page_size)
            keys = page_keys(root(ready.model_id, salt), self.tokens, ready.page_size, images=parts)
            self._keys[ready.model_id, ready.page_size] = [key[:BRIEF] for key in keys]
            if ready.recurrent:
                (first,) = state_tokens(1, ready.page_size)
                self._states[ready.model_id, ready.page_size] = [chain(key, first)[:BRIEF] for key in keys]

    def keys(self, ready: EngineReady) -> list[bytes]:
        """Keys of the full pages; empty for an engine that became ready later."""
        return self._keys.get((ready.model_id, ready.page_size), [])

    def states(self, ready: EngineReady) -> list[bytes]:
        """Keys of the recurrent states after the full pages; empty for a model without any."""
        return self._states.get((ready.model_id, ready.page_size), [])

    def expected(self, ready: EngineReady) -> list[bytes]:
        """Keys of what the engine has cached once it has computed the prompt."""
        return self.keys(ready) + self.states(ready)[: self._reusable(ready)][-1:]

    def _reusable(self, ready: EngineReady) -> int:
        """Full pages that leave at least one token to compute."""
        return (len(self.tokens) - 1) // ready.page_size

    def cached_tokens(self, replica: Replica) -> int:
        """Tokens whose pages, and recurrent state if the model has any, the engine has cached."""
        ready, cached = replica.ready, replica.cached_pages
        count = cached.match(self.keys(ready)[: self._reusable(ready)])
        if ready.recurrent:
            states = self.states(ready)
            count = next((i for i in range(count, 0, -1) if cached.match(states[i - 1 : i])), 0)
        return count * ready.page_size


class Ticket:
    """A sequence routed to an engine. Its work counts as load of that engine until it is done."""

    __slots__ = ("_load", "_output", "_pages", "_prefill", "replica")

    def __init__(
        self, replica: Replica, load: npt.NDArray[np.int64], prefill: int, output: int, pages: list[bytes]
    ) -> None:
        """`load`: this process's load by engine. `prefill`, `output`: tokens. `pages`: keys of pages to be computed."""
        self.replica, self._load, self._prefill = replica, load, prefill
        self._output, self._pages = output, pages
        load[replica.engine] += prefill + output
        replica.cached_pages.expect(pages)

    def sibling(self) -> Ticket:
        """A ticket for another sequence of the same prompt."""
        return Ticket(self.replica, self._load, 0, self._output, [])

    def started(self) -> None:
        """The prompt is computed. Idempotent."""
        self._load[self.replica.engine] -= self._prefill
        self.replica.cached_pages.settle(self._pages)
        self._prefill, self._pages = 0, []

    def end(self) -> None:
        """The sequence has ended. Idempotent."""
        self.started()
        self._load[self.replica.engine] -= self._output
        self._output = 0


class Replicas:
    """The engines of one model.

    Attributes:
        on_open: called with the number of open sequences when it changes."""

    def __init__(
        self,
        shared_state: SharedState,
        row: int,
        *,
        stalled: Callable[[int], bool] = lambda _engine: False,
        policy: Policy = POLICY,
        engines: Sequence[int] | None = None,
    ) -> None:
        """`row`: this process's row of the shared state. `stalled`: whether an engine makes no progress. `engines`: the
        model's engine numbers, by default all."""
        self.engines = list(range(shared_state.engines)) if engines is None else list(engines)
        self.policy = policy
        self.on_open: Callable[[int], None] = lambda _count: None
        self._shared_state = shared_state
        self._load = shared_state.engine_load[row]
        self._load[self.engines] = 0
        self._stalled = stalled
        self._by_engine: dict[int, Replica] = {}
        self._alone = len(self.engines) == 1

    def attach(self, engine: int, client: Streams, ready: EngineReady, on_stats: Callable[[EngineStats], None]) -> None:
        """`on_stats`: called with each message of the engine."""
        replica = self._by_engine[engine] = Replica(engine, client, ready)

        def update(stats: EngineStats) -> None:
            replica.cached_pages.update(stats.pages)
            on_stats(stats)

        client.on_stats = on_stats if self._alone else update
        client.on_open = lambda _count: self.on_open(self.num_open)

    def detach(self, engine: int) -> None:
        """Remove an engine that has ended. Idempotent."""
        self._by_engine.pop(engine, None)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._by_engine.values())

    def state(self, engine: int) -> str:
        """One of serving, draining, stalled and away."""
        if engine not in self._by_engine:
            return "away"
        if self._stalled(engine):
            return "stalled"
        return "draining" if self._shared_state.closed[engine] else "serving"

    @property
    def num_open(self) -> int:
        return sum(replica.client.num_open for replica in self._by_engine.values())

    @property
    def waiting(self) -> int:
        """Sequences queued at the engines."""
        return sum(replica.client.stats.scheduler.waiting for replica in self._by_engine.values())

    @property
    def max_num_seqs(self) -> int:
        return sum(replica.ready.max_num_seqs for replica in self._by_engine.values())

    @property
    def ready(self) -> EngineReady:
        """The engines combined: limits that all of them meet, and total capacity."""
        readies = [replica.ready for replica in self._by_engine.values()]
        return replace(
            readies[0],
            max_model_len=min(ready.max_model_len for ready in readies),
            max_num_seqs=self.max_num_seqs,
            num_pages=sum(ready.num_pages for ready in readies),
            pages=b"",
        )

    def prefetch(self, names: tuple[bytes, ...]) -> None:
        """Announce the next turn of a conversation, so that engines fetch its pages."""
        for replica in self._by_engine.values():
            if replica.ready.prefetches and replica.client.alive:
                replica.client.prefetch(names)

    def prompt_pages(self, tokens: Sequence[int], salt: str, images: Sequence[Image] = ()) -> PromptPages:
        """The prompt's pages, to be passed to `route`."""
        readies = [] if self._alone else [replica.ready for replica in self._by_engine.values()]
        return PromptPages(tokens, salt, readies, images)

    def route(self, pages: PromptPages, max_tokens: int | None, key: str | None = None) -> Ticket:
        """Choose an engine for a sequence. `max_tokens`: the output limit. `key`: the client's key for requests with a
        common prefix. The caller must hold the shared state's lock. Raises `EngineDead` if there is no engine."""
        output = self.policy.expected_output if max_tokens is None else min(max_tokens, self.policy.expected_output)
        alive = [replica for replica in self._by_engine.values() if replica.client.alive]
        if not alive:
            raise EngineDead("there is no engine")
        if self._alone:
            return Ticket(alive[0], self._load, 0, 0, [])
        closed = self._shared_state.closed
        serving = [r for r in alive if not closed[r.engine] and not self._stalled(r.engine)] or alive
        given, loads = self._shared_state.given, self._shared_state.engine_load.sum(axis=0)
        own = self.engines
        cached = {replica.engine: pages.cached_tokens(replica) for replica in serving}
        candidates = [
            Candidate(r.engine, cached[r.engine], float(loads[r.engine]), float(given[r.engine, 0])) for r in serving
        ]
        tokens, requests = given[own].sum(axis=0).tolist()
        mean_size = tokens / requests if requests else 0.0
        engine = choose(candidates, len(pages.tokens), mean_size, self.policy, key)
        replica = self._by_engine[engine]
        prefill = len(pages.tokens) - cached[engine]
        given[engine] += (prefill + output, 1)
        if requests + 1 >= self.policy.window:
            given[own] /= 2
        return Ticket(replica, self._load, prefill, output, pages.expected(replica.ready))


def credit_new_engine(shared_state: SharedState, engine: int, others: Sequence[int] | None = None) -> None:
    """Credit a new engine with the mean work of the others, so that it does not get all requests until it catches up.
    `others`: the engines of its model, by default all."""
    with shared_state.lock():
        rest = [other for other in (range(shared_state.engines) if others is None else others) if other != engine]
        if rest:
            shared_state.given[engine] = shared_state.given[rest].mean(axis=0)


class CachedPages:
    """The pages that the engine reported, and those that requests just sent there will compute. A stale entry only
    costs time: the engine checks its own prefix index."""

    def __init__(self, pages: bytes = b"") -> None:
        """`pages`: concatenated brief keys, as engines report them."""
        self._reported = set(_split(pages))
        self._expected: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._reported)

    def update(self, news: PageChanges) -> None:
        if news.entered:
            self._reported.update(_split(news.entered))
        if news.left:
            self._reported.difference_update(_split(news.left))

    def expect(self, keys: Iterable[bytes]) -> None:
        """Add the pages of a request that was sent to the engine, until `settle`."""
        self._expected.update(keys)

    def settle(self, keys: Iterable[bytes]) -> None:
        """Drop expected pages: the engine has computed and reported them, or never will."""
        for key in keys:
            if self._expected[key] > 1:
                self._expected[key] -= 1
            else:
                del self._expected[key]

    def match(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages of a prompt that are cached or expected."""
        reported, expected = self._reported, self._expected
        for i, key in enumerate(keys):
            if key not in reported and key not in expected:
                return i
        return len(keys)


def _split(pages: bytes) -> list[bytes]:
    return [pages[i : i + BRIEF] for i in range(0, len(pages), BRIEF)]
