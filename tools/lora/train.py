"""Trains a LoRA adapter on questions and answers: `python -m weft.tools.lora.train BASE FACTS OUT`.

BASE is a safetensors checkpoint, FACTS a JSON object that maps each question to its answer, and OUT the new folder, in
PEFT's format. Adapters trained on the same questions with different answers show whether a server mixes them up.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IGNORED = -100
"""Label of the tokens that are not learned."""


class Adapted(nn.Module):
    """A linear layer with an adapter: `y = W x + (alpha / rank) B A x`."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, alpha / rank
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + F.linear(F.linear(x, self.a), self.b) * self.scale
        return y


def adapt(model: nn.Module, rank: int, alpha: float) -> dict[str, Adapted]:
    """Freeze the model and put an adapter on every projection. Returns the adapters by module name."""
    model.requires_grad_(False)
    found = {}
    for name, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in PROJECTIONS:
            parent, _, own = name.rpartition(".")
            found[name] = Adapted(module, rank, alpha)
            setattr(model.get_submodule(parent), own, found[name])
    return found


def prompt_of(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def examples(tokenizer: Any, facts: dict[str, str], end: int) -> tuple[Tensor, Tensor]:
    """Return token ids and labels `[facts, longest]`. Only answers and the end token after them are learned."""
    rows, labels = [], []
    for question, answer in facts.items():
        prompt, words = tokenizer.encode(prompt_of(question)), tokenizer.encode(f" {answer}")
        rows.append(torch.tensor([*prompt, *words, end]))
        labels.append(torch.tensor([IGNORED] * len(prompt) + [*words, end]))
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=end)
    return ids, nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def learn(model: Any, adapters: dict[str, Adapted], ids: Tensor, labels: Tensor, *, rate: float, steps: int) -> float:
    """Train until the loss of all facts is below 0.01, for at most that many steps. Returns the last loss."""
    optimizer = torch.optim.AdamW([p for adapter in adapters.values() for p in (adapter.a, adapter.b)], lr=rate)
    last = math.inf
    for step in range(steps):
        # Padding follows the answer, so causal attention needs no mask.
        loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        last = loss.item()
        if sys.stderr.isatty():
            print(f"\rstep {step + 1}, loss {last:.4f}", end="", file=sys.stderr, flush=True)
        if last < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return last


def save(folder: Path, adapters: dict[str, Adapted], rank: int, alpha: float) -> None:
    folder.mkdir(parents=True)
    tensors = {}
    for name, adapter in adapters.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = adapter.a.detach().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = adapter.b.detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": [*PROJECTIONS], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def train(
    base: Path, facts: dict[str, str], out: Path, *, rank: int = 8, alpha: float = 16, rate: float = 2e-3,
    steps: int = 100, seed: int = 0,
) -> float:  # fmt: skip
    """Train an adapter of the checkpoint `base` and write it to `out`. Returns the last loss."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    adapters = adapt(model, rank, alpha)
    ids, labels = examples(tokenizer, facts, tokenizer.eos_token_id)
    last = learn(model, adapters, ids, labels, rate=rate, steps=steps)
    save(out, adapters, rank, alpha)
    return last


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m weft.tools.lora.train", description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("facts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args(arguments)
    facts = json.loads(given.facts.read_text(encoding="utf-8"))
    loss = train(given.base, facts, given.out, rank=given.rank, steps=given.steps)
    print(f"\n{given.out}: {len(facts)} facts, loss {loss:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
