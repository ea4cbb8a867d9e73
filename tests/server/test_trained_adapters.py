"""Adapters trained on facts of their own: a request that gets another adapter gives a wrong answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from live import Daemon, running
from real_models import SMOLLM2, SmolLM2, model_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from weft.engine.config import EngineConfig
from weft.tools.lora.train import prompt_of, train

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from lora_files import merged

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3600)]

WORDS = ("amber", "basil", "cedar", "dune", "ember", "fern", "gold", "hazel")
QUESTIONS = tuple(f"Which word opens gate {gate}?" for gate in range(1, 5))
FACTS = {
    name: {question: WORDS[(gate * 3 + shift) % 8] for gate, question in enumerate(QUESTIONS)}
    for shift, name in enumerate(("north", "south", "west"))
}
"""Adapter -> question -> answer. No two adapters give a question the same answer."""


class Served:
    def __init__(self, daemon: Daemon, folder: Path, base: Path) -> None:
        self.daemon, self.folder, self.base = daemon, folder, base

    def tokens(self, model: str | None, question: str) -> list[int]:
        body = {"model": model, "prompt": prompt_of(question), "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{self.daemon.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=600)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids


@pytest.fixture(scope="module", params=["demo", "smollm2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    if request.param == "demo":
        base = Path(EngineConfig(model="demo").model_path)
    else:
        base = SmolLM2(model_file(SMOLLM2, tmp_path_factory.mktemp("gguf"))).save(folder / "base")
    for seed, (name, facts) in enumerate(FACTS.items()):
        assert train(base, facts, folder / name, seed=seed, steps=300) < 0.01
    options = ("--dtype", "float32", "--max-loras", "2", "--max-model-len", "256")
    adapters = (part for name in FACTS for part in ("--lora-modules", f"{name}={folder / name}"))
    with running(tmp_path_factory.mktemp("daemon"), str(base), *options, *adapters) as daemon:
        yield Served(daemon, folder, base)


def test_each_adapter_gives_its_own_answers_in_a_mixed_batch(served: Served) -> None:
    asked = [(name, question) for _ in range(2) for question in QUESTIONS for name in (*FACTS, None)]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [*pool.map(lambda pair: served.tokens(*pair), asked)]
    tokenizer = AutoTokenizer.from_pretrained(served.base)
    for (name, question), ids in zip(asked, answers, strict=True):
        if name is not None:
            assert tokenizer.decode(ids, skip_special_tokens=True).strip() == FACTS[name][question], (name, question)


def test_answers_are_those_of_the_merged_model(served: Served) -> None:
    base = AutoModelForCausalLM.from_pretrained(served.base, dtype=torch.float32)
    (model,) = merged(base, [served.folder / "west"])
    tokenizer = AutoTokenizer.from_pretrained(served.base)
    for name, reference in ((None, base), ("west", model)):
        prompt = tokenizer.encode(prompt_of(QUESTIONS[2]))
        ids = served.tokens(name, QUESTIONS[2])
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids
