"""`Output`: the items of a response as they grow, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from weft.server.api.responses.items import Item, seal
from weft.server.api.turn_parser import Parts
from weft.server.tools.stream import Call

_encode = orjson.dumps


class Output:
    """Feed it the parts of an answer; it keeps the items and returns their events. An item ends where another kind of
    part follows."""

    def __init__(
        self,
        hex_id: str,
        *,
        is_custom: Callable[[Call], bool] = lambda _: False,
        namespaces: Mapping[str, tuple[str, str]],
        sums_up: bool = False,
        sealed: bool = False,
        may_call: bool = False,
    ) -> None:
        """`hex_id`: the response's, without its prefix. `is_custom`: a call is one of a custom tool, its arguments a
        text. `namespaces`: those of tools, by the name the model knows.

        `sums_up`: reasoning is shown as a summary. `sealed`: it travels in `encrypted_content`. `may_call`: white space
        between calls is no message.
        """
        self.items: list[Item] = []
        self.sequence = 0
        """number of the next event"""
        self._hex_id = hex_id
        self._is_custom = is_custom
        self._namespaces = namespaces
        self._sums_up = sums_up
        self._sealed = sealed
        self._may_call = may_call
        self._space = ""
        """white space that is text only if text follows"""
        self._open: str | None = None
        """type of the last item, while it grows"""
        self._call = -1
        """index of the call that grows"""
        self._texts: list[str] = []
        """what the open item has so far"""
        self._logprobs: list[dict[str, Any]] = []
        self._unsaid: list[dict[str, Any]] = []
        """log-probabilities of tokens whose text is still to come"""
        self._delta = b"", b""
        """what stands before the sequence number and before the text of the open item's deltas"""

    def event(self, kind: str, **fields: Any) -> bytes:
        """A server-sent event."""
        name = kind.encode()
        number, self.sequence = self.sequence, self.sequence + 1
        body = _encode({"type": kind, "sequence_number": number, **fields})
        return b"event: " + name + b"\ndata: " + body + b"\n\n"

    def feed(self, parts: Parts, logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """`logprobs`: of the tokens that brought these parts, as chat has them."""
        out = b""
        if logprobs and not parts.text and not parts.reasoning:
            self._unsaid += logprobs
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
        """A message grows, and `more_text` is all that further text of it takes."""
        return self._open == "message" and not self._unsaid

    def more_text(self, text: str) -> bytes:
        return self._grow(text, b',"logprobs":[]')

    def close(self, status: str = "completed") -> bytes:
        """End the item that grows, if there is one."""
        if self._open is None:
            return b""
        item, text, place = self.items[-1], "".join(self._texts), self._place
        item["status"] = status
        out = b""
        match self._open:
            case "message":
                part = item["content"][0]
                self._logprobs += self._unsaid
                self._unsaid = []
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
        """No more comes. `status`: of the item that ends with the answer."""
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

    def _grows_by(self, kind: str, **fields: Any) -> None:
        """`kind` of the events that bring what is new; `fields` are the same in all of them."""
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
            logprobs = [*self._unsaid, *logprobs] if self._unsaid else logprobs
            self._unsaid = []
            self._logprobs += logprobs
            return self._grow(text, b',"logprobs":' + (_encode(_brief(logprobs)) if logprobs else b"[]"))
        if self._open == "reasoning":
            self._unsaid = []  # of what marks its end
        text, self._space = self._space + text, ""
        if self._may_call and text.isspace():
            self._space = text
            self._unsaid += logprobs
            return b""
        return self.close() + self._begin_message() + self._feed_text(text, logprobs)

    def _begin_message(self) -> bytes:
        out = self._begin("msg", "message", role="assistant", content=[])
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        out += self.event("response.content_part.added", **self._place, content_index=0, part=part)
        self.items[-1]["content"].append(part)
        self._grows_by("response.output_text.delta", content_index=0)
        return out

    def _feed_call(self, call: Call) -> bytes:
        out = b""
        if call.id is not None:
            self._space = ""
            self._unsaid = []  # of what marks the call
            out += self.close()
            namespace, name = self._namespaces.get(call.name or "", ("", call.name))
            about = {"call_id": call.id, "name": name, **({"namespace": namespace} if namespace else {})}
            if self._is_custom(call):
                out += self._begin("ctc", "custom_tool_call", **about, input="")
                self._grows_by("response.custom_tool_call_input.delta")
            else:
                out += self._begin("fc", "function_call", **about, arguments="")
                self._grows_by("response.function_call_arguments.delta")
        return out + self._grow(call.arguments) if call.arguments else out

    # -- reasoning

    def _begin_reasoning(self) -> bytes:
        out = self._begin("rs", "reasoning", summary=[])
        if self._sums_up:
            part = {"type": "summary_text", "text": ""}
            out += self.event("response.reasoning_summary_part.added", **self._place, summary_index=0, part=part)
            self._grows_by("response.reasoning_summary_text.delta", summary_index=0)
        else:
            part = {"type": "reasoning_text", "text": ""}
            out += self.event("response.content_part.added", **self._place, content_index=0, part=part)
            self._grows_by("response.reasoning_text.delta", content_index=0)
        return out

    def _close_reasoning(self, item: Item, text: str, place: dict[str, Any]) -> bytes:
        if self._sealed:
            item["encrypted_content"] = seal(text)
        if self._sums_up:
            part = {"type": "summary_text", "text": text}
            item["summary"] = [part]
            return self.event("response.reasoning_summary_text.done", **place, summary_index=0, text=text) + self.event(
                "response.reasoning_summary_part.done", **place, summary_index=0, part=part
            )
        part = {"type": "reasoning_text", "text": text}
        item["content"] = [part]
        return self.event("response.reasoning_text.done", **place, content_index=0, text=text) + self.event(
            "response.content_part.done", **place, content_index=0, part=part
        )


def _brief(logprobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As events have them: without the bytes."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [{"token": t["token"], "logprob": t["logprob"]} for t in entry["top_logprobs"]],
        }
        for entry in logprobs
    ]
