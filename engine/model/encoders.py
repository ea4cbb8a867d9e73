"""`EncoderSpec`: an encoder-only model (BERT, XLM-R, ModernBERT, …) that `transformers`' code computes.

This module does not import torch before a model is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.engine.errors import ConfigError, ModelError, one_line
from weft.engine.model.directory import read_config
from weft.engine.model.transformers_impl.decoders import architecture, classes

if TYPE_CHECKING:
    from weft.engine.config import EngineConfig

CLASSIFIER = "ForSequenceClassification"
SENTENCE_CONFIG = "sentence_bert_config.json"
GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "WithLMHead")
UNSET_LENGTH = 10**9  # Tokenizers without a limit state an enormous one.


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Shapes of an encoder, from its configuration and its code."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    positions: int  # Tokens that its table of positions allows.
    max_tokens: int  # Tokens that it was made for; at most `positions`.
    dtype: str  # Dtype of the checkpoint.
    num_parameters: int
    labels: tuple[str, ...]  # Names of the classes; empty without a classification head.
    config: Any  # `transformers`' configuration.

    @property
    def classifies(self) -> bool:
        return bool(self.labels)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the model can do, in vLLM's words."""
        if not self.classifies:
            return ("embed",)
        return ("classify", "score") if len(self.labels) == 1 else ("classify",)


def is_encoder(raw: dict[str, Any]) -> bool:
    """Return whether a `config.json` is that of an encoder: its type has a masked language model."""
    if architecture(raw).endswith(GENERATING):
        return False
    kind = raw.get("model_type")
    if kind not in classes("MODEL_FOR_MASKED_LM_MAPPING_NAMES") or raw.get("is_encoder_decoder"):
        return False
    return not raw.get("is_decoder")


def serves_encoder(config: EngineConfig) -> bool:
    """Return whether the configured model is an encoder. Raises `ModelError` if its `config.json` cannot be read, and
    `ConfigError` for an option that encoders do not have."""
    if config.model_preset is not None or not is_encoder(raw := read_config(config.model_path)):
        return False
    if raw.get("quantization_config"):
        raise ModelError(f"{architecture(raw)} is quantized: encoders are served only in bf16, fp16 and fp32")
    conflicts = {
        "--tensor-parallel-size": config.tensor_parallel_size > 1,
        "--quantization": config.quantization == "fp8",
        "--model-impl native": config.model_impl == "native",
        "--batch-invariant": config.batch_invariant,
        "--load-format dummy": config.load_format == "dummy",
    }
    if option := next((option for option, is_set in conflicts.items() if is_set), None):
        raise ConfigError(f"{option} does not work with an encoder ({config.model_name}): leave it out")
    return True


def read_encoder(path: Path) -> EncoderSpec:
    """Read an encoder's directory, without its weights. Raises `ModelError`, one line."""
    import torch
    from torch import nn

    from weft.engine.model.transformers_impl.reading import quiet

    raw = read_config(path)
    with quiet():
        try:
            config, module = _built(
                path, classifies=architecture(raw).endswith(CLASSIFIER), device=torch.device("meta")
            )
        except Exception as error:  # model code raises anything
            raise ModelError(f"transformers cannot build {architecture(raw)}: {one_line(error)}") from None
    tables = [part for name, part in module.named_modules() if name.endswith("position_embeddings")]
    table = next((part for part in tables if isinstance(part, nn.Embedding)), None)
    positions = int(getattr(config, "max_position_embeddings", 0) or UNSET_LENGTH)
    if table is not None and table.padding_idx is not None:
        positions = table.num_embeddings - table.padding_idx - 1  # RoBERTa's positions begin after the padding id
    labels = config.id2label if architecture(raw).endswith(CLASSIFIER) else {}
    return EncoderSpec(
        architecture=architecture(raw),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        positions=positions,
        max_tokens=min(positions, _stated_length(path)),
        dtype=str(getattr(config, "dtype", None) or "float32").removeprefix("torch."),
        num_parameters=sum(p.numel() for p in module.parameters()),
        labels=tuple(str(labels[i]) for i in sorted(labels)),
        config=config,
    )


def load_encoder(spec: EncoderSpec, path: Path, device: Any, dtype: Any) -> Any:
    """Load the model with `transformers`' own loader.

    Raises `ModelError` for missing weights and values that are not finite. Prints one line about unused tensors."""
    from weft.engine.model.finite import FiniteCheck
    from weft.engine.model.transformers_impl.reading import quiet
    from weft.engine.model.weights import HARMLESS, warn_of_surplus

    with quiet():
        try:
            module, info = _auto(spec.classifies).from_pretrained(path, dtype=dtype, output_loading_info=True)
        except Exception as error:  # the loader fails in many ways
            raise ModelError(f"transformers cannot load the weights in {path}: {one_line(error)}") from None
    unused = "pooler." if not spec.classifies else None  # a pooler that no checkpoint of embeddings needs
    missing = sorted(name for name in info["missing_keys"] if unused is None or not name.startswith(unused))
    if missing:
        raise ModelError(f"{path} has no tensor {', '.join(missing[:3])}, which config.json requires")
    if wrong := sorted(info["mismatched_keys"]):
        raise ModelError(f"{wrong[0][0]} has shape {tuple(wrong[0][1])}, config.json requires {tuple(wrong[0][2])}")
    surplus = [name for name in info["unexpected_keys"] if not name.endswith(HARMLESS) and not _of_training(name)]
    warn_of_surplus(sorted(surplus))
    if not spec.classifies and getattr(module, "pooler", None) is not None:
        module.pooler = None
    module = module.to(device).eval().requires_grad_(False)
    finite = FiniteCheck()
    for name, tensor in module.named_parameters():
        tensor.data = tensor.data.clone()  # the loader may return the mapped file, which others may overwrite
        finite.add(name, tensor)
    finite.end(dtype)
    return module


def _of_training(name: str) -> bool:
    """Return whether a tensor is part of a head for pre-training, or a pooler."""
    return name.startswith(("cls.", "lm_head.", "head.", "decoder.", "pooler.")) or ".pooler." in name


def _auto(classifies: bool) -> Any:
    from transformers import AutoModel, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if classifies else AutoModel


def _built(path: Path, *, classifies: bool, device: Any) -> tuple[Any, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    with device:
        return config, _auto(classifies).from_config(config)


def _stated_length(path: Path) -> int:
    """Return the longest input in tokens according to sentence-transformers' file, else the tokenizer's."""
    for name, key in ((SENTENCE_CONFIG, "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        try:
            value = json.loads((path / name).read_text(encoding="utf-8")).get(key)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{path / name} cannot be read: {one_line(error)}") from None
        if isinstance(value, int) and value > 0:
            return value
    return UNSET_LENGTH
