"""Defines `AnswerReader`, a fast event stream reader that records when tokens arrive, not their text."""

from __future__ import annotations

from array import array
from typing import Any

import orjson

from weft.loadgen.errors import AnswerTooLong

_UNFINISHED = b'"finish_reason":null'
_UNFINISHED_SPACED = b'"finish_reason": null'
_MAX_BODY = 1 << 16
MAX_EVENT_BYTES = 4 << 20  # Far more than any stream event has, even with logprobs of a long prompt.


class AnswerReader:
    """Reads an answer's bytes with their arrival times; its attributes then describe the answer.

    An event *carries a token* if it has a choice with text, or a choice that neither opens the message (a role and
    nothing else) nor only ends it. After the first token, events with a null finish reason count as such without
    parsing, unless `keep_text` is set."""

    __slots__ = (
        "_fast", "_remainder", "body", "cached", "completion", "done", "end", "error", "finished", "is_stream",
        "keep_text", "prompt", "retry_after", "text", "times",
    )  # fmt: skip

    def __init__(self, times: array[float], *, keep_text: bool = False) -> None:
        self.times = times
        self.keep_text = keep_text
        self.is_stream = True  # False: the bytes are an ordinary body; `body` keeps its first 64 KiB.
        self.body = b""
        self.retry_after = ""
        self.end = float("nan")
        self.done = False
        self.finished = False
        self.error = ""
        self.text: list[str] = []
        self.prompt = self.completion = self.cached = -1
        self._remainder = b""
        self._fast = False

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that arrived at `now`. Raises `AnswerTooLong`."""
        if not self.is_stream:
            self.body += data[: _MAX_BODY - len(self.body)]
            return
        if b"\r" in data:
            data = data.replace(b"\r", b"")
        if self._remainder:
            data = self._remainder + data
        if data.endswith(b"\n\n"):
            self._remainder = b""
        else:
            data, _, self._remainder = data.rpartition(b"\n\n")
            if len(self._remainder) > MAX_EVENT_BYTES:
                raise AnswerTooLong(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        for event in data.split(b"\n\n"):
            if self._fast and (_UNFINISHED in event or _UNFINISHED_SPACED in event):
                self.times.append(now)
                self.end = now
            elif event:
                self._parse(event, now)

    def _parse(self, event: bytes, now: float) -> None:
        data = b"\n".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:")).strip()
        if not data:
            return  # a keep-alive comment
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = orjson.loads(data)
            if not isinstance(chunk, dict):
                self.error = "an event that is not an object"
            elif chunk.get("error"):
                self.error = error_message(chunk)
            else:
                if usage := chunk.get("usage"):
                    self._usage(usage)
                for choice in chunk.get("choices") or ():
                    self._choice(choice, now)
        except orjson.JSONDecodeError:
            self.error = "an event that is not JSON"
        except (AttributeError, TypeError, ValueError):
            self.error = "an event that is not in OpenAI's format"

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        ends = choice.get("finish_reason") is not None
        opens = "role" in delta and not self.times
        thinks = delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
        if text or thinks or not (ends or opens):
            self.times.append(now)
            self._fast = not self.keep_text
        if ends:
            self.finished = True
        if text and self.keep_text:
            if not isinstance(text, str):
                raise TypeError
            self.text.append(text)
        self.end = now

    def _usage(self, usage: dict[str, Any]) -> None:
        self.prompt = int(usage.get("prompt_tokens") or 0)
        self.completion = int(usage.get("completion_tokens") or 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        self.cached = -1 if cached is None else int(cached)


def error_message(body: Any) -> str:
    """Return the message of an error body in OpenAI's or a similar format, as one line of up to 200 characters."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if not isinstance(message, str) and isinstance(body, dict):
        message = body.get("message") or body.get("detail")
    return " ".join(str(message or body).split())[:200]
