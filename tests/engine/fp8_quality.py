"""Measures the demo model's skills in the engine: `python tests/engine/fp8_quality.py [N]` prints a row for each,
`best` how often its best token is that of bfloat16 weights.

Columns: bfloat16 weights, FP8 weights, FP8 weights and KV, FP8 KV alone; all computed in float32, on the held-out
questions of `weft demo evaluate`. An answer is right when each of its tokens is the first choice where it stands.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from harness import Harness
from tokenizers import Tokenizer

from weft.engine.demo import MODEL_PATH
from weft.tools.demo.corpus import prompt_ids
from weft.tools.demo.evaluate import TASKS, Task

END_ID = 1
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "FP8": {"quantization": "fp8"},
    "FP8 and KV": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "KV": {"kv_cache_dtype": "fp8"},
}


def served(**options: Any) -> Harness:
    return Harness(MODEL_PATH, page_size=16, num_pages=700, max_num_seqs=32, prefix_caching=False, **options)


def accuracy(harness: Harness, task: Task, limit: int) -> float:
    """The share of held-out questions that the model answers exactly."""
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    answers: dict[int, int] = {}
    for example in (examples := task.examples(limit)):
        prompt = prompt_ids(tokenizer, example)
        answer = tokenizer.encode(example.answer, add_special_tokens=False).ids + [END_ID] * example.ends
        whole = (prompt + answer)[: harness.engine.spec.max_positions - 1]
        handle = harness.add(np.array(whole), max_tokens=0, prompt_logprobs=1)
        answers[handle] = len(whole) - len(prompt)
    harness.run()
    right = sum(all(e.rank == 1 for e in harness.prompt_logprobs[handle][-n:]) for handle, n in answers.items())
    return right / len(examples)


def best_tokens(harness: Harness, questions: int) -> list[tuple[list[int], list[float], int]]:
    """For `questions` questions of each skill: the best token after each one, its margin, and for how many of the last
    positions it is the answer's."""
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    requested: list[tuple[int, int]] = []
    for task in (task for task in TASKS if task.skill not in ("recall", "story")):
        for example in task.examples(questions):
            prompt = prompt_ids(tokenizer, example)
            answer = tokenizer.encode(example.answer, add_special_tokens=False).ids + [END_ID] * example.ends
            requested.append((harness.add(np.array(prompt + answer), max_tokens=0, prompt_logprobs=2), len(answer)))
    harness.run()
    found = []
    for handle, answer_tokens in requested:
        entries = harness.prompt_logprobs[handle]  # each token's own, then the two best
        ahead = [float(e.values[1] - e.values[2]) for e in entries]
        found.append(([int(e.ids[1]) for e in entries], ahead, answer_tokens))
    return found


def compare_best(questions: int = 4) -> None:
    exact = best_tokens(served(), questions)
    for name, options in list(FORMATS.items())[1:]:
        every = same = answers = kept = 0
        apart: list[float] = []
        for (want, ahead, n), (got, _, _) in zip(exact, best_tokens(served(**options), questions), strict=True):
            alike = np.array(want) == np.array(got)
            every, same, answers, kept = every + len(alike), same + alike.sum(), answers + n, kept + alike[-n:].sum()
            apart += [a for a, equal in zip(ahead, alike, strict=True) if not equal]
        print(
            f"{name}: {same / every:.2%} of {every}; of answers {kept} of {answers}; where they differ the best is "
            f"ahead by {np.median(apart):.2f}, at most {max(apart):.2f}"
        )


def main() -> None:
    if sys.argv[1:] == ["best"]:
        compare_best()
        return
    limit = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    engines = {name: served(**options) for name, options in FORMATS.items()}
    print(f"| {'skill':42} | {' | '.join(f'{name:>10}' for name in engines)} |", flush=True)
    for task in TASKS:
        row = [accuracy(harness, task, limit) for harness in engines.values()]
        print(f"| {task.name:42} | {' | '.join(f'{share:10.1%}' for share in row)} |", flush=True)


if __name__ == "__main__":
    main()
