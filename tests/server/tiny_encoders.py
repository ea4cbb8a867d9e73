"""Tiny random encoders with tokenizers of their own, and `transformers` as the oracle for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = [
    "a", "cat", "dog", "the", "stock", "market", "fell", "rose", "paris", "is", "in", "france", "berlin", "germany",
    "capital", "of", "what", "how", "many",
]  # fmt: skip
SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "initializer_range": 0.4,
}  # fmt: skip


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of words with the special tokens of a kind of model."""
    first, last = ("<s>", "</s>") if kind == "xlm-roberta" else ("[CLS]", "[SEP]")
    special = [first, "<pad>", last, "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *WORDS, *"bcdefgh.?,"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    middle, second = (f"{last} {last}", 0) if kind == "xlm-roberta" else (last, 1 if kind == "bert" else 0)
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {middle} $B:{second} {last}:{second}",
        special_tokens=[(first, 0), (last, 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        cls_token=first,
        sep_token=last,
        pad_token="<pad>",
        unk_token="<unk>",
        model_input_names=["input_ids", *(["token_type_ids"] if kind == "bert" else []), "attention_mask"],
    )


def save(kind: str, path: Path, *, labels: int = 0, **more: Any) -> Path:
    """Write a tiny model. labels: classes of its head; 0: no head."""
    words = tokenizer(kind)
    ids = {"vocab_size": len(words), "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0}
    if labels:
        ids["num_labels"] = labels
    config = transformers.AutoConfig.for_model(kind, **SHAPE, **ids, sep_token_id=2, **more)
    auto = transformers.AutoModelForSequenceClassification if labels else transformers.AutoModel
    torch.manual_seed(labels)
    auto.from_config(config).save_pretrained(path)
    words.save_pretrained(path)
    return path


class Oracle:
    """`transformers` on one text or pair at a time, without padding."""

    def __init__(self, path: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(path)
        headed = config.architectures[0].endswith("ForSequenceClassification")
        auto = transformers.AutoModelForSequenceClassification if headed else transformers.AutoModel
        self.model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        self.tokenizer.backend_tokenizer.no_truncation()
        self.tokenizer.backend_tokenizer.no_padding()

    def __call__(self, *texts: str, most: int | None = None) -> Any:
        """The output for a text or a pair. most: tokens, with the last one kept."""
        found = self.tokenizer.backend_tokenizer.encode(*texts)
        ids, types = found.ids, found.type_ids
        if most is not None and len(ids) > most:
            ids, types = [*ids[: most - 1], ids[-1]], types[:most]
        given = {"input_ids": torch.tensor([ids])}
        if getattr(self.model.config, "type_vocab_size", 0) > 1:
            given["token_type_ids"] = torch.tensor([types])
        with torch.inference_mode():
            return self.model(**given)

    def states(self, text: str, most: int | None = None) -> torch.Tensor:
        """`[T, H]`."""
        states: torch.Tensor = self(text, most=most).last_hidden_state[0]
        return states

    def logits(self, *texts: str) -> torch.Tensor:
        """`[labels]`."""
        logits: torch.Tensor = self(*texts).logits[0]
        return logits
