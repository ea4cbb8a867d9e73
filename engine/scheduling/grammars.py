"""`Grammars`: compiles grammars and bad words of waiting requests, and computes masks, on threads."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from weft.engine.config import tokenizer
from weft.engine.errors import RequestError, one_line
from weft.engine.scheduling.bad_words import BadWords, Vocabulary
from weft.engine.scheduling.grammar import Compiled, Grammar, Mask
from weft.engine.scheduling.request import Request
from weft.engine.wire.grammar_text import LIMITS, compile_threads
from weft.engine.wire.messages import Finish

COMPILE_SECONDS = 10.0
"""Maximum seconds that a request waits for its grammar. Compilation cannot be stopped, so API processes only send
grammars that they have compiled within limits."""

GRAMMAR_BYTES = 512 * 2**20  # maximum bytes of compiled grammars, in use and cached

CACHED_GRAMMARS = 1024
CACHED_WORDS = 16  # cached lists of bad words
COMPILE_THREADS = 2
MASK_THREADS = 2


class _Waiting(NamedTuple):
    request: Request
    text: str | None  # text of the grammar
    words: Future[BadWords] | None
    deadline: float


class _Entry:
    """A grammar that is compiled or queued."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.compiled: Future[Compiled] | None = None  # the compiled grammar; None while memory for it is not available


