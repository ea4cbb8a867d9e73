"""Constrains answers to a JSON schema, a choice or a regular expression, over plain HTTP without packages.

A grammar limits the next token, so answers always parse. The only exception is an answer cut off at `max_tokens`, which
`finish_reason` reports. The grammar does not make the *content* correct: the embedded demo model was never trained on
JSON and fills the fields poorly.

Start a daemon (`weft serve`, or `make serve` in a checkout), then
run it:  python examples/structured_output.py [URL]
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from typing import Any

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

SCHEMA = {
    "type": "object",
    "properties": {
        "sum": {"type": "integer", "minimum": 0, "maximum": 999},
        "even": {"type": "boolean"},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["sum", "even", "kind"],
    "additionalProperties": False,
}


def ask(question: str, **fields: Any) -> str:
    """Return the answer to one chat message; `fields` are added to the request body."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 200, **fields}
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        choice = json.load(response)["choices"][0]
    if choice["finish_reason"] != "stop":
        raise SystemExit(f"the answer was cut off: {choice['finish_reason']}")
    return str(choice["message"]["content"])


def main() -> None:
    # OpenAI's field. weft enforces every schema, with or without `strict`.
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    answer = json.loads(ask("What is 12 + 30?", response_format=wanted))
    if set(answer) != {"sum", "even", "kind"}:
        raise SystemExit(f"the answer does not follow the schema: {answer}")
    print("json:", answer)

    # `structured_outputs` supports more constraints: one of json, json_object, regex, choice and grammar.
    print("choice:", ask("What is 12 + 30?", structured_outputs={"choice": ["41", "42", "43"]}))

    pattern = r"[0-9]{3}"
    number = ask("What is 123 + 456?", structured_outputs={"regex": pattern})
    if re.fullmatch(pattern, number) is None:
        raise SystemExit(f"{number!r} does not match {pattern}")
    print("regex:", number)


if __name__ == "__main__":
    main()
