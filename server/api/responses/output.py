"""`Output`: the growing items of a response, and their events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from weft.server.api.responses.items import Item, seal
from weft.server.api.turn_parser import Parts
from weft.server.tools.stream import Call

_encode = orjson.dumps


class Output:
    """Turns the parts of an answer into items and their events. An item ends when a different kind of part follows."""

    def __init__(
        self, hex_id: str, *, is_custom: Callable[[Call], bool] = lambda _: False, namespaces: Mapping[str, tuple[str,
        str]], as_summary: bool = False, sealed: bool = False, may_call: bool = False,
    ) -> None:  # fmt: skip
        """`hex_id`: the response's id without its prefix. `is_custom`: a call is a custom tool's, its argument a text.
        `namespaces`: namespace and name of tools, by the name the model sees.

        `as_summary`: show reasoning as a summary. `sealed`: include it in `encrypted_content`. `may_call`: white space
        between calls is not a message."""
        self.items: list[Item] = []
        self.sequence = 0  # the number of the next event
        self._hex_id, self._is_custom, self._namespaces = hex_id, is_custom, namespaces
        self._reasoning_form = _AS_SUMMARY if as_summary else _AS_TEXT
        self._sealed = sealed
        self._may_call = may_call
        self._space = ""  # white space that counts only if text follows
        self._open: str | None = None  # the type of the open item
        self._texts: list[str] = []  # the open item's text so far
        self._logprobs: list[dict[str, Any]] = []
        self._pending_logprobs: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text is not out yet."""
        self._delta = b"", b""
        """The bytes before the sequence number and before the text in the open item's deltas."""

    def event(self, kind: str, **fields: Any) -> bytes:
        """A server-sent event."""
        name = kind.encode()
        number, self.sequence = self.sequence, self.sequence + 1
        body = _encode({"type": kind, "sequence_number": number, **fields})
        return b"event: " + name + b"\ndata: " + body + b"\n\n"

    def feed(self, parts: Parts, logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """Add parts and return their events. `logprobs`: those of the parts' tokens, in chat's format."""
        out = b""
        if logprobs and not parts.text and not parts.reasoning:
            self._pending_logprobs += logprobs
        if parts.reasoning:
            if self._open != "reasoning":
                out += self.close() + self._begin_reasoning()
            out += self._grow(parts.reasoning)
        if parts.text:
            out += self._feed_text(parts.text, logprobs)
        for call in parts.calls:
            out += self._feed_call(call)
        return out

    @property
    def takes_text(self) -> bool:
        """A message is open, so `more_text` can extend it."""
        return self._open == "message" and not self._pending_logprobs

    def more_text(self, text: str) -> bytes:
        return self._grow(text, b',"logprobs":[]')

    def close(self, status: str = "completed") -> bytes:
        """End the open item, if any."""
        if self._open is None:
            return b""
        item, text, place = self.items[-1], "".join(self._texts), self._place
        item["status"] = status
        out = b""
        match self._open:
            case "message":
                part = item["content"][0]
                self._logprobs += self._pending_logprobs
                self._pending_logprobs = []
                part["text"], part["logprobs"] = text, self._logprobs
                at = {**place, "content_index": 0}
                out += self.event("response.output_text.done", **at, text=text, logprobs=_brief(self._logprobs))
                out += self.event("response.content_part.done", **at, part=part)
            case "reasoning":
                out += self._close_reasoning(item, text, place)
            case "function_call":
                item["arguments"] = text
                kind = "response.function_call_arguments.done"
                out += self.event(kind, **place, name=item["name"], arguments=text)
            case "custom_tool_call":
                item["input"] = text
                out += self.event("response.custom_tool_call_input.done", **place, input=text)
        self._open = None
        return out + self.event("response.output_item.done", output_index=place["output_index"], item=item)

    def end(self, status: str = "completed") -> bytes:
        """End the answer. `status`: the last item's."""
        if self.items:
            return self.close(status)
        out = self._begin_message()
        if self._space:
            out += self._grow(self._space, b',"logprobs":[]')
        return out + self.close(status)

    # -- items

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin(self, prefix: str, kind: str, **fields: Any) -> bytes:
        id = f"{prefix}_{self._hex_id}{len(self.items):04x}"
        item = {"id": id, "type": kind, **fields, "status": "in_progress"}
        self.items.append(item)
        self._open = kind
        self._texts = []
        self._logprobs = []
        return self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _set_delta(self, kind: str, **fields: Any) -> None:
        """Set the type of the open item's delta events and their constant fields."""
        after = _encode({**self._place, **fields})
        self._delta = (
            b"event: " + kind.encode() + b'\ndata: {"type":' + _encode(kind) + b',"sequence_number":',
            b"," + after[1:-1] + b',"delta":',
        )

    def _grow(self, text: str, more: bytes = b"") -> bytes:
        self._texts.append(text)
        number, self.sequence = self.sequence, self.sequence + 1
        before, after = self._delta
        return before + b"%d" % number + after + _encode(text) + more + b"}\n\n"

    def _feed_text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> bytes:
        if self._open == "message":
            logprobs = [*self._pending_logprobs, *logprobs] if self._pending_logprobs else logprobs
            self._pending_logprobs = []
            self._logprobs += logprobs
            return self._grow(text, b',"logprobs":' + (_encode(_brief(logprobs)) if logprobs else b"[]"))
        if self._open == "reasoning":
            self._pending_logprobs = []  # those of the end mark
        text, self._space = self._space + text, ""
        if self._may_call and text.isspace():
            self._space = text
            self._pending_logprobs += logprobs
            return b""
        return self.close() + self._begin_message() + self._feed_text(text, logprobs)

    def _begin_message(self) -> bytes:
        out = self._begin("msg", "message", role="assistant", content=[])
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        out += self.event("response.content_part.added", **self._place, content_index=0, part=part)
        self.items[-1]["content"].append(part)
        self._set_delta("response.output_text.delta", content_index=0)
        return out

    def _feed_call(self, call: Call) -> bytes:
        out = b""
        if call.id is not None:
            self._space = ""
            self._pending_logprobs = []  # those of the call's markup
            out += self.close()
            namespace, name = self._namespaces.get(call.name or "", ("", call.name))
            fields = {"call_id": call.id, "name": name, **({"namespace": namespace} if namespace else {})}
            if self._is_custom(call):
                out += self._begin("ctc", "custom_tool_call", **fields, input="")
                self._set_delta("response.custom_tool_call_input.delta")
            else:
                out += self._begin("fc", "function_call", **fields, arguments="")
                self._set_delta("response.function_call_arguments.delta")
        return out + self._grow(call.arguments) if call.arguments else out

    # -- reasoning

    def _begin_reasoning(self) -> bytes:
        form = self._reasoning_form
        out = self._begin("rs", "reasoning", summary=[])
        part = {"type": form.kind, "text": ""}
        out += self.event(f"response.{form.part_event}.added", **self._place, **form.position, part=part)
        self._set_delta(f"response.{form.text_event}.delta", **form.position)
        return out

    def _close_reasoning(self, item: Item, text: str, place: dict[str, Any]) -> bytes:
        form = self._reasoning_form
        if self._sealed:
            item["encrypted_content"] = seal(text)
        part = {"type": form.kind, "text": text}
        item[form.field] = [part]
        done = self.event(f"response.{form.text_event}.done", **place, **form.position, text=text)
        return done + self.event(f"response.{form.part_event}.done", **place, **form.position, part=part)


class _ReasoningForm(NamedTuple):
    """The names of reasoning in an item and its events."""

    field: str
    kind: str
    part_event: str
    text_event: str
    position: dict[str, int]


_AS_TEXT = _ReasoningForm("content", "reasoning_text", "content_part", "reasoning_text", {"content_index": 0})
_AS_SUMMARY = _ReasoningForm(
    "summary", "summary_text", "reasoning_summary_part", "reasoning_summary_text", {"summary_index": 0}
)


def _brief(logprobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log-probabilities in the format of events: without bytes."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [{"token": t["token"], "logprob": t["logprob"]} for t in entry["top_logprobs"]],
        }
        for entry in logprobs
    ]
