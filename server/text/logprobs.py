"""Log-probabilities in the formats of completions and chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from weft.engine.wire.messages import TokenLogprobs

Name = Callable[[int], str]  # names a token

FLOOR = -9999.0  # stands for minus infinity, which JSON lacks


def _best(entry: TokenLogprobs, top: int, *, own: bool = True) -> list[tuple[int, float]]:
    """The `top` best (or requested) tokens, best first; with `own`, followed by the token if it is not among them."""
    ids, values = entry.ids, entry.values
    best = ids[1 : 1 + top]
    pairs = [*zip(best, values[1:], strict=False)]
    if own and ids[0] not in best:
        pairs.append((ids[0], values[0]))
    return pairs if min(values) >= FLOOR else [(token_id, max(value, FLOOR)) for token_id, value in pairs]


def completion_logprobs(
    name: Name, tokens: Iterable[tuple[int, TokenLogprobs | None, int]], top: int
) -> dict[str, list[Any]]:
    """The four parallel arrays of `/v1/completions`, with `top` alternatives per token. `tokens`: id, entry and text
    offset. The entry of a prompt's first token, which has no prediction, is None."""
    out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, entry, offset in tokens:
        best: dict[str, float] = {}
        for other, value in _best(entry, top) if entry is not None else ():
            best.setdefault(name(other), value)  # best first, so the better of two tokens with the same text stays
        out["tokens"].append(name(token_id))
        out["token_logprobs"].append(None if entry is None else max(entry.values[0], FLOOR))
        out["top_logprobs"].append(None if entry is None else best)
        out["text_offset"].append(offset)
    return out


def chat_logprobs(
    name: Name, data: Callable[[int], bytes], entries: Sequence[TokenLogprobs], top: int, *, own: bool = False
) -> dict[str, Any]:
    """The `logprobs` object of a chat choice, with at most `top` alternatives per token. `data`: the bytes of a token.
    `own`: the token itself is always among them."""

    def shown(token_id: int, value: float) -> dict[str, Any]:
        return {"token": name(token_id), "logprob": value, "bytes": list(data(token_id))}

    content = []
    for entry in entries:
        others = [shown(token_id, value) for token_id, value in _best(entry, top, own=own)] if top else []
        content.append({**shown(entry.ids[0], max(entry.values[0], FLOOR)), "top_logprobs": others})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    name: Name, entries: Sequence[TokenLogprobs], top: int | None
) -> list[dict[str, Any] | None] | None:
    """The `prompt_logprobs` extension: null for the first prompt token, then alternatives by token id."""
    if top is None:
        return None
    out: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranks = {token_id: rank for rank, token_id in enumerate(entry.ids[1:], start=1)} | {entry.ids[0]: entry.rank}
        best = _best(entry, top)
        out.append({str(t): {"logprob": value, "rank": ranks[t], "decoded_token": name(t)} for t, value in best})
    return out
