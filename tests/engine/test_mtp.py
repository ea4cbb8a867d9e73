"""Layers for multi-token prediction that ship in checkpoints: they change no token, and draft what the paper says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import GREEDY, Harness
from noted_drafts import noted_drafts
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from weft.engine.errors import WeftError

FAMILIES = ["glm4-moe", "deepseek-v3"]
DEPTH = 3
PROMPTS = [[5, 9, 30, 41, 7, 7, 12], list(range(60, 101)), [99, 3], [80] * 25]
REQUESTS: list[dict[str, Any]] = [
    {**GREEDY, "logprobs": 2}, {"temperature": 1.0, "seed": 3, "logprobs": 1},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3}, {**GREEDY, "logit_bias": {50: 3.0}},
]  # fmt: skip


def with_layer(source: Path, out: Path, own: bool) -> Path:
    """Copy a checkpoint and add a layer with the shapes of its last one. own: it has its own embedding and head."""
    config = json.loads((source / "config.json").read_text())
    place, hidden = config["num_hidden_layers"], config["hidden_size"]
    tensors: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    random = torch.Generator().manual_seed(5)
    before, prefix = f"model.layers.{place - 1}.", f"model.layers.{place}."
    shapes = {prefix + name.removeprefix(before): t.shape for name, t in tensors.items() if name.startswith(before)}
    shapes |= {
        f"{prefix}enorm.weight": (hidden,), f"{prefix}hnorm.weight": (hidden,),
        f"{prefix}eh_proj.weight": (hidden, 2 * hidden), f"{prefix}shared_head.norm.weight": (hidden,),
    }  # fmt: skip
    if own:
        table = (config["vocab_size"], hidden)
        shapes |= {f"{prefix}embed_tokens.weight": table, f"{prefix}shared_head.head.weight": table}
    for name, shape in shapes.items():
        made = torch.randn(*shape, generator=random)
        tensors[name] = 1 + 0.3 * made if len(shape) == 1 else 0.25 * made
    out.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (out / file.name).write_bytes(file.read_bytes())
    (out / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    save_file({name: t.contiguous() for name, t in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    return out


def make(path: Path, *, drafts: bool, **options: Any) -> Harness:
    config = {"method": "mtp", "num_speculative_tokens": DEPTH, "enable_adaptive_verification": False}
    sizes = {"max_num_seqs": 4, "num_pages": 120, "page_size": 8, "batch_invariant": True, **options}
    return Harness(path, speculative_config=json.dumps(config) if drafts else None, **sizes)


def ask(harness: Harness, length: int = 16) -> None:
    for prompt, params in zip(PROMPTS, REQUESTS, strict=True):
        harness.add(prompt, max_tokens=length, ignore_eos=True, **params)
    harness.run()


KINDS = [(family, own) for family in FAMILIES for own in (False, True)]


@pytest.fixture(
    scope="module", params=[KINDS[0], *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[1:])], ids=str
)
def checkpoint(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    family, own = request.param
    return with_layer(tiny_model(family), tmp_path_factory.mktemp("mtp") / family, own)


def test_the_layer_changes_no_bit_and_drafts_what_the_paper_says(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, harness = make(checkpoint, drafts=False), make(checkpoint, drafts=True)
    ask(plain)
    seen = noted_drafts(harness, monkeypatch)
    ask(harness)
    assert (harness.tokens, harness.finish, harness.logprobs) == (plain.tokens, plain.finish, plain.logprobs)
    assert len(seen) > 30
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    layer = Reference(model, load_file(checkpoint / "model.safetensors"))
    for handle, known, tokens in seen[::5]:
        text = [*PROMPTS[handle], *harness.tokens[handle]][:known]
        assert tokens == layer.drafted(text, len(tokens)), f"after {known} tokens of request {handle}"


class Reference:
    """The layer in `transformers`' code, for a whole text at once."""

    def __init__(self, model: Any, tensors: dict[str, Tensor]) -> None:
        self._model, place = model, model.config.num_hidden_layers
        prefix = f"model.layers.{place}."
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        self._w = own
        last = model.model.layers[-1]
        # The same layer with other weights: experts are stacked as in the last layer.
        saved = {name: t for name, t in tensors.items() if f".layers.{place - 1}." not in name}
        renamed = {f"model.layers.{place - 1}.{name}": t for name, t in own.items()}
        state = {**saved, **renamed}
        other = type(model).from_pretrained(None, config=model.config, state_dict=state, dtype=torch.float32)
        self._layer = other.model.layers[-1]
        assert type(self._layer) is type(last)
        self._embedding = own.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())
        self._head = own.get("shared_head.head.weight", model.get_output_embeddings().weight.detach())

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self._model.config.rms_norm_eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self._w[f"{name}.weight"]

    @torch.no_grad()
    def drafted(self, text: list[int], count: int) -> list[int]:
        states = self._model.model(torch.tensor([text])).last_hidden_state[0, :-1]
        tokens, found = list(text[1:]), []
        for _ in range(count):
            both = torch.cat((self._norm(self._embedding[tokens], "enorm"), self._norm(states, "hnorm")), -1)
            x = (both @ self._w["eh_proj.weight"].T)[None]
            positions = torch.arange(1, len(tokens) + 1)[None]
            rotary = self._model.model.rotary_emb(x, positions)
            mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
            out = self._layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
            out = self._norm((out[0] if isinstance(out, tuple) else out)[0, -1], "shared_head.norm")
            found.append(int((out @ self._head.T).argmax()))
            tokens.append(found[-1])
            states = torch.cat((states, out[None]))
        return found


def test_a_checkpoint_without_the_layer_is_refused(tiny_model: Callable[[str], Path]) -> None:
    for family, line in (("glm4-moe", "the checkpoint has no layer"), ("llama2", "has no layer for multi-token")):
        with pytest.raises(WeftError, match=line):
            make(tiny_model(family), drafts=True)


def test_a_damaged_layer_is_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = with_layer(tiny_model("glm4-moe"), tmp_path / "model", own=False)
    tensors = load_file(path / "model.safetensors")
    place = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    name = f"model.layers.{place}.eh_proj.weight"
    save_file(tensors | {name: torch.full_like(tensors[name], torch.nan)}, path / "model.safetensors")
    with pytest.raises(WeftError, match="not finite"):
        make(path, drafts=True)
    save_file({key: t for key, t in tensors.items() if key != name}, path / "model.safetensors")
    with pytest.raises(WeftError, match="has no layer"):
        make(path, drafts=True)
