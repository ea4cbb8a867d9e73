"""Trains the demo model from nothing and writes it as a Hugging Face directory.

Worker processes write the text while the device learns from it; no text is seen twice. A step is one batch of rows of
one length; the first steps see short rows only. The same seed gives the same batches in the same order.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from weft.server.options import Parser
from weft.tools.demo.corpus import ANSWER, PROMPT, TURN_MIX, Batch, Corpus, prompt_ids
from weft.tools.demo.example import Example
from weft.tools.demo.network import Network, Shape, weighted_loss
from weft.tools.demo.skills import SKILLS, held_out
from weft.tools.demo.tokenizer import BEGIN_ID, END_ID, PAD_ID, write_tokenizer

PROMPT_WEIGHT = 0.02
SHORT_ONLY = 0.08
"""Share of the steps that see only the shortest rows."""
LENGTHS = ((256, 38), (512, 17), (1024, 15), (2048, 30))
"""Row lengths in tokens, and on how many steps of a hundred each comes."""
WARMUP_STEPS = 200
ENDLESS_CHECKED_TOKENS = 400
SECONDS_BETWEEN_SAVES = 60


@dataclass(frozen=True)
class Plan:
    """How long and on what to train."""

    steps: int
    batch_tokens: int
    lr: float
    seed: int
    device: str
    workers: int
    check_every: int
    practice: dict[str, int] = field(default_factory=dict)
    """Changed weights for some kinds of turns."""
    max_seconds: float = 0
    """Seconds until the learning rate reaches zero, independent of the number of steps. 0: after all steps."""

    def length(self, step: int) -> int:
        """Tokens in each row of a step."""
        if step < SHORT_ONLY * self.steps:
            return LENGTHS[0][0]
        at = step * 37 % 100
        for length, share in LENGTHS:
            at -= share
            if at < 0:
                return length
        return LENGTHS[-1][0]

    def rate(self, step: int, seconds: float) -> float:
        """Learning rate: linear warm-up, then a cosine down to nothing."""
        warmup = min(WARMUP_STEPS, max(1, self.steps // 10))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        if self.max_seconds:
            done = min(1.0, max(done, seconds / self.max_seconds))
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))


# --- batches, made by worker processes -----------------------------------------------------------------------------

_worker_corpus: Corpus


def _start_worker(tokenizer_file: str, seed: int, practice: dict[str, int]) -> None:
    global _worker_corpus
    _worker_corpus = Corpus(tokenizer_file, seed, practice)


def _make_batch(job: tuple[int, int, int]) -> Batch:
    return _worker_corpus.batch(*job)


def batches(plan: Plan, tokenizer_file: str) -> Iterator[Batch]:
    """The batches of all steps, in order. Starts its processes by fork, so ask for the first one before CUDA starts."""
    jobs = ((step, max(1, plan.batch_tokens // plan.length(step)), plan.length(step)) for step in range(plan.steps))
    if plan.workers == 0:
        corpus = Corpus(tokenizer_file, plan.seed, plan.practice)
        yield from (corpus.batch(*job) for job in jobs)
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(plan.workers, _start_worker, (tokenizer_file, plan.seed, plan.practice)) as pool:
        yield from pool.imap(_make_batch, jobs)


# --- held-out accuracy while training ------------------------------------------------------------------------------


class Check:
    """Held-out questions in teacher-forced form: an answer is right if every one of its tokens is the model's first
    choice, which is the same as generating it greedily."""

    def __init__(self, tokenizer: Tokenizer, device: str, count: int, max_tokens: int) -> None:
        self.groups: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for skill in SKILLS:
            examples = held_out(skill, count, seed=1)
            rows = sorted((self._row(tokenizer, example) for example in examples), key=lambda row: len(row[0]))
            rows = [(ids[:max_tokens], start) for ids, start in rows]
            self.groups[skill] = [_pad(rows[i : i + 64], device) for i in range(0, len(rows), 64)]

    @staticmethod
    def _row(tokenizer: Tokenizer, example: Example) -> tuple[list[int], int]:
        prompt = prompt_ids(tokenizer, example)
        answer = tokenizer.encode(example.answer, add_special_tokens=False).ids
        answer = [*answer, END_ID] if example.ends else answer[:ENDLESS_CHECKED_TOKENS]
        return prompt + answer, len(prompt)

    @torch.no_grad()
    def accuracy(self, network: Network, autocast: AbstractContextManager[Any]) -> dict[str, float]:
        result: dict[str, float] = {}
        for skill, groups in self.groups.items():
            right = total = 0
            for inputs, targets, counted in groups:
                with autocast:
                    choice = network.head(network(inputs)).argmax(-1)
                right += int(((choice == targets) | ~counted).all(-1).sum())
                total += len(inputs)
            result[skill] = right / total
        return result


def _pad(rows: list[tuple[list[int], int]], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and the mask of the targets that count, each [rows, tokens]."""
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), width), PAD_ID)
    counted = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, (ids, start) in enumerate(rows):
        tokens[i, : len(ids)] = torch.tensor(ids)
        counted[i, start : len(ids)] = True
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device), counted[:, 1:].to(device)