class Grammars:
    """Compiles on separate threads. Its methods are called on the engine's thread only."""

    def __init__(self, model_path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """A model without a tokenizer has no grammars."""
        self._vocab_size = vocab_size
        self._read = partial(load_tokenizer, model_path, vocab_size, eos_token_ids)
        self._reading: Future[LLTokenizer] | None = None
        self._compilers = compile_threads(COMPILE_THREADS, "weft-grammar")
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="weft-masks")
        self._parallel = LLExecutor(MASK_THREADS)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # entries by text, most recently used last
        self._used: dict[int, int] = {}
        """Bytes of compiled and compiling grammars by number. Several threads write it."""
        self._numbers = itertools.count()
        self._words: OrderedDict[tuple[str, ...], Future[BadWords]] = OrderedDict()
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._computing: set[Future[None]] = set()

    def read_vocabulary(self) -> Future[LLTokenizer]:
        """Start to read the model's tokenizer, if nothing has yet. llguidance holds Python's lock meanwhile, for more
        than a second with a large vocabulary."""
        if self._reading is None:
            self._reading = self._compilers.submit(self._read)
        return self._reading

    @property
    def num_compiling(self) -> int:
        return len(self._waiting)

    def count_by_adapter(self) -> Counter[int]:
        """Return the waiting requests by the number of their adapter."""
        return Counter(waiting.request.adapter for waiting in self._waiting.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all compiled and compiling grammars."""
        return sum(list(self._used.values()))

    def begin(self, request: Request) -> None:
        """Start to compile a request's grammar and bad words. `compiled()` returns the request."""
        text, words = request.params.grammar, request.params.bad_words
        self.read_vocabulary()
        prepared = self._prepare_words(words) if words else None
        self._waiting[request.handle] = _Waiting(request, text, prepared, time.monotonic() + COMPILE_SECONDS)
        if text is None:
            return
        entry = self._entries.get(text)
        if entry is None:
            # Use the measured size, or else an estimate for schemas and choices.
            entry = self._entries[text] = _Entry(request.params.grammar_bytes or 2**16 + 512 * len(text))
        self._entries.move_to_end(text)
        self._compile_if_fits(text, entry)

    def _prepare_words(self, words: tuple[str, ...]) -> Future[BadWords]:
        found = self._words.pop(words, None) or self._compilers.submit(self._read_words, words)
        self._words[words] = found
        if len(self._words) > CACHED_WORDS:
            self._words.popitem(last=False)
        return found

    def _read_words(self, words: tuple[str, ...]) -> BadWords:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self.read_vocabulary().result(), self._vocab_size)
        return BadWords(words, self._vocabulary)

    def _compile_if_fits(self, text: str, entry: _Entry) -> None:
        """Start to compile a grammar if memory allows it. Drops unused grammars to make space."""
        if entry.compiled is not None:
            return
        wanted = {waiting.text for waiting in self._waiting.values()}
        for old in list(self._entries):
            full = self.num_bytes and self.num_bytes + entry.num_bytes > GRAMMAR_BYTES
            if not full and len(self._entries) <= CACHED_GRAMMARS:
                break
            if old not in wanted and old != text:
                self._forget(old)
        if not self.num_bytes or self.num_bytes + entry.num_bytes <= GRAMMAR_BYTES:
            number = next(self._numbers)
            self._used[number] = entry.num_bytes
            entry.compiled = self._compilers.submit(self._compile, text)
            entry.compiled.add_done_callback(partial(self._count, number))

    def _count(self, number: int, compiled: Future[Compiled]) -> None:
        """Count a compiled grammar's memory for as long as it is referenced."""
        if compiled.cancelled() or compiled.exception() is not None:
            self._used.pop(number, None)
        else:
            weakref.finalize(compiled.result(), self._used.pop, number, None)

    def _forget(self, text: str) -> None:
        entry = self._entries.pop(text)
        if entry.compiled is not None:
            entry.compiled.cancel()

    def compiled(self) -> list[tuple[Request, str | None, Finish]]:
        """Return requests whose constraints are ready (reason None), or that must be refused, with the reason."""
        if not self._waiting:
            return []
        out: list[tuple[Request, str | None, Finish]] = []
        for waiting in list(self._waiting.values()):
            request, text, words, deadline = waiting
            compiled = self._compiled_of(text)
            if (text is None or (compiled is not None and compiled.done())) and (words is None or words.done()):
                refusal, finish = self._give(request, compiled, words), Finish.REFUSED
            elif time.monotonic() > deadline:
                refusal, finish = f"the grammar was not compiled within {COMPILE_SECONDS:g} s", Finish.BUSY
            else:
                continue
            self.take(request.handle)
            out.append((request, refusal, finish))
            if refusal is not None and text is not None and text in self._entries and not self._is_wanted(text):
                self._forget(text)
        return out

    def _compiled_of(self, text: str | None) -> Future[Compiled] | None:
        """Return the future of a grammar, and start to compile it if memory allows it now."""
        if text is None:
            return None
        entry = self._entries[text]
        if entry.compiled is None:
            self._compile_if_fits(text, entry)
        return entry.compiled

    def _give(self, request: Request, compiled: Future[Compiled] | None, words: Future[BadWords] | None) -> str | None:
        """Attach the compiled constraints to a request, or return why it must be refused."""
        # Errors are not raised here: a traceback would keep this frame, and with it other grammars, alive.
        for prepared in (compiled, words):
            if prepared is not None and isinstance(error := prepared.exception(), RequestError):
                return str(error)
        if words is not None:
            request.bad_words = words.result()
            allowed = request.bad_words.allowed
            request.allowed = allowed if request.allowed is None else request.allowed & allowed
            if not request.allowed.any():
                return "bad_words allow no token"
        if compiled is not None:
            request.grammar = Grammar(compiled.result(), self.compute, self.compute_ahead)
        return None

    def take(self, handle: int) -> Request | None:
        """Stop waiting for a request's grammar, and cancel the compilation if no other request needs it."""
        waiting = self._waiting.pop(handle, None)
        if waiting is None:
            return None
        if waiting.text is not None and not self._is_wanted(waiting.text):
            entry = self._entries[waiting.text]
            if entry.compiled is None or entry.compiled.cancel():
                del self._entries[waiting.text]
        return waiting.request

    def _is_wanted(self, text: str | None) -> bool:
        return any(waiting.text == text for waiting in self._waiting.values())

    def compute(self, grammars: Sequence[Grammar]) -> None:
        """Start to compute the next masks of these grammars."""
        masks = np.zeros((len(grammars), -(-self._vocab_size // 32)), np.int32)
        rows = [(grammar.matcher, i) for i, grammar in enumerate(grammars)]

        def fill() -> None:
            self._parallel.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.strides[0], len(rows))

        computing = self._masks.submit(fill)
        self._computing = {future for future in self._computing if not future.done()} | {computing}
        for grammar, mask in zip(grammars, masks, strict=True):
            grammar.expect(mask, computing)

    def compute_ahead(self, drafted: Sequence[tuple[Grammar, Sequence[int]]]) -> list[Sequence[Mask]]:
        """Return the masks `[1 + n, ceil(V / 32)]` of each grammar before and after each of the n first drafts that it
        accepts. A mask is empty if it could not be computed."""
        rows, counts, at = [], [], 0
        for grammar, drafts in drafted:
            # Drafts may lead the matcher to where it fails for good, so a copy follows them.
            matcher = grammar.matcher.deep_copy()
            counts.append(matcher.validate_tokens(list(drafts)))
            if counts[-1]:
                rows.append((matcher, at, list(drafts[: counts[-1]])))
            at += 1 + counts[-1]
        masks = np.zeros((at, -(-self._vocab_size // 32)), np.int32)
        if rows:
            self._parallel.unsafe_compute_mask_ptr_with_draft_token(rows, masks.ctypes.data, masks.strides[0], at)
        return [list(part) for part in np.split(masks, np.cumsum([1 + count for count in counts])[:-1])]

    def wait(self, seconds: float) -> bool:
        """Wait until a compilation or mask is done. Returns False if none is running."""
        waited = [self._entries[w.text].compiled for w in self._waiting.values() if w.text is not None]
        compiling = [*waited, *(w.words for w in self._waiting.values())]
        started: list[Future[Any]] = [*self._computing, *(future for future in compiling if future is not None)]
        running = {future for future in started if not future.done()}
        if running:
            wait(running, seconds, FIRST_COMPLETED)
        elif self._waiting:
            time.sleep(seconds)  # until memory is available
        return bool(running or self._waiting)

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    def _compile(self, text: str) -> Compiled:
        matcher = LLMatcher(self.read_vocabulary().result(), text, log_level=0, limits=LIMITS)
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be used: {' '.join(matcher.get_error().split())}"[:300], "grammar")
        if not mask.any():
            raise RequestError("the grammar allows no token of this model", "grammar")
        return Compiled(matcher, mask)


def load_tokenizer(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Load the vocabulary for grammars. Raises `RequestError` if the model has no usable tokenizer."""
    try:
        if (path / "tokenizer.json").exists():
            source = str(path / "tokenizer.json")
        else:
            source = tokenizer.load_tokenizer(path).backend_tokenizer.to_str()
        return LLTokenizer(source, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except Exception as error:  # each library raises its own types
        raise RequestError(f"grammars need the model's tokenizer: {one_line(error, 150)}", "grammar") from error
