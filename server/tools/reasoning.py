"""`ReasoningFormat`: the marks between which a model thinks before it answers, and the grammar of an answer behind."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.wire import grammar_text
from weft.server.tools import harmony
from weft.server.tools.stream import Reader, Steps
from weft.server.tools.tool_format import Marker, through

WINDOW = 64
"""characters of a prompt's end in which it may have begun the thinking"""


@dataclass(frozen=True)
class ReasoningFormat:
    begin: str
    end: str
    also: tuple[tuple[str, str], ...] = ()
    """other spellings of the two"""
    always: bool = False
    """an answer begins with thinking even when nothing says so"""
    cuts: tuple[str, ...] = ()
    """marks that end the thinking and belong to what follows"""
    wraps: tuple[str, str] = ("", "")
    """marks around what follows"""
    forced: str = ""
    """what ends the thinking where it must not go on; empty: its mark on a line of its own"""
    channels: bool = False
    """thinking is a message in a channel of its own (`harmony`)"""

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin, *(begin for begin, _ in self.also))

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end, *(end for _, end in self.also))

    @property
    def markers(self) -> tuple[str, ...]:
        if self.channels:
            return harmony.HarmonyFormat().markers
        return (*self.begins, *self.ends, *self.cuts, *filter(None, self.wraps))

    def ending(self, *, tools: bool) -> str:
        """What a model is made to write when it has thought enough. `tools`: it may call some."""
        if self.channels:
            channel = "commentary" if tools else f"final{harmony.MESSAGE}"
            return f"{harmony.END}{harmony.START}assistant{harmony.CHANNEL}{channel}"
        return self.forced or f"\n{self.end}\n\n"

    def inside(self, prompt: str) -> bool:
        """Whether an answer to this prompt (or its end) begins in the middle of thinking."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begins):
            return True
        return self.always and not prompt.endswith(self.ends)

    def closed(self, prompt: str) -> bool:
        """Whether the prompt has thought already, or says that nothing is to be thought."""
        return prompt.rstrip().endswith(self.ends)

    def steps(self, reader: Reader, *, inside: bool) -> Steps[None]:
        """Reads the thinking, if there is any, and the marks around it."""
        reader.attempt()
        yield from reader.space()
        if not (yield from reader.take(*self.begins)) and not inside:
            reader.back()
            return
        reader.accept()
        mark = yield from reader.until(*self.ends, *self.cuts, to=reader.think)
        if mark in self.cuts:
            reader.at -= len(mark)
        if mark:
            reader.thought()
        if self.wraps[0]:
            yield from reader.space()
            yield from reader.take(self.wraps[0])

    def before(self, text: str, marker: Marker, *, inside: bool) -> str:
        """The grammar of an answer, of a grammar of what follows the thinking."""
        if self.channels:
            head = f'{marker(harmony.CHANNEL)} "analysis" {marker(harmony.MESSAGE)}'
            rules = [
                "start: thought* @weft_rest",
                f'thought: {head} ended {marker(harmony.START)} "assistant"',
                *through("ended", harmony.END, marker),
            ]
        else:
            begun = "thought" if inside else f"({marker(self.begin)} thought)?"
            rules = [
                f"start: {begun} @weft_rest",
                "thought: ended SPACE?",
                *through("ended", self.end, marker),
                r"SPACE: /[ \t\r\n]{1,4}/",
            ]
        return grammar_text.within("\n".join(rules), text)

    def final(self, text: str, marker: Marker) -> str:
        """The grammar of the answer proper, of a grammar of its content."""
        if not self.channels:
            return text
        head = f'start: {marker(harmony.CHANNEL)} "final" {marker(harmony.MESSAGE)} @weft_rest'
        return grammar_text.within(head, text)


THINK = ReasoningFormat("<think>", "</think>")
HARMONY = ReasoningFormat(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.END, channels=True)
