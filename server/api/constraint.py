"""The third step of a chat turn: `constrain_answer` makes the grammar that the answer must follow."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import ClientDisconnect, Request

from weft.engine.errors import RequestError
from weft.engine.wire.grammar_text import json_schema
from weft.server.api.chat_prompt import ParsedChat, RenderedPrompt
from weft.server.api.generate import wait_for_disconnect
from weft.server.api.service import Service
from weft.server.errors import ApiError, bad_request
from weft.server.tools.structured import Grammar, Writer, either, write_grammar
from weft.server.tools.tools import call_of, marker_of, required_call


async def constrain_answer(chat: ParsedChat, prompt: RenderedPrompt, request: Request) -> Grammar | None:
    """The grammar of the answer, or None if it is free. Raises like `compile_grammar`.

    A strict tool that is too complex for a grammar is only an error if the answer must be a call or structured: some
    clients mark all of their tools as strict."""
    try:
        return await compile_grammar(_writer(chat, prompt), request, chat.service)
    except ApiError as error:
        if error.code != "invalid_grammar":
            raise
        required = chat.must_call or chat.tool_format is None or chat.body.asks_for_structure
        if chat.tool_format is not None:
            await _check_tools(chat, request, required=required)
        if required:
            raise
        return None


async def _check_tools(chat: ParsedChat, request: Request, *, required: bool) -> None:
    """Raises `ApiError`, with the tool's name, for a tool with an unusable schema. `required`: a call or structure is
    required; else only schemas that no grammar can keep are errors."""
    for tool in chat.tools:
        if tool.custom or not (required or tool.strict):
            continue
        field = f"tools[{chat.body.tools.index(tool)}].function.parameters"
        write = partial(json_schema, tool.function.schema_, lenient=not tool.strict)
        if required:
            await compile_grammar((field, write), request, chat.service)
        else:
            try:
                write()
            except RequestError as error:
                raise bad_request(f"{field}: {error}", field, "invalid_grammar") from None


async def compile_grammar(writer: Writer | None, request: Request, service: Service) -> Grammar | None:
    """Write a request's grammar, if any, and try to compile it before the engine sees it. Raises `ApiError`, and
    `ClientDisconnect` if the client leaves, so that the next request can be compiled."""
    if writer is None:
        return None
    work = asyncio.create_task(write_grammar(writer, service.loaded.grammars, request.scope["weft.client"]))
    gone = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.wait((gone,))  # the answer reads from `receive` next


def _writer(chat: ParsedChat, prompt: RenderedPrompt) -> Writer | None:
    """Writes what must follow the thinking: a call if one is required, else the requested structure or a call, else
    text and calls if a tool is strict."""
    body, tools, form, thinking = chat.body, chat.tools, chat.tool_format, prompt.thinking
    tokenizer, parallel = chat.service.loaded.tokenizer, chat.body.parallel_tool_calls
    marker = marker_of(tokenizer)
    asked = body.constraint(marker)
    if asked is not None and thinking is not None:
        field, write, final = *asked, thinking.format.final
        asked = field, lambda: final(write(), marker)
    call = required_call(tools, body.tool_choice, form, tokenizer, parallel=parallel) if form is not None else None
    if call is not None or form is None:
        writer = call or asked
    elif asked is not None:
        writer = either([asked, call_of(tools, form, tokenizer, parallel=parallel)])
    elif any(tool.strict for tool in tools):
        writer = call_of(tools, form, tokenizer, parallel=parallel, free=True)
    else:
        writer = None
    if writer is None or thinking is None or thinking.closed:
        return writer
    name, rest, inside, before = *writer, thinking.inside, thinking.format.before
    return name, lambda: before(rest(), marker, inside=inside)
