"""The exact bytes of each token id, derived from a tokenizer's vocabulary and decoder."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer


def _byte_alphabet() -> dict[str, int]:
    """The byte of each printable character of byte-level BPE (GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


class TokenBytes(dict[int, bytes]):
    """Token id to bytes, filled on access. The concatenated bytes, read as UTF-8, are the decoded text. `strips_space`:
    the decoder drops one space at the beginning of a text (sentencepiece's dummy prefix)."""

    def __init__(self, tokenizer: Tokenizer, *, byte_level: bool, replace: dict[str, str], strips_space: bool) -> None:
        super().__init__()
        self._tokenizer, self._byte_level = tokenizer, byte_level
        self._replace, self.strips_space = replace, strips_space
        self.names_unknown = False  # render ids outside the vocabulary as `<id>` instead of nothing

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenBytes | None:
        """The bytes of a tokenizer's tokens; None if its decoder does not map single tokens to bytes."""
        if tokenizer.decoder is None:
            return None
        steps = _flatten(json.loads(tokenizer.decoder.__getstate__()))
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(tokenizer, byte_level=True, replace={}, strips_space=False)
        strips = kinds[-1:] == ["Strip"] and kinds[-2:-1] == ["Fuse"]
        if strips and (steps[-1]["content"], steps[-1]["start"], steps[-1]["stop"]) != (" ", 1, 0):
            return None
        body = steps[: -1 if strips else None]
        if "ByteFallback" not in kinds or {step["type"] for step in body} - {"Replace", "ByteFallback", "Fuse"}:
            return None
        replace: dict[str, str] = {}
        for step in body:
            if step["type"] == "Replace":
                if "String" not in step["pattern"]:
                    return None
                replace[step["pattern"]["String"]] = step["content"]
        return cls(tokenizer, byte_level=False, replace=replace, strips_space=strips)

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        unknown = f"<{token_id}>".encode() if self.names_unknown else b""
        value = self[token_id] = unknown if token is None else self._bytes(token)
        return value

    def _bytes(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token, written as plain text
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for pattern, content in self._replace.items():
            token = token.replace(pattern, content)
        return token.encode()


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]
