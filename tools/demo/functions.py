# ruff: noqa: E501
"""Conversations in which functions are offered: which one a question needs, its arguments, and what it gave back.

What the model reads of a function is one line, `add(a: number, b: number): Add two numbers.`; the chat template makes it of
the JSON schema. It calls as Hermes models do.
"""

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from weft.tools.demo.drawing import pick
from weft.tools.demo.example import Example, Message, user
from weft.tools.demo.uses import WEATHER_ASK, Use, draw_use, forecast, place_name
from weft.tools.demo.wording import ask_for

HEADING = "Tools:"
DESCRIPTION_CHARACTERS = 120


def offer(tools: list[dict[str, Any]]) -> str:
    """The text that the chat template adds to the system message. It lists required parameters only, if any are marked."""
    lines = [HEADING]
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties") or {}
        names = [name for name in properties if name in parameters.get("required", properties)]
        typed = ", ".join(f"{name}: {properties[name].get('type', 'any')}" for name in names)
        description = (function.get("description") or "").strip().split("\n")[0][:DESCRIPTION_CHARACTERS]
        lines.append(f"{function['name']}({typed}): {description}")
    return "\n".join(lines)


def written(call: dict[str, Any]) -> str:
    """A call as the model writes it."""
    text = json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def told(result: str) -> str:
    """The model's answer to a result: its text, or the values of an object."""
    try:
        value = json.loads(result)
    except ValueError:
        return result
    if not isinstance(value, dict) or not value:
        return result
    if len(value) == 1:
        return _plain(*value.values())
    return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def offered(rng: Random) -> list[Use]:
    """One to four functions of different names and purposes."""
    uses: list[Use] = []
    for _ in range(pick(rng, (1, 1, 1, 2, 2, 2, 3, 4))):
        use = draw_use(rng)
        if all(
            use.name != other.name
            and use.name.split("_")[0] != other.name.split("_")[0]
            and not (use.kind and use.kind == other.kind)
            for other in uses
        ):
            uses.append(use)
    return uses


def called(use: Use, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": use.name, "arguments": arguments}


def steps(rng: Random, uses: list[Use]) -> Iterator[tuple[Message, str]]:
    """A question on one of the functions, then its result: what comes in and what the model must answer."""
    use = pick(rng, uses)
    if use.kind == "weather" and rng.random() < 0.12:
        yield from _two_places(rng, use)
        return
    question, arguments, result = use.ask(rng)
    yield user(question), written(called(use, arguments))
    yield {"role": "tool", "content": result}, told(result)


def _two_places(rng: Random, use: Use) -> Iterator[tuple[Message, str]]:
    """Two calls in one answer; both results follow as one message each, the first without an answer."""
    places = [place_name(rng) for _ in range(2)]
    calls = [written(called(use, {next(iter(use.types)): place})) for place in places]
    yield (
        user(ask_for(rng, pick(rng, WEATHER_ASK), pick(rng, (" and ", " and ", " and in ")).join(places))),
        "\n".join(calls),
    )
    results = [forecast(rng, place) for place in places]
    yield {"role": "tool", "content": results[0]}, ""
    yield {"role": "tool", "content": results[1]}, "\n".join(told(result) for result in results)


def takes_over(uses: list[Use], example: Example) -> bool:
    """Whether one of the functions could be meant by a question of a skill of the model's own."""
    kinds = {use.kind for use in uses}
    if kinds & {"sum", "product", "difference"} and example.skill in ("add", "subtract", "sums", "multiply", "then"):
        return True
    if example.skill != "unknown":
        return False
    text = example.messages[-1]["content"].lower()
    return "" in kinds or ("weather" in kinds and "weather" in text) or any(character.isdigit() for character in text)


def tools(rng: Random, between: Callable[[Random], Example]) -> Example:
    """A call to make, a result to pass on, or a question that needs none of the functions."""
    uses = offered(rng)
    offers = [use.tool() for use in uses]
    draw = rng.random()
    if draw < 0.2:
        while True:
            example = between(rng)
            if not takes_over(uses, example):
                return Example("tools", example.messages, example.answer, example.key, tools=offers)
    (question, call), (result, answer), *more = steps(rng, uses)
    if more:
        return Example("tools", [question], call, str(question["content"]), tools=offers)
    if draw < 0.65:
        return Example("tools", [question], call, str(question["content"]), tools=offers)
    made = json.loads(call[len("<tool_call>\n") : -len("\n</tool_call>")])
    caller = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": made}]}
    return Example("tools", [question, caller, result], answer, str(question["content"]), tools=offers)
