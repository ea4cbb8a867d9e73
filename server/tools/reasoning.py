"""`ReasoningFormat`: marks around a model's reasoning, and the grammar of an answer after it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from weft.engine.wire import grammar_text
from weft.server.tools import harmony
from weft.server.tools.stream import Reader, Steps, call_follows
from weft.server.tools.tool_format import Marker, ToolFormat, Tools, through

WINDOW = 64  # Characters at a prompt's end to search for the start of reasoning.


@dataclass(frozen=True)
class ReasoningFormat:
    begin: str
    end: str
    also: tuple[tuple[str, str], ...] = ()  # Alternative spellings of both marks.
    always: bool = False  # Whether answers begin with reasoning even without a mark.
    wraps: tuple[str, str] = ("", "")  # Marks around the answer after the reasoning.
    forced: str = ""
    """Text that forces the end of reasoning; empty for the end mark on a separate line."""
    channels: bool = False  # Whether reasoning is a message in a separate channel (`harmony`).

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
        return (*self.begins, *self.ends, *filter(None, self.wraps))

    def ending(self, *, tools: bool) -> str:
        """Return the text that forces the end of reasoning. `tools`: whether calls are allowed."""
        if self.channels:
            channel = "commentary" if tools else f"final{harmony.MESSAGE}"
            return f"{harmony.END}{harmony.START}assistant{harmony.CHANNEL}{channel}"
        return self.forced or f"\n{self.end}\n\n"

    def inside(self, prompt: str) -> bool:
        """Return whether the answer to this prompt starts inside reasoning."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begins):
            return True
        return self.always and not prompt.endswith(self.ends)

    def closed(self, prompt: str) -> bool:
        """Return whether the prompt already contains or disables the reasoning."""
        return prompt.rstrip().endswith(self.ends)

    def steps(self, reader: Reader, form: ToolFormat | None, tools: Tools, *, inside: bool) -> Steps[None]:
        """Read the reasoning, if any, and the marks around it. A call of an offered tool ends it too, if the call is
        complete or the answer ends without a closing mark. `form`: None if calls are not allowed."""
        reader.attempt()
        yield from reader.space()
        if not (yield from reader.take(*self.begins)) and not inside:
            reader.back()
            return
        reader.accept()
        opens = () if form is None else form.opens
        while mark := (yield from reader.until(*self.ends, *opens, to=reader.emit_thought)):
            if form is None or mark in self.ends:
                break
            reader.at -= len(mark)
            steps = partial(_steps, form, tools)
            if (yield from call_follows(reader, steps, tools, self.ends, marked=form.marked)):
                reader.strays = self.ends
                break
            reader.emit_thought(mark)
            reader.at += len(mark)
        if mark:
            reader.end_thought()
        if self.wraps[0]:
            yield from reader.space()
            if (yield from reader.take(self.wraps[0])):
                reader.strays = (*reader.strays, self.wraps[1])

    def before(self, text: str, marker: Marker, *, inside: bool) -> str:
        """Return the grammar of reasoning followed by an answer. `text`: grammar of the answer."""
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
        """Return the grammar of the answer with its channel. `text`: grammar of its content."""
        if not self.channels:
            return text
        head = f'start: {marker(harmony.CHANNEL)} "final" {marker(harmony.MESSAGE)} @weft_rest'
        return grammar_text.within(head, text)


def _steps(form: ToolFormat, tools: Tools, reader: Reader) -> Steps[None]:
    return form.steps(reader, tools)


THINK = ReasoningFormat("<think>", "</think>")
HARMONY = ReasoningFormat(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.END, channels=True)
