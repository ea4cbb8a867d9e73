"""Runs a tool call and sends back its result with the `openai` client, as agents do.

With `tool_choice` "required" (or a named function), a grammar makes the call well-formed with any model. With "auto",
the default, the model decides. This needs a model trained to call tools, such as the embedded demo model, and a format
that its chat template or `--tool-call-parser` names.

Start a daemon (`weft serve`), then
run it:  python examples/tools.py [URL]        (needs: pip install openai)
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

ADD: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def add(a: int, b: int) -> int:
    return a + b


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="only needed if the daemon runs with --api-key")
    model = client.models.list().data[0].id

    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 12 plus 30?"}]
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[ADD], tool_choice="auto", temperature=0, max_tokens=200
    )
    calls = answer.choices[0].message.tool_calls
    call = calls[0] if calls else None
    if call is None or call.type != "function":
        raise SystemExit(f"no function was called: {answer.choices[0].message}")
    arguments = json.loads(call.function.arguments)
    result = add(**arguments)
    print(f"call: {call.function.name}({arguments['a']}, {arguments['b']}) = {result}")

    function = call.function
    messages += [
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": function.name, "arguments": function.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": str(result)},
    ]
    final = client.chat.completions.create(model=model, messages=messages, tools=[ADD], temperature=0, max_tokens=16)
    print("answer:", final.choices[0].message.content)


if __name__ == "__main__":
    main()
