"""`HarmonyFormat`: messages of gpt-oss, with separate channels for reasoning, calls and the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.wire.grammar_text import literal
from weft.server.tools.stream import Reader, Steps
from weft.server.tools.tool_format import Marker, Schema, ToolFormat, Tools, argument_rules, through

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (END, CALL, RETURN)
_STOPS = (*_ENDS, START, CHANNEL)  # Marks after a message; the last two begin the next one.
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."


@dataclass(frozen=True)
class HarmonyFormat(ToolFormat):
    markers: tuple[str, ...] = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)

    def steps(self, reader: Reader, tools: Tools) -> Steps[None]:
        # the prompt ends before a header, which may begin with its recipient
        if (yield from reader.attempt_after_space("to=")):
            yield from self._message(reader, tools, "to=")
        while mark := (yield from reader.text_until(CHANNEL, START, *_ENDS)):
            if mark in _ENDS:
                reader.accept()
            else:
                yield from self._message(reader, tools, mark)

    def _message(self, reader: Reader, tools: Tools, begun: str) -> Steps[None]:
        """Read a message. `begun`: the start of its header, already read."""
        rest, mark = yield from reader.name(MESSAGE, CALL)
        header = begun + rest
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if not mark or (mark == CALL and recipient is None):
            reader.give_up()
            return
        reader.accept()
        reader.at -= len(mark) if mark == CALL else 0  # without a message
        if recipient is not None and (recipient[1].startswith(_FUNCTIONS) or recipient[1] in tools):
            reader.call(recipient[1].removeprefix(_FUNCTIONS) or recipient[1])
            reader.attempt()
            fence = yield from reader.fence()
            if (yield from reader.arguments_follow(*_STOPS)):
                reader.accept()
                yield from reader.arguments(*_STOPS)
                yield from reader.space()
                yield from reader.take(fence)
                yield from reader.surplus(*_STOPS)
                end = yield from reader.until(*_STOPS, to=reader.emit_text)
            else:
                reader.back()
                yield from reader.space()
                end = yield from reader.until(*_STOPS, to=reader.emit_arguments)
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            reader.begin_thought()
            end = yield from reader.until(*_STOPS, to=reader.emit_thought)
            if end:
                reader.end_thought()
        else:
            end = yield from reader.until(*_STOPS, to=reader.emit_text)
        if end not in _ENDS:  # the next message begins without an end of this one
            reader.at -= len(end)

    def grammar(self, tools: Sequence[tuple[str, Schema]], marker: Marker, *, several: bool, free: bool = False) -> str:
        """Return the grammar of one call: a call ends the model's turn, so `several` does not apply."""
        del several
        channel, message = marker(CHANNEL), marker(MESSAGE)
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, (name, _) in enumerate(tools):
            head = literal(f"commentary to={_FUNCTIONS}{name} ")
            rules.append(f'call_{i}: {channel} {head} {marker(CONSTRAIN)} "json" {message} arguments_{i}')
        start = "start: call"
        if free:
            rules += [
                f'said: {channel} "commentary" {message} ended {marker(START)} "assistant"',
                f'answer: {channel} "final" {message} TEXT?',
                *through("ended", END, marker),
                "TEXT: /(?s:.+)/",
            ]
            start = "start: said* call | said* answer"
        return "\n".join([start, *rules, argument_rules(tools)])

    def write(self, name: str, arguments: str) -> str:
        return f"{CHANNEL}commentary to={_FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}{arguments}{CALL}"
