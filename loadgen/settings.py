"""Converts flags to checked options; every `LoadError` names the flag to change."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from weft.loadgen import images, lengths, slo
from weft.loadgen.arrivals import MAX_ARRIVALS, Process
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
MAX_USERS = 100_000


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
    row: dict[str, Any] | None = None  # Fields of rows in InferenceX's format; None: weft's format.


def read(arguments: argparse.Namespace) -> Settings:
    """Convert parsed flags. Raises `LoadError`."""
    a = arguments
    if a.mode not in ("run", "sweep"):
        raise LoadError(f"{a.mode!r} is neither sweep nor an option; pass servers with --server")
    sweeping = a.mode == "sweep"
    content = read_content(a)
    conversations = content.turns != ONE
    rows = content.trace.rows if content.trace is not None else ()
    given = [prompt for prompt, _ in content.prompts] + [row.content for row in rows]
    messages = any(isinstance(one, list) and one and isinstance(one[0], dict) for one in given)
    pictures = None if a.images in (None, "0") else images.parse(a.images, "--images")
    if pictures is not None and a.endpoint == "completions":
        raise LoadError("--images needs chat requests; omit --endpoint completions")
    if pictures is not None and any(isinstance(one, list) and not isinstance(one[0], dict) for one in given if one):
        raise LoadError("--images needs prompts of text or messages, not of token ids")
    if pictures is not None and a.format == "inferencex":
        raise LoadError("--images does not work with --format inferencex, whose rows describe text")
    chat = a.endpoint == "chat" or (a.endpoint is None and (conversations or messages or pictures is not None))
    if messages and not chat:
        raise LoadError("--endpoint completions cannot send messages; use --endpoint chat")
    kind: Kind = a.prompts or ("words" if chat or conversations else "ids")
    if kind == "ids" and (chat or conversations):
        other = "--images" if pictures else "--endpoint chat" if chat else "--turns"
        raise LoadError(f"--prompts ids does not work with {other}; omit it")
    arrival = read_arrival(a, traced=content.trace is not None)
    objectives = tuple(objective for text in a.slo for objective in slo.parse(text))
    if sweeping and not objectives:
        raise LoadError("a sweep needs an objective: --slo nanoflow, or --slo ttft:p99:500ms …")
    if sweeping and arrival.process in ("closed", "ramp"):
        raise LoadError(f"a sweep varies the rate and does not work with {arrival.process} arrivals")
    if sweeping and a.speed is not None:
        raise LoadError("--speed: a sweep sets the trace's rate itself; omit --speed")
    drain = optional(a.drain, "--drain", seconds, (arrival.duration or DEFAULT_DURATION) if sweeping else None)
    processes, warmup = whole(a.processes, "--processes", most=1024), seconds(a.warmup, "--warmup")
    options = RunOptions(objectives, processes, warmup, drain, fraction(a.max_failures, "--max-failures"))
    if arrival.duration is not None and options.warmup >= arrival.duration:
        raise LoadError("--warmup must be shorter than --duration")
    sweep = None
    if sweeping:
        growth = number(a.growth, "--growth", low=1, most=1000, exclusive=True)
        precision = number(a.precision, "--precision", exclusive=True)
        sweep = SweepOptions(arrival.rate or 1.0, growth, precision, whole(a.max_runs, "--max-runs", most=1000))
    return Settings(
        _targets(a, chat, seconds(a.timeout, "--timeout", exclusive=True)),
        arrival,
        content,
        replace(read_maker(a, kind), images=pictures),
        optional(a.max_context, "--max-context", whole, low=2),
        options,
        sweep,
        {kind: path for kind in ("html", "json", "csv", "record") if (path := getattr(a, kind)) is not None},
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


def optional(text: str | None, option: str, parse: Any, default: Any = None, **limits: Any) -> Any:
    return default if text is None else parse(text, option, **limits)


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
    try:
        extra = orjson.loads("{}" if a.extra is None else a.extra)
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
    values: dict[Process, Any] = {"closed": a.users, "ramp": a.rate_end, "gamma": a.burstiness}
    flags = {"closed": "--users", "ramp": "--rate-end", "gamma": "--burstiness"}
    given = [process for process, value in values.items() if value is not None]
    process: Process = a.arrival or (given[0] if given else "poisson")
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
    duration = optional(a.duration, "--duration", seconds, exclusive=True)
    count = optional(a.requests, "--requests", whole, most=MAX_ARRIVALS)
    if duration is None and (process == "ramp" or (count is None and not (traced and process != "closed"))):
        duration = DEFAULT_DURATION
    return ArrivalOptions(
        process,
        optional(a.rate, "--rate", number, None if traced or process == "closed" else 1.0, exclusive=True),
        optional(a.rate_end, "--rate-end", number, 1.0),
        optional(a.burstiness, "--burstiness", number, 1.0, low=1e-3, most=1e6),
        optional(a.users, "--users", whole, 1, most=MAX_USERS),
        optional(a.speed, "--speed", number, 1.0, low=1e-6),
        duration,
        count,
    )


def read_content(a: argparse.Namespace) -> ContentOptions:
    flags = ("--trace", "--prompts-file", "--lengths", "--preset", "--input")
    values = (a.trace, a.prompts_file, a.lengths, a.preset, a.input)
    given = [flag for flag, value in zip(flags, values, strict=True) if value is not None]
    if len(given) > 1:
        raise LoadError(f"{given[0]} and {given[1]} both set prompt lengths; omit one")
    source = given[0] if given else ""
    if a.output is not None and source in ("--trace", "--lengths", "--preset"):
        raise LoadError(f"{source} sets the output lengths; omit --output")
    inputs, outputs = (INPUT, OUTPUT) if a.preset is None else lengths.PRESETS[a.preset]
    inputs = optional(a.input, "--input", lengths.parse, inputs)
    outputs = optional(a.output, "--output", lengths.parse, outputs)
    turns = optional(a.turns, "--turns", lengths.parse, ONE)
    if turns != ONE and source in ("--trace", "--prompts-file"):
        raise LoadError(f"--turns does not work with {source}")
    context = optional(a.context, "--context", whole, 0, low=0, most=lengths.LONGEST)
    if context and turns == ONE:
        raise LoadError("--context applies to conversations; add --turns")
    return ContentOptions(
        inputs,
        outputs,
        None if a.lengths is None else lengths.read_pairs(Path(a.lengths)),
        () if a.prompts_file is None else tuple(read_prompts(Path(a.prompts_file))),
        None if a.trace is None else read_trace(Path(a.trace)),
        turns,
        optional(a.think, "--think", seconds, 0.0),
        context,
    )


def read_maker(a: argparse.Namespace, kind: Kind) -> PromptMaker:
    low_text, colon, high_text = a.token_ids.partition(":")
    if not colon:
        raise LoadError(f"--token-ids: {a.token_ids!r} is not LOW:HIGH")
    low, high = whole(low_text, "--token-ids", low=0), whole(high_text, "--token-ids", most=2**31 - 1)
    if high <= low:
        raise LoadError("--token-ids: LOW must be less than HIGH")
    seed, shared = whole(a.seed, "--seed", low=0, most=2**64), fraction(a.shared_prefix, "--shared-prefix")
    return PromptMaker(kind, seed, low, high, shared, whole(a.prefix_groups, "--prefix-groups", most=MAX_ARRIVALS))
