"""`Grammars`: compiles the grammars of requests that wait, and computes masks, on threads of its own."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from weft.engine.errors import RequestError
from weft.engine.scheduling.grammar import Compiled, Grammar
from weft.engine.scheduling.request import Request
from weft.engine.wire.grammar_text import LIMITS, compile_threads

COMPILE_SECONDS = 10.0
"""a grammar that takes longer is refused; `LIMITS` end the work itself"""

CACHED_GRAMMARS = 128
COMPILE_THREADS = 2
MASK_THREADS = 2


class _Waiting(NamedTuple):
    request: Request
    compiled: Future[Compiled]
    deadline: float


class Grammars:
    """Compiles grammars and computes masks on threads of its own. Otherwise used by one thread, the engine's."""

    def __init__(self, model_path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Starts to read the model's tokenizer; a model without one has no grammars."""
        self._vocab_size = vocab_size
        self._compilers = compile_threads(COMPILE_THREADS, "weft-grammar")
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="weft-masks")
        self._parallel = LLExecutor(MASK_THREADS)
        self._cache: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._waiting: dict[int, _Waiting] = {}
        self._computing: set[Future[None]] = set()
        self._tokenizer = self._compilers.submit(load_tokenizer, model_path, vocab_size, eos_token_ids)

    @property
    def num_compiling(self) -> int:
        return len(self._waiting)

    def begin(self, request: Request, text: str) -> None:
        """Compile a request's grammar. The request comes back from `compiled()`."""
        found = self._cache.pop(text, None)
        if found is None or (found.done() and found.exception() is not None):
            found = self._compilers.submit(self._compile, text)
        self._cache[text] = found
        if len(self._cache) > CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        self._waiting[request.handle] = _Waiting(request, found, time.monotonic() + COMPILE_SECONDS)

    def compiled(self) -> list[tuple[Request, str | None]]:
        """Requests whose grammar is there, and those that must be refused, each with the reason."""
        if not self._waiting:
            return []
        out: list[tuple[Request, str | None]] = []
        for request, future, deadline in list(self._waiting.values()):
            if future.done():
                refusal = None
                try:
                    request.grammar = Grammar(future.result(), self.compute)
                except RequestError as error:
                    refusal = str(error)
            elif time.monotonic() > deadline:
                refusal = f"the grammar takes longer than {COMPILE_SECONDS:g} s to compile"
            else:
                continue
            del self._waiting[request.handle]
            out.append((request, refusal))
        return out

    def take(self, handle: int) -> Request | None:
        """Stop waiting for a request's grammar."""
        waiting = self._waiting.pop(handle, None)
        return waiting.request if waiting is not None else None

    def compute(self, grammars: Sequence[Grammar]) -> None:
        """Start to compute the next masks of these."""
        masks = np.zeros((len(grammars), -(-self._vocab_size // 32)), np.int32)
        rows = [(grammar.matcher, i) for i, grammar in enumerate(grammars)]

        def fill() -> None:
            self._parallel.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.strides[0], len(rows))

        computing = self._masks.submit(fill)
        self._computing = {future for future in self._computing if not future.done()} | {computing}
        for grammar, mask in zip(grammars, masks, strict=True):
            grammar.expect(mask, computing)

    def wait(self, seconds: float) -> bool:
        """Wait until something is done that was started here; False when nothing is under way."""
        started: list[Future[Any]] = [*self._computing, *(waiting.compiled for waiting in self._waiting.values())]
        under_way = {future for future in started if not future.done()}
        if under_way:
            wait(under_way, seconds, FIRST_COMPLETED)
        return bool(under_way)

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    def _compile(self, text: str) -> Compiled:
        matcher = LLMatcher(self._tokenizer.result(), text, log_level=0, limits=LIMITS)
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be used: {' '.join(matcher.get_error().split())}"[:300], "grammar")
        if not mask.any():
            raise RequestError("the grammar allows no token of this model", "grammar")
        return Compiled(matcher, mask)


def load_tokenizer(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The vocabulary as grammars see it. Raises `RequestError` when the model has none that can be used."""
    try:
        if (path / "tokenizer.json").exists():
            source = str(path / "tokenizer.json")
        else:
            from transformers import AutoTokenizer

            source = AutoTokenizer.from_pretrained(str(path), local_files_only=True).backend_tokenizer.to_str()
        return LLTokenizer(source, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except Exception as error:  # every library on the way has types of its own
        reason = " ".join(str(error).split())[:150]
        raise RequestError(f"grammars need the model's tokenizer: {reason}", "grammar") from error
