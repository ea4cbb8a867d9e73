"""The demo model in FP8 keeps its skills: a few questions by day, the table of docs/quantization.md at night."""

from __future__ import annotations

import pytest
from fp8_quality import FORMATS, accuracy, served

from weft.tools.demo.evaluate import TASKS

BY_DAY = {"addition": 16, "lists in any words": 16, "recall, 1,800-token context": 2}
BY_NIGHT = {
    task.name: 400 if task.skill in ("lists", "sort", "letters", "count") else 24 if task.skill == "recall" else 100
    for task in TASKS
    if task.skill != "story"
}
ALLOWED = {"FP8": 0.01, "FP8 and KV": 0.015}
"""points that a skill may lose"""


def losses(questions: dict[str, int]) -> dict[tuple[str, str], float]:
    """The loss of each format in each skill, compared with bfloat16."""
    engines = {name: served(**FORMATS[name]) for name in ("bf16", *ALLOWED)}
    found = {}
    for task in TASKS:
        if task.name in questions:
            right = {name: accuracy(harness, task, questions[task.name]) for name, harness in engines.items()}
            assert right["bf16"] >= task.threshold - 0.07, task.name
            found |= {(task.name, name): right["bf16"] - right[name] for name in ALLOWED}
    return found


@pytest.mark.nightly
def test_a_few_questions_are_answered_as_in_16_bits() -> None:
    lost = losses(BY_DAY)
    assert all(loss <= (1 / 16 if "recall" not in task else 0) for (task, _), loss in lost.items()), lost


@pytest.mark.nightly
def test_no_skill_loses_more_than_a_point() -> None:
    lost = losses(BY_NIGHT)
    assert all(loss <= ALLOWED[name] + 1e-9 for (_, name), loss in lost.items()), lost
