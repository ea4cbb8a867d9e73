"""LoRA adapters on several ranks: answers equal those of the base model with the adapter merged in."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from lora_files import merged, save_adapter
from transformers import AutoModelForCausalLM

from weft.engine.model.adapter import adapter_digest
from weft.engine.ranks.ring import Kind
from weft.engine.wire.messages import Finish, LoadAdapter

OPTIONS: dict[str, Any] = {"page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "cpu_threads": 1}
MAX_TOKENS = 8


class Served:
    """An engine of several ranks with room for two of three adapters."""

    def __init__(self, path: Path, folder: Path, ranks: int) -> None:
        self.base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.paths = {
            "one": save_adapter(folder / "one", self.base, seed=1),
            "two": save_adapter(folder / "two", self.base, seed=2, rank=8, alpha=16, use_rslora=True),
            "three": save_adapter(folder / "three", self.base, seed=3, names="o_proj|down_proj|dense|c_proj|fc2"),
        }
        self.digests = ["", *map(adapter_digest, self.paths.values())]
        self.models = [self.base, *merged(self.base, self.paths.values())]
        self.harness = Harness(
            path, tensor_parallel_size=ranks, max_loras=2, **OPTIONS,
            lora_modules=[f"{name}={path}" for name, path in self.paths.items()],
        )  # fmt: skip

    def check(self) -> None:
        """Serve requests of the base model and all adapters at once, and compare every token."""
        rng = np.random.default_rng(4)
        prompts = [rng.integers(3, 199, length) for length in (5, 17, 40)]
        handles = [
            (self.harness.add(prompt, adapter=digest, max_tokens=MAX_TOKENS, **GREEDY), prompt, model)
            for prompt in prompts
            for digest, model in zip(self.digests, self.models, strict=True)
        ]
        self.harness.run()
        answers = set()
        for handle, prompt, model in handles:
            tokens = self.harness.tokens[handle]
            with torch.inference_mode():
                ids = torch.from_numpy(np.concatenate((prompt, tokens)))[None]
                logits = model(ids).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == tokens
            if prompt is prompts[-1]:
                answers.add(tuple(tokens))
        assert len(answers) > 2, "adapters change nothing"


@pytest.fixture
def two(tiny_model: Callable[[str], Path], tmp_path: Path) -> Iterator[Served]:
    served = Served(tiny_model("llama2"), tmp_path, 2)
    yield served
    engine = served.harness.engine
    if not engine.ranks._stopping:
        engine.close()


def test_ranks_load_evict_and_serve_adapters(two: Served, tmp_path: Path) -> None:
    two.check()
    engine, harness = two.harness.engine, two.harness
    assert engine.adapters is not None

    # An adapter that one rank cannot read is an error of its load alone.
    reading = engine.runner.adapters
    digest = adapter_digest(two.paths["one"])
    copy = shutil.copytree(two.paths["one"], tmp_path / "copy")
    send = reading._ring.send

    def remove_first(kind: Any, *arrays: np.ndarray) -> None:
        (copy / "adapter_model.safetensors").unlink(missing_ok=True)
        send(kind, *arrays)

    reading._ring.send = remove_first
    engine.adapters.take_news()
    engine.adapters.load(LoadAdapter("copy", str(copy)))
    while not (news := engine.adapters.take_news()):
        harness.step()
    reading._ring.send = send
    assert "not every rank could read" in news[0].error
    handle = harness.add(np.arange(3, 9), adapter=digest, max_tokens=2, **GREEDY)
    harness.run()
    assert harness.finish[handle] is Finish.LENGTH

    # An engine can be closed while a rank's disk hangs.
    began = threading.Event()

    def hang(kind: Kind, *arrays: np.ndarray) -> None:
        if kind is Kind.READ_ADAPTER:
            began.set()
        else:
            send(kind, *arrays)

    reading._ring.send = hang
    engine.adapters.load(LoadAdapter("late", str(two.paths["two"])))
    assert began.wait(60)
    engine.close()
    (thread,) = engine.adapters._thread._threads
    thread.join(60)
    assert not thread.is_alive(), "the process could not exit"


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama2", "gemma3", "phi3", "gpt2", "opt", "granite"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_families_on_ranks(tiny_model: Callable[[str], Path], tmp_path: Path, family: str, ranks: int) -> None:
    """Post-norms, fused modules, biases of norms, scaled residuals, KV heads that several ranks share."""
    served = Served(tiny_model(family), tmp_path, ranks)
    served.check()
    served.harness.engine.close()
