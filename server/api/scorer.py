"""`Scorer`: how a model scores pairs of texts or classifies a text, read from its directory without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from weft.engine.errors import ModelError
from weft.engine.wire.messages import EngineReady
from weft.engine.wire.sampling import Pooling
from weft.server.errors import clip

if TYPE_CHECKING:
    from weft.server.text.tokenizer import Tokenizer

CLASSIFIER = "ForSequenceClassification"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
QWEN3 = (
    f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n"
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of Qwen3-Reranker, from its model card."""
_ROLES = [re.compile(rf"""['"]{role}['"]""") for role in ("query", "document")]


@dataclass(frozen=True, slots=True)
class Scorer:
    """Turns what the engine returns for a text or pair into logits of classes or a score."""

    pooling: Pooling
    labels: tuple[str, ...] = ()  # classes; one for a score
    weight: npt.NDArray[np.float32] | None = None
    """`[labels, H]`, applied to a decoder's state. None: the engine returns logits, or states to compare."""
    bias: npt.NDArray[np.float32] | None = None
    activation: Literal["sigmoid", "softmax", "cosine"] = "sigmoid"
    """`cosine`: an embedder; a pair's score is the cosine of its texts' embeddings, which are computed separately."""
    prompt: str = "pair"
    """How a pair becomes a prompt: by the tokenizer (`pair`), by a chat template with the roles query and document
    (`template`), or by this format string."""

    def logits(self, state: bytes) -> npt.NDArray[np.float64]:
        """`[labels]`."""
        values = np.frombuffer(state, np.float32).astype(np.float64)
        if self.weight is not None:
            values = self.weight.astype(np.float64) @ values
        return values if self.bias is None else values + self.bias

    def probabilities(self, state: bytes, *, activate: bool = True) -> npt.NDArray[np.float64]:
        """`[labels]`: the logits with the model's activation."""
        values = self.logits(state)
        if not activate:
            return values
        if self.activation == "softmax":
            values = np.exp(values - values.max())
            return values / values.sum()
        return 1 / (1 + np.exp(-values))


def tasks_of(ready: EngineReady, path: Path, tokens: Sequence[str] = ()) -> tuple[str, ...]:
    """What the model can do, in vLLM's words. tokens: --classifier-from-token."""
    if "generate" not in ready.tasks:
        return (*ready.tasks, "score") if ready.tasks == ("embed",) else ready.tasks
    with suppress(ModelError):  # a directory that changed since the engine read it
        config = _json(path / "config.json")
        if _architecture(config).endswith(CLASSIFIER):
            return ("classify", "score") if _num_labels(config) == 1 else ("classify",)
        if tokens or _answer_tokens(config, path) is not None:
            return (*ready.tasks, "score")
    return ready.tasks


def read_scorer(path: Path, ready: EngineReady, tokenizer: Tokenizer, tokens: Sequence[str] = ()) -> Scorer:
    """Read the scorer of a model that classifies or scores. tokens: --classifier-from-token. Raises `ModelError`."""
    config = _json(path / "config.json")
    if "generate" not in ready.tasks:
        if not ready.labels:
            return Scorer("mean", activation="cosine")
        return Scorer("head", ready.labels, activation=_activation(config, len(ready.labels)))
    template = tokenizer.chat_template or ""
    in_roles = all(role.search(template) for role in _ROLES)
    if _architecture(config).endswith(CLASSIFIER):
        weight, bias = read_rows(path, "score.weight"), read_rows(path, "score.bias")
        if weight is None:
            raise ModelError("its checkpoint has no score.weight")
        names = config.get("id2label") or {}
        labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(len(weight)))
        activation = _activation(config, len(weight))
        return Scorer("last", labels, weight, bias, activation, "template" if in_roles else "pair")
    no, yes = _answer_ids(config, path, tokenizer, tokens)
    rows = next((r for name in HEADS if (r := read_rows(path, name, [no, yes])) is not None), None)
    if rows is None:
        raise ModelError("its checkpoint has no output head to read")
    return Scorer("last", ("yes",), rows[1:] - rows[:1], prompt="template" if in_roles else QWEN3)


HEADS = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
"""Names of the output head; tied models have only the embedding."""


def _architecture(config: dict[str, Any]) -> str:
    return str((config.get("architectures") or ["(none)"])[0])


def _num_labels(config: dict[str, Any]) -> int:
    return len(config.get("id2label") or {}) or int(config.get("num_labels") or 2)


def _activation(config: dict[str, Any], labels: int) -> Literal["sigmoid", "softmax"]:
    several = labels > 1 and config.get("problem_type") != "multi_label_classification"
    return "softmax" if several else "sigmoid"


def _answer_tokens(config: dict[str, Any], path: Path) -> list[str] | dict[str, int] | None:
    """The tokens that a reranker answers with: vLLM's field in `config.json`, or sentence-transformers' module."""
    found = config.get("classifier_from_token")
    if isinstance(found, list) and len(found) == 2:
        return [str(token) for token in found]
    modules = _json(path / "modules.json") if (path / "modules.json").is_file() else []
    for module in modules if isinstance(modules, list) else ():
        if str(module.get("type", "")).endswith(".LogitScore"):
            ids: dict[str, int] = _json(path / str(module.get("path", "")) / "config.json")
            return ids
    return None


def _answer_ids(config: dict[str, Any], path: Path, tokenizer: Tokenizer, tokens: Sequence[str]) -> tuple[int, int]:
    found = list(tokens) or _answer_tokens(config, path)
    if isinstance(found, dict):
        no, yes = found.get("false_token_id"), found.get("true_token_id")
    else:
        no, yes = map(tokenizer.token_id, found or ("no", "yes"))
    if no is None or yes is None:
        raise ModelError(f"its vocabulary lacks the tokens that it is to answer with ({clip(repr(found))})")
    return int(no), int(yes)


def _json(path: Path) -> Any:
    """Raises `ModelError`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {clip(str(error))}") from None


_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def read_rows(path: Path, name: str, rows: Sequence[int] | None = None) -> npt.NDArray[np.float32] | None:
    """Rows of a tensor of a safetensors checkpoint, all by default; None if it has no such tensor.

    Raises `ModelError`."""
    index = path / "model.safetensors.index.json"
    file = _json(index)["weight_map"].get(name) if index.is_file() else "model.safetensors"
    if file is None or not (path / str(file)).is_file():
        return None
    try:
        with (path / str(file)).open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            entry = json.loads(stream.read(size)).get(name)
            if entry is None:
                return None
            dtype = np.dtype(_DTYPES[entry["dtype"]])
            values = np.memmap(stream, dtype, "r", 8 + size + entry["data_offsets"][0], tuple(entry["shape"]))
            kept = np.array(values if rows is None else values[list(rows)])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{name} in {file} cannot be read: {clip(str(error))}") from None
    if entry["dtype"] == "BF16":
        return (kept.astype(np.uint32) << 16).view(np.float32)
    return kept.astype(np.float32)
