"""Log-probabilities in the forms that completions and chat answer with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weft.engine.wire.messages import TokenLogprobs

Name = Callable[[int], str]
"""what a token is called"""

FLOOR = -9999.0
"""JSON has no minus infinity"""


def _best(entry: TokenLogprobs, top: int) -> list[tuple[int, float]]:
    """The `top` best, best first, and the token itself after them when it is not among them."""
    ids, values = entry.ids, entry.values
    best = ids[1 : 1 + top]
    pairs = [*zip(best, values[1:], strict=False)]
    if ids[0] not in best:
        pairs.append((ids[0], values[0]))
    return pairs if min(values) >= FLOOR else [(token_id, max(value, FLOOR)) for token_id, value in pairs]


class CompletionLogprobs:
    """The four parallel arrays of `/v1/completions`, grown token by token."""

    def __init__(self, name: Name, top: int) -> None:
        self._name = name
        self._top = top
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, token_id: int, entry: TokenLogprobs | None, offset: int) -> None:
        """`entry` is None for the first token of a prompt, which nothing predicts."""
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
            top.setdefault(name(other), value)  # best first: the better of two tokens with one text stays
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
    """The `logprobs` object of a chat choice: `top` alternatives for each token, none for `top` 0. `data`: a token's
    bytes."""

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
