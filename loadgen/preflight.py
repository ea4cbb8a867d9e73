"""Checks a server before a run: reachability, model, supported fields, tokens per word."""

from __future__ import annotations

import asyncio
import errno
import time
from dataclasses import dataclass, replace
from typing import Any

import orjson

from weft.loadgen.client import Client, Target
from weft.loadgen.connection import Address, Body, ConnectionBroken, Pool
from weft.loadgen.errors import LoadError
from weft.loadgen.prompts import Calibration, PromptMaker
from weft.loadgen.record import Outcome, Record
from weft.loadgen.server_view import Snapshot

SETTLE_SECONDS = 3.0  # Seconds to wait for open requests before the server's counters are read.
ANSWER_SECONDS = 30.0  # Seconds a server may take to return its models or metrics.


async def get(address: Address, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    """Send a GET and return status and body. Raises `OSError` or `ConnectionBroken`."""
    pool, body = Pool(address), Body()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            status = await pool.exchange(address.head("GET", path, headers), body)
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {ANSWER_SECONDS:g} s") from None
    finally:
        pool.close()
    return status, body.content


@dataclass(frozen=True, slots=True)
class Ready:
    """A checked target. `context`: its limit on prompt and output in tokens, if it reports one."""

    target: Target
    context: int | None
    calibration: Calibration
    notes: tuple[str, ...] = ()
    image_tokens: int = 0  # Prompt tokens of a request's images.


async def prepare(target: Target, maker: PromptMaker) -> Ready:
    """Find the model and try small requests. Raises `LoadError`.

    For word prompts, two prompts of different length calibrate the tokens per word and per bare prompt."""
    notes: list[str] = []
    target, context = await _discover(target, notes)
    trial = await _try(target, maker.prompt(0, 8), 2)
    if trial.outcome is Outcome.REFUSED and trial.status in (400, 422) and target.exact_output:
        plain = replace(target, exact_output=False)
        second = await _try(plain, maker.prompt(0, 8), 2)
        if second.ok:
            notes.append("the server rejects ignore_eos and min_tokens, so answers may be shorter than requested")
            target, trial = plain, second
    if not trial.ok:
        hint = "; try --prompts words" if maker.kind == "ids" and trial.status in (400, 422) else ""
        status = f" (status {trial.status})" if trial.status else ""
        raise LoadError(f"{target.name}: a trial request failed{status}: {trial.error or trial.outcome}{hint}")
    if trial.completion_tokens < 0:
        notes.append("the server sends no usage, so output tokens are counted as events")
    calibration = await _calibrate(target, maker, context) if maker.kind == "words" else Calibration()
    image_tokens = 0
    if maker.images is not None:
        seen = await _try(target, maker.with_images(0, maker.prompt(0, 8)), 2)
        if not seen.ok:
            raise LoadError(f"{target.name}: a trial request with {maker.images} failed: {seen.error or seen.outcome}")
        image_tokens = max(0, seen.prompt_tokens - trial.prompt_tokens)
    return Ready(target, context, calibration, tuple(notes), image_tokens)


async def _discover(target: Target, notes: list[str]) -> tuple[Target, int | None]:
    try:
        status, body = await get(target.address, "/v1/models", target.all_headers())
    except (OSError, ConnectionBroken) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LoadError(
            f"no server answers at {target.address} ({reason}); start one, or pass another with --server"
        ) from None
    if status in (401, 403):
        raise LoadError(f"{target.name}: the server requires an API key (status {status}); pass one with --api-key")
    try:
        listed = orjson.loads(body)["data"] if status == 200 else []
        models: list[dict[str, Any]] = [m for m in listed if isinstance(m, dict) and "id" in m]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        models = []
    if target.model:
        known: dict[str, Any] = next((m for m in models if m["id"] == target.model), {})
        if models and not known:
            names = ", ".join(str(m["id"]) for m in models[:5])
            raise LoadError(f"{target.name}: --model {target.model} is not served; served: {names}")
    elif not models:
        raise LoadError(f"{target.name}: /v1/models does not list a model (status {status}); pass --model")
    else:
        known = models[0]
        if len(models) > 1:
            notes.append(f"using {known['id']} of {len(models)} served models (choose with --model)")
    limit = known.get("max_model_len")
    context = int(limit) if isinstance(limit, int) and limit > 1 else None
    return replace(target, model=str(known.get("id", target.model))), context


async def _try(target: Target, content: Any, output_tokens: int) -> Record:
    record = Record(0, 0.0, 0, output_tokens)
    client = Client(replace(target, timeout=min(target.timeout, 120.0)), time.monotonic())
    try:
        await client.send(record, target.body(content, output_tokens))
    finally:
        client.close()
    return record


async def _calibrate(target: Target, maker: PromptMaker, context: int | None) -> Calibration:
    sizes = (20, 200) if context is None or context >= 1024 else (8, max(16, context // 8))
    counts = []
    for size in sizes:
        record = await _try(target, maker.prompt(size, size), 1)
        if not record.ok or record.prompt_tokens < 1:
            return Calibration()  # no usage: count a word as a token
        counts.append(record.prompt_tokens)
    per_word = max(0.1, (counts[1] - counts[0]) / (sizes[1] - sizes[0]))
    return Calibration(per_word, max(0.0, counts[0] - per_word * sizes[0]))


async def settled(target: Target) -> Snapshot | None:
    """Return `snapshot` once the server is idle, or after `SETTLE_SECONDS`. One of several HTTP processes may learn of
    the last tokens after another has sent them."""
    end = time.monotonic() + SETTLE_SECONDS
    while (found := await snapshot(target)) is not None and not found.idle and time.monotonic() < end:
        await asyncio.sleep(0.05)
    return found


async def snapshot(target: Target) -> Snapshot | None:
    """Return the server's counters, or None if it has no known ones."""
    try:
        status, body = await get(target.address, "/metrics", target.all_headers())
    except (OSError, ConnectionBroken):
        return None
    return Snapshot.parse(body.decode("utf-8", "replace")) if status == 200 else None
