"""What a workload means for an iteration."""

from __future__ import annotations

from pathlib import Path

from weft.autosearch.bench_protocol import Load
from weft.engine.bench.options import Lengths, read_lengths
from weft.engine.errors import ConfigError


def steady_load(lengths: Lengths, tokens: int, max_num_seqs: int = 1024) -> Load:
    """The iteration of a steady state: of every p + d tokens of work d are decodes (NanoFlow §3.1).

    Every decode step of a request sees its prompt and what it has answered so far; prompts count by their tokens.
    Raises `ConfigError` when the dense batch is too small to split.
    """
    if tokens < 1:
        raise ConfigError(f"--tokens {tokens}: the dense batch must have at least one token")
    if max_num_seqs < 1:
        raise ConfigError(f"--max-num-seqs {max_num_seqs}: at least one request must run")
    prompts, outputs = sum(p for p, _ in lengths), sum(d for _, d in lengths)
    context = sum(d * (p + d / 2) for p, d in lengths) / outputs
    prompt = sum(p * p for p, _ in lengths) / prompts
    decodes = round(tokens * outputs / (prompts + outputs))
    return Load(tokens, max(0, min(decodes, max_num_seqs)), max(1, round(context)), max(1, round(prompt)))


def workload_load(
    workload: str, tokens: int, max_num_seqs: int = 1024, lengths: Path | None = None
) -> Load:  # fmt: skip
    """The load of `--workload P:D` or of `--lengths FILE`. Raises `ConfigError`, one line."""
    if lengths is not None:
        return steady_load(read_lengths("", lengths, 0), tokens, max_num_seqs)
    return steady_load([workload_pair(workload)], tokens, max_num_seqs)


def workload_pair(workload: str) -> tuple[int, int]:
    """(prompt tokens, output tokens) of `P:D`. Raises `ConfigError`, one line."""
    try:
        prompt, output = map(int, workload.split(":"))
    except ValueError:
        prompt = output = 0
    if prompt < 1 or output < 1:
        raise ConfigError(f"--workload {workload!r} must be PROMPT:OUTPUT, two positive numbers of tokens")
    return prompt, output
