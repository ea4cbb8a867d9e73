"""`python -m weft.tools.quality MODEL`: what each number format costs a model, on a real text.

Scores the text in every format and prints a table: perplexity, how often the most likely token is float32's, and how
far the text's log-probabilities are from float32's. A format that the device or the model does not support is a row
with the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import numpy as np

from weft.engine.config import EngineConfig
from weft.engine.config.tokenizer import load_tokenizer
from weft.engine.engine import Engine
from weft.engine.errors import WeftError, one_line
from weft.engine.model.hub import find_model
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "device": "cpu", "quantization": "none"},
    "packed": {"dtype": "float32", "device": "cpu"},
    "bf16": {"dtype": "bfloat16", "quantization": "none"},
    "FP8 weights": {"dtype": "bfloat16", "quantization": "fp8"},
    "FP8 KV": {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "fp8"},
    "FP8 weights and KV": {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"},
}
"""Engine options of each format. The first is the reference, which no GPU serves. "packed" is what a CPU serves from a
checkpoint in 4 or 8 bits: its codes, with activations in int8."""


class Scores(NamedTuple):
    """What a model says of each token of a text after the first of its window."""

    logprobs: np.ndarray
    best: np.ndarray  # The most likely token.

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.logprobs.mean()))


def documentation() -> str:
    """Return Python's own documentation of the language, a text that every Python has."""
    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def windows_of(model: Path, text: str, tokens: int, window: int) -> list[list[int]]:
    """Return the first `tokens` tokens of a text, cut into windows that are scored alone."""
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(text, add_special_tokens=False)[:tokens]
    begin: list[int] = tokenizer.encode("")  # what the model expects before any text
    size = window - len(begin)
    return [begin + ids[at : at + size] for at in range(0, len(ids) - 1, size)]


def scores(model: Path, windows: Sequence[Sequence[int]], options: dict[str, Any]) -> Scores:
    """Score the windows with an engine of these options. Raises `WeftError`."""
    length = max(map(len, windows)) + 1
    pages: dict[str, Any] = {"num_pages": 4 * -(-length // 64) + 4, "page_size": 64, "tuning_seconds": 0}
    engine = Engine(EngineConfig(model=str(model), max_model_len=length, prefix_caching=False, **pages, **options))
    try:
        params = SamplingParams(max_tokens=0, prompt_logprobs=1, temperature=0.0)
        for handle, ids in enumerate(windows):
            prompt = np.asarray(ids, np.int32).tobytes()
            engine.add(AddRequest(handle=handle, prompt_token_ids=prompt, params=params))
        found: list[list[Any]] = [[] for _ in windows]
        while engine.has_work:
            outputs = engine.step()
            for handle, entries in (outputs.prompt_logprobs if outputs is not None else {}).items():
                found[handle] += entries
    finally:
        engine.close()
    entries = [entry for window in found for entry in window]
    return Scores(np.array([e.values[0] for e in entries]), np.array([e.ids[1] for e in entries]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns 1 if no format could be scored."""
    parser = argparse.ArgumentParser(prog="python -m weft.tools.quality", description=__doc__)
    parser.add_argument("model", help="a model directory, a GGUF file, or ORG/NAME")
    parser.add_argument("--text", type=Path, help="file with the text [Python's documentation]")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text to score [4096]")
    parser.add_argument("--window", type=int, default=512, help="tokens that the model sees at once [512]")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="formats to score [all]")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args(arguments)
    model = find_model(given.model)
    text = given.text.read_text(encoding="utf-8") if given.text is not None else documentation()
    windows = windows_of(model, text, given.tokens, given.window)
    digest = hashlib.sha256(np.concatenate(windows).astype(np.int32).tobytes()).hexdigest()[:12]
    source = given.text if given.text is not None else f"documentation of Python {platform.python_version()}"
    print(f"{sum(map(len, windows))} tokens in windows of {given.window}, {source}, digest {digest}\n")
    print("| format | perplexity | best token is float32's | mean difference of log-probabilities |\n|---|---|---|---|")
    figures: dict[str, dict[str, float | str]] = {}
    reference: Scores | None = None
    for name in dict.fromkeys((next(iter(FORMATS)), *given.formats)):
        try:
            made = scores(model, windows, FORMATS[name])
        except WeftError as error:
            figures[name] = {"error": one_line(error)}
            print(f"| {name} | {one_line(error)} | | |", flush=True)
            continue
        reference = reference or made
        agreement = float((made.best == reference.best).mean())
        difference = float(np.abs(made.logprobs - reference.logprobs).mean())
        figures[name] = {"perplexity": made.perplexity, "agreement": agreement, "difference": difference}
        print(f"| {name} | {made.perplexity:.3f} | {agreement:.2%} | {difference:.4f} |", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"digest": digest, "formats": figures}, indent=2) + "\n")
    return int(all("error" in row for row in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
