"""`held_out.jsonl`: questions in people's own wordings, written by hand before the templates, and what answers them.

No training text is asked in any of these wordings (`wording.held_out_wordings`).
"""

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

_CALL = re.compile(r"\s*<tool_call>\s*(\{.*\})\s*</tool_call>\s*", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """A conversation to be answered. `check` says how `answer` is compared:

    `exact` literally, `text` without case and final punctuation, `number` the only number of the answer,
    `list` the items in order, `contains` one of several texts, `call` a function's name and its arguments.
    """

    group: str
    check: str
    answer: Any
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None

    def is_right(self, said: str) -> bool:
        if self.check == "call":
            match = _CALL.fullmatch(said)
            return match is not None and _json(match[1]) == self.answer
        if self.check == "contains":
            wanted = self.answer if isinstance(self.answer, list) else [self.answer]
            return "<tool_call>" not in said and any(text.lower() in said.lower() for text in wanted)
        if self.check == "number":
            return re.findall(r"-?\d+", said) == [self.answer]
        if self.check == "list":
            return _items(said) == _items(self.answer)
        if self.check == "text":
            return _bare(said) == _bare(self.answer)
        return said.strip() == self.answer


def questions() -> list[Question]:
    """All questions: 200 without and 30 with functions offered."""
    rows = (files(__package__) / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        Question(row["group"], row["check"], row["answer"], row["messages"], row.get("tools"))
        for row in map(json.loads, rows)
    ]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _items(text: str) -> list[str]:
    return [item.lower() for item in re.split(r"[\s,]+", text.strip(" .\n")) if item]


def _bare(text: str) -> str:
    return text.strip().strip("\"'").rstrip(".!?").lower()
