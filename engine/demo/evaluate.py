"""Measures the demo model's skills on held-out questions, by greedy generation with `transformers`."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import MODEL_PATH
from .skills import MAX_CONTEXT_TOKENS, SKILLS, Example, held_out

SEED = 2
ENDLESS_LIMIT = 16
"""At most so many of the questions whose answer never ends: each takes a whole context."""


@dataclass(frozen=True)
class Task:
    """A row of the table: held-out examples of a skill, and the share that must be right."""

    name: str
    skill: str
    threshold: float
    context_tokens: int | None = None

    def examples(self, limit: int) -> list[Example]:
        n = min(limit, ENDLESS_LIMIT) if self.skill == "story" else limit
        return held_out(self.skill, n, SEED, self.context_tokens)


TASKS = (
    Task("recall, any context up to 1,800 tokens", "recall", 0.99),
    Task("recall, 1,800-token context", "recall", 0.99, MAX_CONTEXT_TOKENS),
    Task("addition", "add", 0.98),
    Task("subtraction", "subtract", 0.98),
    Task("copying words", "copy", 0.98),
    Task("reversing words", "reverse", 0.98),
    Task("upper-casing words", "upper", 0.98),
    Task("sorting words", "sort", 0.98),
    Task("counting words", "count", 0.95),
    Task("memory over turns", "memory", 0.98),
    Task("small talk", "chat", 0.95),
    Task("unknown questions", "unknown", 0.95),
    Task("endless story, to the end of the context", "story", 0.95),
    Task("counting up", "count_up", 0.95),
    Task("echo of any script", "echo", 0.95),
    Task("plain text completion", "complete", 0.95),
)


@dataclass(frozen=True)
class Score:
    task: str
    n: int
    accuracy: float
    threshold: float

    @property
    def passed(self) -> bool:
        return self.accuracy >= self.threshold


class Answerer:
    """A model directory behind `transformers`, answering batches of questions greedily."""

    def __init__(self, model: Path, device: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.torch = torch
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
        self.tokenizer.model_max_length = sys.maxsize  # an endless answer is cut here, not by a warning
        self.device = device
        self.context = int(self.model.config.max_position_embeddings)

    def prompt(self, example: Example) -> list[int]:
        if not example.messages:
            return list(self.tokenizer(example.prompt).input_ids)
        text = self.tokenizer.apply_chat_template(example.messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def right(self, examples: Sequence[Example], batch_size: int) -> int:
        """How many of the examples are answered exactly."""
        prompts = [self.prompt(example) for example in examples]
        order = sorted(range(len(prompts)), key=lambda i: (examples[i].ends, len(prompts[i])))
        return sum(
            self._right([examples[i] for i in part], [prompts[i] for i in part])
            for part in (order[at : at + batch_size] for at in range(0, len(order), batch_size))
        )

    def _right(self, examples: list[Example], prompts: list[list[int]]) -> int:
        torch, tokenizer = self.torch, self.tokenizer
        answers = [tokenizer(example.answer, add_special_tokens=False).input_ids for example in examples]
        longest = max(map(len, prompts))
        budget = min(max(map(len, answers)) + 2, self.context - longest)
        ids = torch.full((len(prompts), longest), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            output = self.model.generate(
                ids.to(self.device), attention_mask=mask.to(self.device), max_new_tokens=budget, do_sample=False
            )
        right = 0
        for example, answer, tokens in zip(examples, answers, output[:, longest:].tolist(), strict=True):
            if example.ends:
                right += tokens[: len(answer) + 1] == [*answer, tokenizer.eos_token_id]
            else:
                right += tokens[: len(answer)] == answer[: len(tokens)]
        return right


def evaluate(answerer: Answerer, tasks: Sequence[Task], limit: int, batch_size: int) -> list[Score]:
    """One score for each task, printed as it is measured."""
    print(f"{'skill':42} {'n':>5} {'accuracy':>9} {'threshold':>10}  pass", flush=True)
    scores = []
    for task in tasks:
        examples = task.examples(limit)
        score = Score(task.name, len(examples), answerer.right(examples, batch_size) / len(examples), task.threshold)
        scores.append(score)
        verdict = "yes" if score.passed else "NO"
        print(f"{score.task:42} {score.n:5} {score.accuracy:9.2%} {score.threshold:10.0%}  {verdict}", flush=True)
    return scores


def main(argv: list[str] | None = None, parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> int:
    parser = parser_class(
        prog="weft demo evaluate",
        description="Measure the demo model on questions that its training never saw. Exits 1 if a skill is too weak.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=MODEL_PATH, metavar="DIR", help="model directory")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="questions for each skill")
    parser.add_argument("--skill", action="append", choices=SKILLS, help="only this skill; may be given again")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="type to compute in")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="questions answered at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the scores to this file")
    args = parser.parse_args(argv)
    if args.limit < 1 or args.batch_size < 1:
        parser.error("--limit and --batch-size must be at least 1")
    if not (args.model / "config.json").is_file():
        parser.error(f"no model in {args.model} (config.json is missing)")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    started = time.perf_counter()
    try:
        answerer = Answerer(args.model, args.device, args.dtype)
        tasks = [task for task in TASKS if not args.skill or task.skill in args.skill]
        scores = evaluate(answerer, tasks, args.limit, args.batch_size)
        if args.json:
            rows = [asdict(score) | {"passed": score.passed} for score in scores]
            args.json.write_text(json.dumps({"dtype": args.dtype, "scores": rows}, indent=2) + "\n", encoding="utf-8")
    except (ImportError, OSError, RuntimeError, AssertionError, ValueError) as error:
        print(f"error: {str(error).splitlines()[0] if str(error) else type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    print(f"{args.model}, {args.dtype} on {args.device}, {time.perf_counter() - started:.0f} s")
    return 0 if all(score.passed for score in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
