"""Answers that must follow a JSON schema, a choice or a regular expression. Plain HTTP, no package needed.

The grammar decides which tokens may come next, so what comes back parses, whatever the model would rather have said;
an answer cut by `max_tokens` is the one exception, and `finish_reason` tells. That the *content* is right is the
model's business: the embedded demo model was never trained on JSON, and what it puts into the fields shows it.

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
    """The answer to one chat message; `fields` go into the request's body."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 200, **fields}
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        choice = json.load(response)["choices"][0]
    if choice["finish_reason"] != "stop":
        raise SystemExit(f"the answer was cut: {choice['finish_reason']}")
    return str(choice["message"]["content"])


def main() -> None:
    # OpenAI's field. `strict` is accepted; here every schema is enforced.
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    answer = json.loads(ask("What is 12 + 30?", response_format=wanted))
    if set(answer) != {"sum", "even", "kind"}:
        raise SystemExit(f"not what the schema asks for: {answer}")
    print("json:", answer)

    # `structured_outputs` knows more kinds of constraint; give one of json, json_object, regex, choice and grammar.
    print("choice:", ask("What is 12 + 30?", structured_outputs={"choice": ["41", "42", "43"]}))

    pattern = r"[0-9]{3}"
    number = ask("What is 123 + 456?", structured_outputs={"regex": pattern})
    if re.fullmatch(pattern, number) is None:
        raise SystemExit(f"{number!r} does not match {pattern}")
    print("regex:", number)


if __name__ == "__main__":
    main()