# --- the training loop ---------------------------------------------------------------------------------------------


def train(plan: Plan, shape: Shape, out: Path) -> None:
    """Trains and writes the model to `out`, with a checkpoint every minute."""
    started = saved = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(out, shape.max_position_embeddings)
    tokenizer_file = str(out / "tokenizer.json")
    source = batches(plan, tokenizer_file)
    batch = next(source)
    cuda = plan.device.startswith("cuda")
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    network = Network(shape, plan.seed).to(plan.device)
    autocast: AbstractContextManager[Any] = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()
    check = Check(Tokenizer.from_file(tokenizer_file), plan.device, 192 if cuda else 8, shape.max_position_embeddings)
    loss_of = weighted_loss
    if cuda:
        torch._dynamo.config.recompile_limit = 64
        loss_of = torch.compile(weighted_loss, dynamic=False)
        for layer in network.model.layers:
            layer.compile(dynamic=False)
    optimizer = make_optimizer(network, plan.lr, fused=cuda)
    kind_weights = torch.tensor([0.0, 0.0, 0.0], device=plan.device)
    kind_weights[PROMPT], kind_weights[ANSWER] = PROMPT_WEIGHT, 1.0

    log = Log(plan, sum(parameter.numel() for parameter in network.parameters()))
    for step in range(plan.steps):
        seconds = time.perf_counter() - started
        last = step + 1 == plan.steps or bool(plan.max_seconds and seconds >= plan.max_seconds)
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step, seconds)
        tokens, kinds = (torch.from_numpy(part).to(plan.device, non_blocking=True) for part in batch)
        tokens = tokens.long()
        with autocast:
            hidden = network(tokens[:, :-1])
            weights = kind_weights[kinds[:, 1:].long()]
            embedding = network.model.embed_tokens.weight
            loss = loss_of(hidden.flatten(0, 1), embedding, tokens[:, 1:].flatten(), weights.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not last:
            batch = next(source)
        log.step(step + 1, loss.detach(), tokens.numel())
        if time.perf_counter() - saved > SECONDS_BETWEEN_SAVES or last:
            save(network, shape, out)
            saved = time.perf_counter()
        if (step + 1) % plan.check_every == 0 or last:
            log.accuracy(check.accuracy(network, autocast))
        if last:
            break
    log.done(out)


def make_optimizer(network: Network, lr: float, fused: bool) -> torch.optim.Optimizer:
    """AdamW; only the matrices of the layers decay."""
    matrices = [parameter for parameter in network.model.layers.parameters() if parameter.dim() == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in network.parameters() if id(parameter) not in chosen]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), eps=1e-8, fused=fused)


