"""Log-probabilities in the forms that completions and chat answer with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.engine.messages import TokenLogprobs
from weft.server.tokenizer import Tokenizer, spell

FLOOR = -9999.0
"""JSON has no minus infinity"""


def _best(entry: TokenLogprobs, top: int) -> list[tuple[int, float]]:
    """The `top` best, best first, and the token itself after them when it is not among them."""
    ids = entry.ids[1 : 1 + top]
    pairs = [(i, max(v, FLOOR)) for i, v in zip(ids, entry.values[1 : 1 + top], strict=True)]
    if entry.ids[0] not in ids:
        pairs.append((entry.ids[0], max(entry.values[0], FLOOR)))
    return pairs


class CompletionLogprobs:
    """The four parallel arrays of `/v1/completions`, grown token by token."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, token_id: int, entry: TokenLogprobs | None, offset: int) -> None:
        """`entry` is None for the first token of a prompt, which nothing predicts."""
        text = self._tokenizer.token_text
        self.tokens.append(text(token_id))
        self.text_offset.append(offset)
        if entry is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(max(entry.values[0], FLOOR))
        top: dict[str, float] = {}
        for other, value in _best(entry, self._top):
            top.setdefault(text(other), value)  # best first: the better of two tokens with one text stays
        self.top_logprobs.append(top)

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """The `logprobs` object of a chat choice: `top` alternatives for each token, none for `top` 0."""

    def shown(token_id: int, value: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": spell(data), "logprob": max(value, FLOOR), "bytes": list(data)}

    return {
        "content": [
            {
                **shown(entry.ids[0], entry.values[0]),
                "top_logprobs": [shown(token_id, value) for token_id, value in _best(entry, top)] if top else [],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` extension: null for the first prompt token, then alternatives by token id."""
    out: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranks = {token_id: rank for rank, token_id in enumerate(entry.ids[1:], start=1)}
        out.append(
            {
                str(token_id): {
                    "logprob": value,
                    "rank": entry.rank if token_id == entry.ids[0] else ranks[token_id],
                    "decoded_token": tokenizer.token_text(token_id),
                }
                for token_id, value in _best(entry, top)
            }
        )
    return out
