"""`begin_turn`: a chat request of any dialect, from its body to a generation: parse, render, constrain, generate.

`Mark`: how much of its prompt a request retains in the cache, and for how long, as tokens of the rendered prompt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import Request

from weft.engine.wire.messages import Retention
from weft.server.api.chat_message import ChatMessage
from weft.server.api.chat_prompt import parse_chat, render_prompt
from weft.server.api.constraint import constrain_answer
from weft.server.api.generate import Generation, Prompt, output_limit
from weft.server.api.protocol import ChatBody
from weft.server.api.service import Service
from weft.server.api.turn_parser import TurnParser, bounded_thinking
from weft.server.text.image_marks import after_last
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.tools import NamedToolChoice


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that is ready for the engine, and what a dialect needs to write its answer."""

    body: ChatBody
    generation: Generation  # not submitted yet
    parser: TurnParser
    model: str  # the model name in the answer
    created: int  # unix time
    tokenizer: Tokenizer


async def begin_turn(
    body: ChatBody, request: Request, service: Service, *, default_limit: int | None = None, retain_by_key: bool = True
) -> Turn:
    """Run the four steps. Raises `ApiError`. `default_limit`: output tokens if the body sets no limit; None uses the
    rest of the context. `retain_by_key`: a `prompt_cache_key` also retains the prompt's pages."""
    chat = await parse_chat(body, request.scope, service)
    prompt = await render_prompt(chat, request.scope)
    service, form, thinking = chat.service, chat.tool_format, prompt.thinking
    tokenizer = service.loaded.tokenizer
    grammar = await constrain_answer(chat, prompt, request)
    params = body.sampling(
        max_tokens=output_limit(service, body.output_limit, default_limit, len(prompt.ids), "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    )
    params = bounded_thinking(params, thinking, body.max_thinking_tokens, tokenizer, tools=form is not None)
    retention: tuple[Retention, ...] = ()
    marks = marks_of(body, by_key=retain_by_key)
    if service.loaded.ready.recurrent:
        marks.append(Mark(HEAD, 0.0))  # other conversations continue from the state there
    if marks:
        retention = await service.offload(lambda: retention_of(marks, body, prompt.text, prompt.ids, tokenizer))
    markers = (*(form.markers if form is not None else ()), *(thinking.format.markers if thinking is not None else ()))
    marker_ids = map(tokenizer.token_id, markers)
    generation = Generation(
        service,
        body,
        [Prompt(prompt.ids, retention=retention, images=prompt.images, prediction=await _prediction(body, service))],
        [params],
        request.scope,
        show=frozenset(token_id for token_id in marker_ids if token_id is not None),
        grammar=grammar,
        # A forced call is markup only, so stop strings have no text to end.
        stop=not chat.must_call,
        markup=form.markup if form is not None else None,
        names=chat.names,
    )
    parser = TurnParser(
        form,
        body.tools,
        forced=chat.must_call,
        parallel=body.parallel_tool_calls,
        named=isinstance(body.tool_choice, NamedToolChoice),
        thinking=thinking,
        show_thinking=body.include_reasoning,
    )
    return Turn(body, generation, parser, service.name(body.model), int(time.time()), tokenizer)


async def _prediction(body: ChatBody, service: Service) -> list[int] | None:
    """Return the tokens of the predicted text, as many as the context may hold; None if there is none."""
    if body.prediction is None:
        return None
    text, loaded = body.prediction.text, service.loaded
    ids = await service.offload(lambda: loaded.tokenizer.encode(text, add_special_tokens=False))
    return ids[: loaded.ready.max_model_len]


WHOLE = -1  # a `Mark.message` that stands for the full prompt
HEAD = -2
"""A `Mark.message` that stands for everything before the first non-system message: tools and instructions."""


class Mark(NamedTuple):
    message: int  # retain the prompt through this message, or `WHOLE`, or `HEAD`
    seconds: float


def marks_of(body: ChatBody, *, by_key: bool = True) -> list[Mark]:
    """All marks of a request. `by_key`: a `prompt_cache_key` counts as one."""
    marks = [Mark(WHOLE, body.kept_seconds)] if by_key and body.kept_seconds else []
    if body.cache_control is not None:
        marks.append(Mark(WHOLE, body.cache_control.seconds))
    marks += [Mark(HEAD, tool.cache_control.seconds) for tool in body.tools if tool.cache_control is not None]
    last = len(body.messages) - 1
    for i, message in enumerate(body.messages):
        if message.cache_control is not None:
            head = not any(map(_is_conversation, body.messages[: i + 1]))
            where = WHOLE if i == last else HEAD if head else i
            marks.append(Mark(where, message.cache_control.seconds))
    return marks


def _is_conversation(message: ChatMessage) -> bool:
    return message.role not in ("system", "developer")


def retention_of(
    marks: Sequence[Mark], body: ChatBody, text: str, ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[Retention, ...]:
    """The marks as tokens of the prompt. Call it in a worker thread: marks inside the prompt take milliseconds.

    The end of a message is found by searching for its content, so any template works. If the template changes or drops
    the content, the message ends where the previous one does, and less is retained than possible. `text`: the rendered
    prompt with `Tokenizer.as_text`'s seams."""
    if not marks:
        return ()
    if all(mark.message == WHOLE for mark in marks):
        return (Retention(len(ids), max(mark.seconds for mark in marks)),)
    ends = _ends(body, tokenizer.without_seams(text))
    sizes = tokenizer.byte_sizes(ids)
    seconds: dict[int, float] = {}
    for mark in marks:
        tokens = len(ids) if mark.message == WHOLE else int((sizes.cumsum() <= ends[mark.message]).sum())
        seconds[tokens] = max(mark.seconds, seconds.get(tokens, 0.0))
    return tuple(Retention(tokens, seconds[tokens]) for tokens in sorted(seconds) if tokens)


def _ends(body: ChatBody, text: str) -> dict[int, int]:
    """Bytes of the prompt up to the end of each message, and up to the first non-system message (`HEAD`)."""
    data = text.encode()
    ends: dict[int, int] = {}
    at = 0
    for i, message in enumerate(body.messages):
        content = after_last(message.content or "").strip().encode()
        found = data.find(content, at) if content else -1
        if _is_conversation(message) and HEAD not in ends:
            ends[HEAD] = max(found, at)
        if found >= 0:
            at = found + len(content)
        ends[i] = at
    return {HEAD: at, **ends}