def save(network: Network, shape: Shape, out: Path) -> None:
    """Writes weights (bf16) and configuration; the tokenizer is there already."""
    weights = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in network.state_dict().items()}
    save_file(weights, out / "model.safetensors.tmp", metadata={"format": "pt"})
    (out / "model.safetensors.tmp").chmod(0o644)
    os.replace(out / "model.safetensors.tmp", out / "model.safetensors")
    generation = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID, "do_sample": False}
    for name, content in (("config.json", shape.config()), ("generation_config.json", generation)):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class Log:
    """Progress: a live bar where there is a terminal and rich, plain lines elsewhere."""

    def __init__(self, plan: Plan, parameters: int) -> None:
        self.plan = plan
        self.tokens = 0
        self.started = time.perf_counter()
        self.bar: Any = None
        if sys.stdout.isatty():
            try:
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
            except ImportError:
                pass
            else:
                text = TextColumn("{task.description}")
                self.bar = Progress(text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
                self.bar.start()
                self.task = self.bar.add_task("training", total=plan.steps)
        self.line(f"{parameters:,} parameters, {plan.steps} steps of {plan.batch_tokens:,} tokens on {plan.device}")

    def line(self, text: str) -> None:
        if self.bar:
            self.bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def step(self, step: int, loss: Tensor, tokens: int) -> None:
        self.tokens += tokens
        every = max(1, self.plan.steps // 100)
        if self.bar:
            self.bar.update(self.task, completed=step)
        if step % every and step != self.plan.steps:
            return
        seconds = time.perf_counter() - self.started
        rate = self.tokens / seconds / 1e6
        value = loss.item()
        if self.bar:
            self.bar.update(self.task, description=f"loss {value:.4f}  {rate:.2f} M tokens/s")
        else:
            print(f"step {step:6d}  loss {value:.4f}  {rate:6.2f} M tokens/s  {seconds:6.1f} s", flush=True)

    def accuracy(self, accuracy: dict[str, float]) -> None:
        self.line("held out: " + "  ".join(f"{skill} {100 * share:.1f}" for skill, share in accuracy.items()))

    def done(self, out: Path) -> None:
        if self.bar:
            self.bar.stop()
        seconds = time.perf_counter() - self.started
        print(f"wrote {out}: {self.tokens / 1e9:.2f} billion tokens in {seconds:.0f} s")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="weft demo train",
        description="Train weft's demo model from nothing. Takes minutes on one GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write the model")
    parser.add_argument("--steps", type=int, default=10_000, help="optimizer steps")
    parser.add_argument("--batch-tokens", type=int, default=131072, help="tokens in a step")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the text")
    parser.add_argument("--device", default=default_device, help="cuda, cuda:1, cpu ...")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that write text; 0 for none"
    )
    parser.add_argument("--check-every", type=int, default=4000, help="steps between accuracy checks")
    parser.add_argument("--max-seconds", type=float, default=0, help="end by then, the learning rate too; 0 for never")
    parser.add_argument(
        "--practice",
        action="append",
        default=[],
        metavar="KIND=WEIGHT",
        help="let this kind of turn come more or less often (corpus.py names them); may be given again",
    )
    args = vars(parser.parse_args(argv))
    out = args.pop("out")
    try:
        args["practice"] = {kind: int(weight) for kind, weight in (item.split("=") for item in args["practice"])}
    except ValueError:
        parser.error("--practice must be KIND=WEIGHT, such as repeat=20")
    if unknown := set(args["practice"]) - set(TURN_MIX):
        parser.error(f"--practice: no turns of the kind {min(unknown)!r}; there are {', '.join(TURN_MIX)}")
    for name in ("steps", "batch_tokens", "check_every"):
        if args[name] < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("workers", "max_seconds"):
        if args[name] < 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative")
    plan = Plan(**args)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        if torch.device(plan.device).type == "cuda" and not torch.cuda.is_available():
            parser.error(f"--device {plan.device}: this machine has no usable CUDA device")
        train(plan, Shape(), out)
    except (OSError, RuntimeError, AssertionError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
