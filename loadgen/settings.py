"""Converts flags to checked options; every `LoadError` names the flag to change."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from weft.loadgen import lengths, slo
from weft.loadgen.arrivals import Process
from weft.loadgen.client import Target
from weft.loadgen.connection import Address
from weft.loadgen.errors import LoadError
from weft.loadgen.prompts import Kind, PromptMaker, read_prompts
from weft.loadgen.run import RunOptions
from weft.loadgen.sweep import SweepOptions
from weft.loadgen.traces import read_trace
from weft.loadgen.units import number, seconds, whole
from weft.loadgen.workload import INPUT, ONE, OUTPUT, ArrivalOptions, ContentOptions

DEFAULT_SERVER = "http://127.0.0.1:8000"
DEFAULT_DURATION = 60.0


@dataclass(frozen=True)
class Settings:
    """All checked options. `sweep`: None for a single run. `files`: report paths by kind."""

    targets: tuple[Target, ...]
    arrival: ArrivalOptions
    content: ContentOptions
    maker: PromptMaker
    max_context: int | None
    run: RunOptions
    sweep: SweepOptions | None
    files: dict[str, Path]
    quiet: bool
    row: dict[str, Any] | None = None
    """Fields of rows in InferenceX's format; None: weft's format."""


def read(arguments: argparse.Namespace) -> Settings:
    """Convert parsed flags. Raises `LoadError`."""
    a = arguments
    if a.mode not in ("run", "sweep"):
        raise LoadError(f"{a.mode!r} is neither sweep nor an option; pass servers with --server")
    sweeping = a.mode == "sweep"
    content = read_content(a)
    conversations = content.turns != ONE
    messages = _has_messages(content)
    chat = a.endpoint == "chat" or (a.endpoint is None and (conversations or messages))
    if messages and not chat:
        raise LoadError("--endpoint completions cannot send messages; use --endpoint chat")
    kind: Kind = a.prompts or ("words" if chat or conversations else "ids")
    if kind == "ids" and (chat or conversations):
        raise LoadError(f"--prompts ids does not work with {'--endpoint chat' if chat else '--turns'}; omit it")
    arrival = read_arrival(a, traced=content.trace is not None)
    objectives = tuple(objective for text in a.slo for objective in slo.parse(text))
    if sweeping and not objectives:
        raise LoadError("a sweep needs an objective: --slo nanoflow, or --slo ttft:p99:500ms …")
    if sweeping and arrival.process in ("closed", "ramp"):
        raise LoadError(f"a sweep varies the rate and does not work with {arrival.process} arrivals")
    if sweeping and a.speed is not None:
        raise LoadError("--speed: a sweep sets the trace's rate itself; omit --speed")
    drain = _optional(a.drain, "--drain", seconds)
    if drain is None and sweeping:
        drain = arrival.duration or DEFAULT_DURATION
    options = RunOptions(
        objectives,
        whole(a.processes, "--processes"),
        seconds(a.warmup, "--warmup"),
        drain,
        fraction(a.max_failures, "--max-failures"),
    )
    if arrival.duration is not None and options.warmup >= arrival.duration:
        raise LoadError("--warmup must be shorter than --duration")
    sweep = None
    if sweeping:
        sweep = SweepOptions(
            arrival.rate or 1.0,
            number(a.growth, "--growth", low=1, exclusive=True),
            number(a.precision, "--precision", exclusive=True),
            whole(a.max_runs, "--max-runs"),
        )
    return Settings(
        _targets(a, chat, seconds(a.timeout, "--timeout", exclusive=True)),
        arrival,
        content,
        read_maker(a, kind),
        _optional(a.max_context, "--max-context", lambda text, option: whole(text, option, low=2)),
        options,
        sweep,
        _files(a),
        a.quiet,
        _row(a, arrival, content),
    )


def _row(a: argparse.Namespace, arrival: ArrivalOptions, content: ContentOptions) -> dict[str, Any] | None:
    if a.format != "inferencex":
        if a.row:
            raise LoadError("--row needs --format inferencex")
        return None
    if a.json is None:
        raise LoadError("--format inferencex needs --json FILE")
    fixed = content.input.kind == content.output.kind == "constant"
    if arrival.process != "closed" or not fixed or content.trace is not None or content.prompts or content.pairs:
        raise LoadError("--format inferencex needs --users, and --input and --output with one length each")
    row: dict[str, Any] = {"isl": int(content.input.a), "osl": int(content.output.a)}
    for text in a.row:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise LoadError(f"--row: {text!r} is not FIELD=VALUE")
        row[name] = int(value) if value.isdigit() else value
    if not isinstance(row.get("tp", 1), int) or row.get("tp", 1) < 1:
        raise LoadError(f"--row tp={row['tp']}: must be a number of GPUs")
    return row


def _optional(text: str | None, option: str, parse: Any) -> Any:
    return None if text is None else parse(text, option)


def fraction(text: str, option: str) -> float:
    value = number(text, option)
    if value > 1:
        raise LoadError(f"{option}: {text} must be between 0 and 1")
    return value


def _targets(a: argparse.Namespace, chat: bool, timeout: float) -> tuple[Target, ...]:
    headers = {}
    for text in a.header:
        name, colon, value = text.partition(":")
        if not colon or not name.strip() or "\r" in text or "\n" in text:
            raise LoadError(f"--header: {text!r} is not NAME:VALUE")
        headers[name.strip()] = value.strip()
    extra: dict[str, Any] = {}
    if a.extra is not None:
        try:
            extra = orjson.loads(a.extra)
        except orjson.JSONDecodeError as error:
            raise LoadError(f"--extra is not JSON: {error}") from None
        if not isinstance(extra, dict):
            raise LoadError('--extra must be a JSON object such as {"temperature": 0}')
    api_key = a.api_key or os.environ.get("OPENAI_API_KEY") or None
    targets: list[Target] = []
    for text in a.server or [DEFAULT_SERVER]:
        name, equals, url = text.partition("=")
        if not equals or "/" in name:
            name, url = "", text
        address = Address.parse(url)
        name = name or f"{address.host}:{address.port}"
        if any(target.name == name for target in targets):
            raise LoadError(f"--server: two servers are named {name}; give them names with --server NAME=URL")
        targets.append(Target(name, address, a.model or "", chat, api_key, headers, extra, timeout, not a.eos))
    return tuple(targets)


def read_arrival(a: argparse.Namespace, *, traced: bool) -> ArrivalOptions:
    implied: dict[Process, str | None] = {"closed": a.users, "ramp": a.rate_end, "gamma": a.burstiness}
    given = [process for process, value in implied.items() if value is not None]
    process: Process = a.arrival or (given[0] if given else "poisson")
    flags = {"closed": "--users", "ramp": "--rate-end", "gamma": "--burstiness"}
    for other in given:
        if other != process:
            raise LoadError(f"{flags[other]} does not work with {process} arrivals")
    if process in ("closed", "ramp") and not given:
        raise LoadError(f"--arrival {process} needs {flags[process]}")
    if traced and (a.arrival is not None or given) and process != "closed":
        raise LoadError("--trace sets the arrivals; omit --arrival and its flags")
    if process == "closed" and a.rate is not None:
        raise LoadError("--rate does not work with a closed loop; its users determine the rate")
    if a.speed is not None and (not traced or a.rate is not None):
        raise LoadError("--speed needs --trace, without --rate")
    duration = _optional(a.duration, "--duration", seconds)
    if duration == 0:
        raise LoadError("--duration must be more than 0")
    count = _optional(a.requests, "--requests", whole)
    if duration is None and (process == "ramp" or (count is None and not (traced and process != "closed"))):
        duration = DEFAULT_DURATION
    rate = None if a.rate is None else number(a.rate, "--rate", exclusive=True)
    if rate is None and not traced and process != "closed":
        rate = 1.0
    return ArrivalOptions(
        process,
        rate,
        number(a.rate_end, "--rate-end") if a.rate_end is not None else 1.0,
        number(a.burstiness, "--burstiness", exclusive=True) if a.burstiness is not None else 1.0,
        whole(a.users, "--users") if a.users is not None else 1,
        number(a.speed, "--speed", exclusive=True) if a.speed is not None else 1.0,
        duration,
        count,
    )


def read_content(a: argparse.Namespace) -> ContentOptions:
    sources = {
        "--trace": a.trace,
        "--prompts-file": a.prompts_file,
        "--lengths": a.lengths,
        "--preset": a.preset,
        "--input": a.input,
    }
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise LoadError(f"{given[0]} and {given[1]} both set prompt lengths; omit one")
    if a.output is not None and given and given[0] in ("--trace", "--lengths", "--preset"):
        raise LoadError(f"{given[0]} sets the output lengths; omit --output")
    inputs, outputs = INPUT, OUTPUT
    if a.preset is not None:
        inputs, outputs = lengths.PRESETS[a.preset]
    if a.input is not None:
        inputs = lengths.parse(a.input, "--input")
    if a.output is not None:
        outputs = lengths.parse(a.output, "--output")
    turns = ONE if a.turns is None else lengths.parse(a.turns, "--turns")
    if turns != ONE and given and given[0] in ("--trace", "--prompts-file"):
        raise LoadError(f"--turns does not work with {given[0]}")
    context = 0 if a.context is None else whole(a.context, "--context", low=0)
    if context and turns == ONE:
        raise LoadError("--context applies to conversations; add --turns")
    return ContentOptions(
        inputs,
        outputs,
        None if a.lengths is None else lengths.read_pairs(Path(a.lengths)),
        () if a.prompts_file is None else tuple(read_prompts(Path(a.prompts_file))),
        None if a.trace is None else read_trace(Path(a.trace)),
        turns,
        0.0 if a.think is None else seconds(a.think, "--think"),
        context,
    )


def _has_messages(content: ContentOptions) -> bool:
    """Whether a file contains chat messages."""
    rows = content.trace.rows if content.trace is not None else ()
    given = [prompt for prompt, _ in content.prompts] + [row.content for row in rows]
    return any(isinstance(one, list) and one and isinstance(one[0], dict) for one in given)


def read_maker(a: argparse.Namespace, kind: Kind) -> PromptMaker:
    low_text, colon, high_text = a.token_ids.partition(":")
    if not colon:
        raise LoadError(f"--token-ids: {a.token_ids!r} is not LOW:HIGH")
    low, high = whole(low_text, "--token-ids", low=0), whole(high_text, "--token-ids")
    if high <= low:
        raise LoadError("--token-ids: LOW must be less than HIGH")
    return PromptMaker(
        kind,
        whole(a.seed, "--seed", low=0),
        low,
        high,
        fraction(a.shared_prefix, "--shared-prefix"),
        whole(a.prefix_groups, "--prefix-groups"),
    )


def _files(a: argparse.Namespace) -> dict[str, Path]:
    return {kind: path for kind in ("html", "json", "csv", "record") if (path := getattr(a, kind)) is not None}
