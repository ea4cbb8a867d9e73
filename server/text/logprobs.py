"""Log-probabilities in the formats of completions and chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weft.engine.wire.messages import TokenLogprobs

Name = Callable[[int], str]
"""Names a token."""

FLOOR = -9999.0
"""Stands for minus infinity, which JSON lacks."""


def _best(entry: TokenLogprobs, top: int) -> list[tuple[int, float]]:
    """The `top` best tokens, best first, followed by the token itself if it is not among them."""
    ids, values = entry.ids, entry.values
    best = ids[1 : 1 + top]
    pairs = [*zip(best, values[1:], strict=False)]
    if ids[0] not in best:
        pairs.append((ids[0], values[0]))
    return pairs if min(values) >= FLOOR else [(token_id, max(value, FLOOR)) for token_id, value in pairs]


class CompletionLogprobs:
    """The four parallel arrays of `/v1/completions`, built token by token."""

    def __init__(self, name: Name, top: int) -> None:
        self._name = name
        self._top = top
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, token_id: int, entry: TokenLogprobs | None, offset: int) -> None:
        """`entry` is None for the first token of a prompt, which has no prediction."""
        name = self._name
        self.tokens.append(name(token_id))
        self.text_offset.append(offset)
        if entry is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(max(entry.values[0], FLOOR))
        top: dict[str, float] = {}
        for other, value in _best(entry, self._top):
            top.setdefault(name(other), value)  # best first, so the better of two tokens with the same text stays
        self.top_logprobs.append(top)

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def chat_logprobs(
    name: Name, data: Callable[[int], bytes], entries: Sequence[TokenLogprobs], top: int
) -> dict[str, Any]:
    """The `logprobs` object of a chat choice, with `top` alternatives per token. `data`: the bytes of a token."""

    def shown(token_id: int, value: float) -> dict[str, Any]:
        return {"token": name(token_id), "logprob": value, "bytes": list(data(token_id))}

    return {
        "content": [
            {
                **shown(entry.ids[0], max(entry.values[0], FLOOR)),
                "top_logprobs": [shown(token_id, value) for token_id, value in _best(entry, top)] if top else [],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(name: Name, entries: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` extension: null for the first prompt token, then alternatives by token id."""
    out: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranks = {token_id: rank for rank, token_id in enumerate(entry.ids[1:], start=1)}
        out.append(
            {
                str(token_id): {
                    "logprob": value,
                    "rank": entry.rank if token_id == entry.ids[0] else ranks[token_id],
                    "decoded_token": name(token_id),
                }
                for token_id, value in _best(entry, top)
            }
        )
    return out
