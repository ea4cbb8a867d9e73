"""`ChaosAdapters`: LoRA adapters of the daemon under test, questions to them, and their answers by `transformers`.

More adapters than fit in memory are in the folder of `--lora-dir`, so that first requests load them and others evict
them. The operator loads one after the other under one more name, and unloads names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from customers import COMPLETIONS, Question, exchange, request
from ledger import Ledger

from weft.engine.config import EngineConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from lora_files import merged, save_adapter

OPERATOR = "operator"  # the admin key
NAMES = tuple(f"adapter-{i}" for i in range(4))
IN_MEMORY = 2
GUEST = "guest"  # a name for adapters that the operator loads
PROMPTS, TOKENS = 6, 8


class ChaosAdapters:
    def __init__(self, folder: Path, rng: Random) -> None:
        from transformers import AutoModelForCausalLM

        self.folder, self._rng = folder, rng
        self.options = f"lora_dir={folder} max_loras={IN_MEMORY} lora_modules={NAMES[0]}={folder / NAMES[0]}"
        """those of the model, in its entry"""
        base: Any = AutoModelForCausalLM.from_pretrained(EngineConfig(model="demo").model_path, dtype=torch.float32)
        prompts = [[rng.randrange(20, 400) for _ in range(rng.randrange(40, 90))] for _ in range(PROMPTS)]
        self._expected: dict[str, dict[int, list[int]]] = {}  # tokens by adapter and prompt
        for seed, name in enumerate(NAMES):
            path = save_adapter(folder / name, base, seed=seed, strength=0.2)
            model = merged(base, [path])[0]
            self._expected[name] = {i: _greedy(model, prompt) for i, prompt in enumerate(prompts)}
        self._prompts = prompts
        for i in range(PROMPTS):
            answers = {tuple(found[i]) for found in self._expected.values()}
            assert len(answers) == len(NAMES), "adapters must be told apart by each answer"

    def questions(self) -> Iterator[tuple[Question, set[str]]]:
        """Yield questions with the answers that are right. The guest may be any adapter, or none."""
        for i, prompt in enumerate(self._prompts):
            for name in NAMES:
                yield _question(name, prompt), {self._text(name, i)}
            yield replace(_question(GUEST, prompt), status=404), {"404", *(self._text(name, i) for name in NAMES)}
        wrong = _question("adapter-99", self._prompts[0])
        yield replace(wrong, status=404), {"404"}

    def _text(self, name: str, prompt: int) -> str:
        return json.dumps([self._expected[name][prompt]])

    async def change(self, port: int, ledger: Ledger) -> str:
        """Load, replace or unload an adapter, as an operator does. Returns what was done."""
        name = self._rng.choice((GUEST, GUEST, *NAMES))
        unload = self._rng.random() < 0.4 if name == GUEST else True
        body: dict[str, Any] = {"lora_name": name}
        if not unload:
            body |= {"lora_path": str(self.folder / self._rng.choice(NAMES)), "load_inplace": True}
        did = "unload" if unload else "load"
        path = f"/v1/{did}_lora_adapter"
        question = Question(path, body, headers=f"Authorization: Bearer {OPERATOR}\r\n")
        await exchange(port, ledger, "other", request(question, keep_alive=False), f"{path} {body}")
        return did


def _question(name: str, prompt: list[int]) -> Question:
    fields = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return Question(COMPLETIONS, {**fields, "return_token_ids": True})


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
