"""`/v1/…/render` gives the token ids that the engine gets for the same body."""

from __future__ import annotations

from typing import Any

import pytest
from stub import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOL = {"type": "function", "function": {"name": "f", "description": "does", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "system", "content": "be <|eos|> brief"}, {"role": "user", "content": "hällo"}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": MESSAGES},
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"},
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "none"},
        {"messages": MESSAGES, "truncate_prompt_tokens": 5, "max_tokens": 3},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "be"}], "continue_final_message": True,
         "add_generation_prompt": False},
    ],
)  # fmt: skip
async def test_a_conversation_gives_the_engines_tokens(server: Server, body: dict[str, Any]) -> None:
    await server.chat(**body)
    answer = await server.post("/v1/chat/completions/render", {"model": "stub", **body})
    assert answer.json() == {"token_ids": server.engine.prompt(), "features": None, "model": "stub"}


@pytest.mark.parametrize("prompt", ["a text", [1, 2, 3], ["one", "two and more"], [[4, 5], [6]]])
async def test_prompts_give_the_engines_tokens(server: Server, prompt: Any) -> None:
    await server.complete(prompt=prompt)
    sent = [server.engine.prompt(i) for i in range(len(server.engine.added))]
    answer = await server.post("/v1/completions/render", {"prompt": prompt, "stream": True})
    assert [each["token_ids"] for each in answer.json()] == sent
    assert len(server.engine.added) == len(sent), "nothing is computed"


async def test_a_wrong_request_is_the_same_error(server: Server) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = {"model": "other", "messages": MESSAGES, "prompt": "x"}
        real, rendered = await server.post(path, body), await server.post(f"{path}/render", body)
        assert (rendered.status_code, rendered.json()) == (real.status_code, real.json())
