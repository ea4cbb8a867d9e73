"""`ResponseDialect`: an answer as a response object or as its events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import orjson

from weft.server.api.choice import Choice, Piece
from weft.server.api.events import Dialect, event
from weft.server.api.responses.body import ENCRYPTED, OfferedTools, Reasoning, ResponseBody
from weft.server.api.responses.output import Output
from weft.server.api.turn import Turn
from weft.server.errors import ApiError
from weft.server.text.logprobs import chat_logprobs

Keep = Callable[[dict[str, Any]], Awaitable[None]]  # stores a response object before the client gets it


class ResponseDialect(Dialect):
    """Writes the one choice of a turn."""

    def __init__(self, turn: Turn, body: ResponseBody, tools: OfferedTools, hex_id: str, keep: Keep) -> None:
        """`hex_id`: the response's id without its prefix."""
        self._turn = turn
        self._keep = keep
        self._output = Output(
            hex_id,
            is_custom=turn.parser.is_custom,
            namespaces=tools.namespaces,
            as_summary=body.as_summary,
            sealed=ENCRYPTED in body.include,
            may_call=not turn.parser.plain,
        )
        self._queued = False
        self._begun = False
        self._finish_reason: str | None = None
        self.cancelled = False  # the client cancelled the response
        self.response = blank(turn, body, hex_id)

    async def body(self, wholes: Sequence[Piece]) -> bytes:
        (choice,) = self._turn.generation.choices
        for piece in _by_token(wholes[0]) if wholes[0].logprobs else wholes:
            self._feed(choice, piece)
        return orjson.dumps(await self._finished())

    def events(self, choice: Choice, piece: Piece) -> bytes:
        first = b"" if self._begun else self._begin()
        return first + self._feed(choice, piece)

    def token_event(self, choice: Choice, token_id: int, text: str) -> bytes | None:
        output = self._output
        if not output.takes_text or not self._turn.parser.passes(choice, token_id, text):
            return None
        return output.more_text(text) if text else b""

    def queue(self) -> bytes:
        """The events of a queued response."""
        self._queued = True
        queued = {**self.response, "status": "queued"}
        created = self._output.event("response.created", response=queued)
        return created + self._output.event("response.queued", response=queued)

    def _begin(self) -> bytes:
        """The first events."""
        self._begun = True
        created = b"" if self._queued else self._output.event("response.created", response=self.response)
        return created + self._output.event("response.in_progress", response=self.response)

    async def end(self) -> bytes:
        response = await self._finished()
        return self._output.event(f"response.{response['status']}", response=response)

    async def failed(self, error: ApiError) -> bytes:
        if not (self._begun or self._queued):
            about = {"type": "error", "sequence_number": 0, "code": error.code}
            return event(orjson.dumps({**about, "message": error.message, "param": error.param}), b"error")
        out = self._output.close("incomplete")
        response = await self.broken(error)
        # There is no event for cancelled responses.
        return out + self._output.event("response.failed", response=response)

    async def broken(self, error: ApiError) -> dict[str, Any]:
        """Store and return the response with an error."""
        status = "cancelled" if self.cancelled else "failed"
        about = None if self.cancelled else {"code": error.code or "server_error", "message": error.message}
        self.response |= {"status": status, "error": about, "output": self._output.items}
        await self._keep(self.response)
        return self.response

    def _feed(self, choice: Choice, piece: Piece) -> bytes:
        turn = self._turn
        runs = turn.parser.runs(choice, piece)
        logprobs: list[dict[str, Any]] = []
        if piece.logprobs:
            tokenizer, body = turn.tokenizer, turn.body
            top, own = body.shown_logprobs(body.top_logprobs), bool(body.logprob_token_ids)
            found = chat_logprobs(tokenizer.token_text, tokenizer.token_bytes, piece.logprobs, top, own=own)
            logprobs = found["content"]
        out = b"".join(self._output.feed(parts, [] if i else logprobs) for i, parts in enumerate(runs))
        if piece.finish_reason is not None:
            self._finish_reason = piece.finish_reason
            out += self._output.end("incomplete" if piece.finish_reason == "length" else "completed")
        return out

    async def _finished(self) -> dict[str, Any]:
        cut = self._finish_reason == "length"
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output.items,
            "usage": self._usage(),
        }
        await self._keep(self.response)
        return self.response

    def _usage(self) -> dict[str, Any]:
        usage = self._turn.generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage["total_tokens"],
        }


def _by_token(whole: Piece) -> Iterator[Piece]:
    """Split an answer into one piece per token, so that log-probabilities stay with their text."""
    cuts = [*whole.offsets[1:], len(whole.text)]
    last = len(cuts) - 1
    for i, (begin, end) in enumerate(zip(whole.offsets, cuts, strict=True)):
        piece = Piece(whole.text[begin:end], [whole.token_ids[i]], whole.logprobs[i : i + 1], [begin])
        if i == last:
            piece.finish_reason, piece.stop_reason = whole.finish_reason, whole.stop_reason
        yield piece


_ECHOED = (
    "background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls",
    "previous_response_id", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "store", "temperature",
    "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user",
)  # fmt: skip
"""Fields that a response repeats from its request."""


def blank(turn: Turn, body: ResponseBody, hex_id: str) -> dict[str, Any]:
    """The response object before there is an answer."""
    asked = body.text.format
    form: dict[str, Any] = {"type": asked.type}
    if asked.type == "json_schema":
        form |= {"name": asked.name, "description": asked.description, "schema": asked.schema_, "strict": asked.strict}
    reasoning = body.reasoning or Reasoning.model_validate({})
    return {
        "id": f"resp_{hex_id}",
        "object": "response",
        "created_at": turn.created,
        "status": "in_progress",
        "completed_at": None,
        "conversation": None if body.conversation is None else {"id": body.conversation},
        "error": None,
        "incomplete_details": None,
        "model": turn.model,
        "output": [],
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "service_tier": body.service_tier or "default",
        "text": {"format": form, "verbosity": body.text.verbosity},
        "usage": None,
        **{name: getattr(body, name) for name in _ECHOED},
    }
