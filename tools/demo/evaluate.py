"""Measures the demo model on held-out questions with `transformers`: its skills, and people's own wordings."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft import output_file, unwritable
from weft.engine.demo import MODEL_PATH
from weft.server.options import Parser
from weft.tools.demo.example import Example
from weft.tools.demo.questions import Question, questions
from weft.tools.demo.skills import MAX_CONTEXT_TOKENS, SKILLS, held_out

SEED = 2
WORDINGS_THRESHOLD = 0.9
ENDLESS_LIMIT = 16
"""Maximum number of questions with an endless answer: each fills a context."""
SPOKEN_TOKENS = 120


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
    Task("endless story, up to the end of the context", "story", 0.95),
    Task("counting up", "count_up", 0.95),
    Task("echoing any script", "echo", 0.95),
    Task("plain text completion", "complete", 0.95),
    Task("sums in various wordings", "sums", 0.95),
    Task("multiplying up to 12", "multiply", 0.95),
    Task("sums over turns", "then", 0.95),
    Task("largest and smallest", "compare", 0.95),
    Task("counting down and up in various wordings", "count_down", 0.95),
    Task("lists in various wordings", "lists", 0.95),
    Task("spelling and letters", "letters", 0.90),
    Task("repeating anything", "repeat", 0.95),
    Task("recall in various wordings", "told", 0.95),
    Task("tool calls", "tools", 0.95),
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
        text = self.tokenizer.apply_chat_template(
            example.messages, tools=example.tools or None, add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def answers(self, questions: Sequence[Question], batch_size: int) -> list[str]:
        """The model's answers to questions in people's own wordings."""
        texts = [
            self.tokenizer.apply_chat_template(q.messages, tools=q.tools, add_generation_prompt=True, tokenize=False)
            for q in questions
        ]
        prompts = [list(self.tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
        said: list[str] = []
        for at in range(0, len(prompts), batch_size):
            rows = self._generate(prompts[at : at + batch_size], SPOKEN_TOKENS)
            said += [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        return said

    def _generate(self, prompts: list[list[int]], budget: int) -> list[list[int]]:
        """Greedy continuations of at most `budget` tokens."""
        torch = self.torch
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            output = self.model.generate(
                ids.to(self.device),
                attention_mask=mask.to(self.device),
                max_new_tokens=min(budget, self.context - longest),
                do_sample=False,
            )
        rows: list[list[int]] = output[:, longest:].tolist()
        return rows

    def right(self, examples: Sequence[Example], batch_size: int) -> int:
        """How many of the examples are answered exactly."""
        prompts = [self.prompt(example) for example in examples]
        order = sorted(range(len(prompts)), key=lambda i: (examples[i].ends, len(prompts[i])))
        return sum(
            self._right([examples[i] for i in part], [prompts[i] for i in part])
            for part in (order[at : at + batch_size] for at in range(0, len(order), batch_size))
        )

    def _right(self, examples: list[Example], prompts: list[list[int]]) -> int:
        """In one pass: an answer is the greedy one if each token is the model's first choice after those before it."""
        torch, tokenizer = self.torch, self.tokenizer
        answers = [tokenizer(example.answer, add_special_tokens=False).input_ids for example in examples]
        rows = [
            (prompt + answer + [tokenizer.eos_token_id] * example.ends)[: self.context]
            for example, prompt, answer in zip(examples, prompts, answers, strict=True)
        ]
        ids = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = torch.tensor(row)
        with torch.inference_mode():
            choices = self.model(ids.to(self.device)).logits.argmax(-1).tolist()
        return sum(
            choice[len(prompt) - 1 : len(row) - 1] == row[len(prompt) :]
            for choice, prompt, row in zip(choices, prompts, rows, strict=True)
        )


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


def evaluate_wordings(answerer: Answerer, batch_size: int, show: bool) -> bool:
    """The questions in people's own wordings, by group; whether enough are right."""
    asked = questions()
    said = answerer.answers(asked, batch_size)
    groups: dict[str, list[bool]] = {}
    for question, answer in zip(asked, said, strict=True):
        right = question.is_right(answer)
        groups.setdefault(question.group, []).append(right)
        if show and not right:
            print(f"{question.group}: {question.messages[-1]['content']!r} -> {answer!r}, not {question.answer!r}")
    print(f"{'wordings of people':42} {'n':>5} {'accuracy':>9}")
    for group, rights in groups.items():
        print(f"{group:42} {len(rights):5} {sum(rights) / len(rights):9.2%}")
    spoken = [right for group, rights in groups.items() if group != "tools" for right in rights]
    share = sum(spoken) / len(spoken)
    verdict = "yes" if share >= WORDINGS_THRESHOLD else "NO"
    print(f"{'all but tools':42} {len(spoken):5} {share:9.2%} {WORDINGS_THRESHOLD:10.0%}  {verdict}", flush=True)
    return share >= WORDINGS_THRESHOLD


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="weft demo evaluate",
        description="Measure the demo model on questions that its training never saw. Exits 1 if a skill is too weak.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=MODEL_PATH, metavar="DIR", help="model directory")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="questions for each skill")
    parser.add_argument("--skill", action="append", choices=SKILLS, help="only this skill; may be given again")
    parser.add_argument(
        "--wordings", action="store_true", help="only the questions in people's own wordings; shows misses"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="type to compute in")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="questions answered at once")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the scores to this file")
    args = parser.parse_args(argv)
    if args.limit < 1 or args.batch_size < 1:
        parser.error("--limit and --batch-size must be at least 1")
    if not (args.model / "config.json").is_file():
        parser.error(f"no model in {args.model} (config.json is missing)")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    started = time.perf_counter()
    try:
        answerer = Answerer(args.model, args.device, args.dtype)
        if args.wordings:
            return 0 if evaluate_wordings(answerer, args.batch_size, show=True) else 1
        tasks = [task for task in TASKS if not args.skill or task.skill in args.skill]
        scores = evaluate(answerer, tasks, args.limit, args.batch_size)
        if args.json:
            rows = [asdict(score) | {"passed": score.passed} for score in scores]
            text = json.dumps({"dtype": args.dtype, "scores": rows}, indent=2) + "\n"
            try:
                args.json.write_text(text, encoding="utf-8")
            except OSError as error:
                raise RuntimeError(unwritable(args.json, error)) from None
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
