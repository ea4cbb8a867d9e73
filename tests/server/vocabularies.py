"""Small tokenizers of the kinds that models ship, built in place."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
MERGES = ("h e", "l l", "he ll", "hell o", "w o", "Ġ wo", "r l", "Ġwo rl", "Ġworl d", "Ã ©", "ð Ł", "ðŁ ĺ", "o u")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|tool|>{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('tools are not understood') }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level(*, adds_bos: bool = False) -> Tokenizer:
    """GPT-2 style: any bytes can be encoded."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [tuple(merge.split()) for merge in MERGES]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("né e", special=False)])
    if adds_bos:
        bos = ("<|bos|>", tokenizer.token_to_id("<|bos|>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    return tokenizer


def sentencepiece(*, strip: bool = True) -> Tokenizer:
    """Llama 2 style: words with ▁ for spaces, bytes as a fallback, a dummy space at the beginning."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", *"abcdehlorw", "é", "ll", "▁h", "▁w", "▁a", "▁▁"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("l", "l"), ("▁", "h"), ("▁", "w"), ("▁", "a"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram style: a decoder without its own bytes."""
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT style: spaces between words are not tokens at all."""
    names = ["[UNK]", "[CLS]", "hello", "world", "##s", "##ly", "new", "!"]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("[CLS]", special=True)])
    return tokenizer


def wrapped(tokenizer: Tokenizer, *, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    names = {}
    if tokenizer.token_to_id("<|bos|>") is not None:
        names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names)


def save(tokenizer: Tokenizer, path: Path) -> Path:
    wrapped(tokenizer).save_pretrained(path)
    return path
