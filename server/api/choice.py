"""`Choice`: one generated sequence of a request, from engine deltas to the pieces that clients see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.engine.wire.messages import Finish, TokenLogprobs
from weft.engine.wire.streams import Delta, TokenStream
from weft.server.errors import ApiError, bad_request, clip, unavailable
from weft.server.text.detokenizer import Detokenizer
from weft.server.text.stops import StopStrings
from weft.server.tools.structured import explain

BUSY_RETRY_AFTER = 2  # seconds


@dataclass(slots=True)
class Piece:
    """New output of a choice. Ids, log-probabilities and offsets are parallel and end at the same token."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # where each token's text starts in the choice's text
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def append(self, other: Piece) -> None:
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.offsets += other.offsets
        self.finish_reason = other.finish_reason
        self.stop_reason = other.stop_reason


@dataclass(frozen=True, slots=True)
class EndRules:
    """How the choices of a request end, and how much of the end is shown."""

    min_tokens: int  # output tokens before which stop strings are ignored
    stop_token_ids: Sequence[int]  # the request's stop tokens
    end_ids: Sequence[int]  # the model's end tokens
    hidden_ids: frozenset[int]  # tokens that are never shown
    include_stop: bool  # show stop strings and stop tokens


class Choice:
    """Detokenizes one sequence and ends it at its stop string. `index` is its position in the answer."""

    def __init__(
        self, index: int, prompt: int, stream: TokenStream, detokenizer: Detokenizer, stops: StopStrings | None,
        ends: EndRules, constraint: str | None = None,
    ) -> None:  # fmt: skip
        """`constraint`: the request field that constrains the answer, for error messages."""
        self.index, self.prompt, self.stream = index, prompt, stream
        self.num_tokens = 0
        self.cached_tokens = 0
        self.retained_tokens = 0  # prompt tokens that are retained at the client's request
        self.reasoning_tokens: int | None = None
        """Output tokens that are thinking; None if thinking is not parsed."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.pooled: bytes | None = None
        """Pooled hidden states (float32), if the request asks for them instead of output."""
        self.finished = False
        self.attempts = 1  # engines that it was submitted to
        self.counted = False  # its start is in the metrics
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self._detokenizer, self._stops, self._ends, self._constraint = detokenizer, stops, ends, constraint
        self._length = 0  # characters decoded so far
        self._deferred: Piece | Exception | None = None  # the argument of `defer`

    def take(self, delta: Delta) -> Piece:
        """Convert an engine delta to a piece. Raises `ApiError` if the engine refused or aborted the sequence."""
        if isinstance(self._deferred, Exception):
            raise self._deferred
        if delta.finish is Finish.REFUSED:
            raise bad_request(clip(explain(delta.error or "The engine refused this request.")), self._constraint)
        if delta.finish is Finish.NONFINITE:
            why = f"The request failed: {delta.error}."
            raise ApiError(500, why, code="nonfinite_logits")
        if delta.finish is Finish.BUSY:
            raise unavailable(clip(delta.error or "The engine is busy."), "engine_busy", BUSY_RETRY_AFTER)
        if delta.finish is Finish.ABORT:
            raise ApiError(500, delta.error or "The engine aborted this request.", code="engine_error")
        if delta.started is not None:
            self.cached_tokens = delta.started.cached_tokens
            self.retained_tokens = delta.started.retained_tokens
        self.prompt_logprobs += delta.prompt_logprobs
        self.pooled = delta.pooled or self.pooled
        piece, self._deferred = self._deferred or Piece(), None
        last = len(delta.token_ids) - 1
        for i, token_id in enumerate(delta.token_ids):
            piece.token_ids.append(token_id)
            piece.offsets.append(self._length)
            self.num_tokens += 1
            if i == last and delta.finish is Finish.STOP:
                piece.text += self._end_token(token_id, piece)
            else:
                piece.text += self._show(self._detokenizer.feed(token_id))
            if self._stopped(piece):
                break
        if delta.logprobs:
            piece.logprobs += delta.logprobs[: len(piece.token_ids)]
        if delta.finish is not Finish.RUNNING and not self.finished:
            piece.text += self._show(self._detokenizer.flush())
            if not self._stopped(piece):
                piece.text += self._stops.flush() if self._stops is not None else ""
            if not self._stopped(piece):
                self._finish(piece, "length" if delta.finish is Finish.LENGTH else "stop", piece.stop_reason)
        return piece

    def take_one(self, token_id: int, entry: TokenLogprobs | None) -> Piece:
        """Like `take`, for one token that is neither the first nor the last of the sequence."""
        piece = Piece("", [token_id], [] if entry is None else [entry], [self._length])
        self.num_tokens += 1
        piece.text = self._show(self._detokenizer.feed(token_id))
        self._stopped(piece)
        return piece

    def take_several(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Piece:
        """Like `take_one`, for tokens that come together. `entries` is empty without log-probabilities."""
        whole = Piece()
        for i, token_id in enumerate(token_ids):
            whole.append(self.take_one(token_id, entries[i] if entries else None))
            if self.finished:
                break
        return whole

    def take_text(self, token_id: int) -> str:
        """Like `take_one`, but return only the text. A token that finishes the choice is deferred."""
        self.num_tokens += 1
        text = self._show(self._detokenizer.feed(token_id))
        if self._stops is not None and self._stopped(piece := Piece(text)):
            self.defer(piece)
        return text

    def defer(self, result: Piece | Exception) -> None:
        """Let the reader of the stream end the choice: the next `take` returns or raises `result`."""
        self._deferred = result
        self.stream.wake()

    def _show(self, text: str) -> str:
        self._length += len(text)
        if self._stops is None or self.num_tokens < self._ends.min_tokens:
            return text
        return self._stops.feed(text)

    def _stopped(self, piece: Piece) -> bool:
        """Whether a stop string was found, so that the choice ends with this piece."""
        if self._stops is None or self._stops.matched is None:
            return False
        self._finish(piece, "stop", self._stops.matched)
        return True

    def _end_token(self, token_id: int, piece: Piece) -> str:
        """The visible text of the last token: an end token, a stop token, or the last token of a grammar."""
        if token_id in self._ends.stop_token_ids:
            piece.stop_reason = token_id
        elif token_id not in self._ends.end_ids:
            return self._show(self._detokenizer.feed(token_id))
        if not self._ends.include_stop or token_id in self._ends.hidden_ids:
            return ""
        return self._show(self._detokenizer.feed(token_id))

    def _finish(self, piece: Piece, reason: str, stop_reason: str | int | None) -> None:
        piece.finish_reason, piece.stop_reason = reason, stop_reason
        self.finished = True
        self.stream.abort()  # no effect if the engine has already finished
