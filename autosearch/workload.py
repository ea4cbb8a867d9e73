"""Workloads: the lengths of their requests, and the load of an iteration in their steady state."""

from __future__ import annotations

import json
from pathlib import Path

from weft.autosearch.bench_protocol import Load
from weft.engine.errors import ConfigError

LONGEST = 2**27  # Most tokens of a prompt or an output.
MOST_REQUESTS = 1_000_000

Lengths = list[tuple[int, int]]  # Prompt and output tokens of each request.


def steady_load(lengths: Lengths, tokens: int, max_num_seqs: int = 1024) -> Load:
    """Return the iteration of a steady state: d of every p + d tokens are decodes (NanoFlow §3.1).

    A decode reads its prompt and its output so far. The mean prompt is weighted by tokens. Raises `ConfigError`."""
    if tokens < 1:
        raise ConfigError(f"--tokens {tokens}: must be at least 1")
    if max_num_seqs < 1:
        raise ConfigError(f"--max-num-seqs {max_num_seqs}: must be at least 1")
    prompts, outputs = sum(p for p, _ in lengths), sum(d for _, d in lengths)
    context = sum(d * (p + d / 2) for p, d in lengths) / outputs
    prompt = sum(p * p for p, _ in lengths) / prompts
    decodes = round(tokens * outputs / (prompts + outputs))
    return Load(tokens, max(0, min(decodes, max_num_seqs)), max(1, round(context)), max(1, round(prompt)))


def workload_load(workload: str, tokens: int, max_num_seqs: int = 1024, lengths: Path | None = None) -> Load:
    """Return the load of `--workload P:D` or `--lengths FILE`. Raises `ConfigError`."""
    if lengths is not None:
        return steady_load(read_lengths("", lengths, 0), tokens, max_num_seqs)
    return steady_load([workload_pair(workload)], tokens, max_num_seqs)


def workload_pair(workload: str) -> tuple[int, int]:
    """Parse `P:D` into (prompt tokens, output tokens). Raises `ConfigError`."""
    try:
        prompt, output = map(int, workload.split(":"))
    except ValueError:
        prompt = output = 0
    if not (1 <= prompt <= LONGEST and 1 <= output <= LONGEST):
        raise ConfigError(f"--workload {workload!r} must be PROMPT:OUTPUT, two numbers of tokens from 1 to {LONGEST}")
    return prompt, output


def read_lengths(workload: str, file: Path | None, seed: int) -> Lengths:
    """Return the requests of `file`, or of a synthetic `workload`. Raises `ConfigError`."""
    if file is not None:
        try:
            pairs = [(int(a), int(b)) for a, b in json.loads(file.read_text())]
        except OSError as error:
            raise ConfigError(f"cannot read --lengths {file}: {error.strerror}") from None
        except (ValueError, TypeError):
            raise ConfigError(f"--lengths {file} must be a JSON list of [input, output] pairs") from None
    else:
        try:
            pairs = _synthetic(workload, seed)
        except ValueError:
            raise ConfigError(
                f"--workload {workload!r} is neither IN:OUT:REQUESTS "
                "nor lognormal:IN_MEAN:IN_SD:OUT_MEAN:OUT_SD:REQUESTS"
            ) from None
    if not pairs or any(a < 1 or b < 1 for a, b in pairs):
        raise ConfigError("a workload needs at least one request, and at least one token in and out for each")
    if any(a > LONGEST or b > LONGEST for a, b in pairs):
        raise ConfigError(f"a request of a workload has at most {LONGEST} tokens in and out")
    return pairs


def _bounded(count: int) -> int:
    if count > MOST_REQUESTS:
        raise ConfigError(f"--workload has {count} requests; the most is {MOST_REQUESTS}")
    return count


def _synthetic(workload: str, seed: int) -> Lengths:
    parts = workload.split(":")
    if parts[0] != "lognormal":
        inputs, outputs, count = map(int, parts)
        return [(inputs, outputs)] * _bounded(count)
    in_mean, in_sd, out_mean, out_sd = map(float, parts[1:5])
    (count,) = (_bounded(int(part)) for part in parts[5:])
    import numpy as np

    rng = np.random.default_rng(seed)
    columns = []
    for mean, sd in ((in_mean, in_sd), (out_mean, out_sd)):
        variance = np.log1p((sd / mean) ** 2)
        draw = rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), count)
        columns.append(np.maximum(draw.round().astype(int), 1))
    return list(zip(columns[0].tolist(), columns[1].tolist(), strict=True))
