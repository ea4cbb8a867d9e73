"""The daemon's greeting on stdout: the URL, the model, its memory, and a command to try it."""

from __future__ import annotations

import json
import logging
import os
import shlex
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft import __version__
from weft.engine.wire.messages import EngineReady, MemoryBudget
from weft.server.api.scorer import tasks_of
from weft.server.config import ServeConfig
from weft.server.daemon.placement import shares_weights
from weft.server.observe.server_urls import UNIX, url_of

GIB = 2**30


def announce(
    config: ServeConfig, address: tuple[Any, ...] | str, engines: Sequence[EngineReady], seconds: float, *, chat: bool,
    key: bool, admin: tuple[Any, ...] | None = None,
) -> None:  # fmt: skip
    """Print the greeting. `address`: the listening socket's. `seconds`: since the start. `key`: requests need one.
    `admin`: the address of --admin-port."""
    several, tls = len(config.each) > 1, config.tls_cert
    url, name = url_of(address, tls=tls is not None), config.each[0].model_names[0]
    self_signed = not several and tls is not None and _is_self_signed(tls)
    first = config.each[0]
    tasks = tasks_of(engines[0], first.model_path, first.classifier_from_token)
    command = _curl(url, name, tasks, chat=chat, key=key, self_signed=self_signed)
    write = _several_models if several else _one_model
    try:
        text = write(config, url, engines, seconds, command)
        if admin is not None:
            text += f"\nadmin: {url_of(admin, tls=tls is not None)} (health, metrics and /admin/ only)"
        print(text, flush=True)
    except OSError as error:  # a full disk or a closed pipe must not stop the daemon
        logging.getLogger("weft").warning("cannot write the greeting to stdout: %s", error.strerror)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the rest of its buffer would fail again at exit)


def _one_model(config: ServeConfig, url: str, engines: Sequence[EngineReady], seconds: float, command: str) -> str:
    ready = engines[0]
    pages = f"{ready.num_pages} KV pages of {ready.page_size} tokens"
    if "generate" not in ready.tasks:
        pages = f"inputs of up to {ready.max_model_len} tokens"
    if len(engines) > 1:
        pages = f"{len(engines)} engines with {pages} each"
    return (
        f"weft {__version__} serves {config.each[0].model_names[0]} at {url} "
        f"({ready.model_type}, {ready.dtype} on {ready.device}, {pages}, ready in {seconds:.1f} s)\n"
        f"try: {command}\n"
        f"memory: {_memory(ready.memory, ready.device, len(engines), config)}\n"
        f"energy: {_energy(ready)}"
    )


def _several_models(config: ServeConfig, url: str, engines: Sequence[EngineReady], seconds: float, command: str) -> str:
    """`engines`: the engines that are awake."""
    names = [each.model_names[0] for each in config.each]
    parts = (f"{name} ({share:.0%} of the memory)" for name, share in zip(names, config.memory_shares, strict=True))
    return (
        f"weft {__version__} serves {len(names)} models at {url} (on {engines[0].device}, ready in {seconds:.1f} s)\n"
        f"models: {', '.join(parts)}; {len(engines)} engines are awake\n"
        f"try: {command}"
    )


def _memory(budget: MemoryBudget, device: str, engines: int, config: ServeConfig) -> str:
    ranks = config.engine.tensor_parallel_size
    weights = "shared weights" if shares_weights(config) else "weights"
    parts = {weights: budget.weights, "KV pages": budget.kv_pages, "working memory": budget.working}
    where = "the engine takes" if device == "cpu" else f"{device} is used for"
    if engines > 1:
        where = f"each of {engines} engines takes"
    if ranks > 1:
        where = f"each of {engines * ranks} ranks takes"
    host = f"; {budget.host_pages / GIB:.2f} GiB of host memory for KV pages" if budget.host_pages else ""
    shares = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    return f"{where} up to {(budget.total - budget.host_pages) / GIB:.2f} GiB ({shares}){host}"


def _energy(ready: EngineReady) -> str:
    if ready.energy_source:
        return f"{ready.device} measured by {ready.energy_source}, in /metrics and for requests with include_energy"
    return f"not measured ({ready.energy_missing or 'no counter'})"


def _is_self_signed(path: str) -> bool:
    """Return whether a certificate is self-signed, so that clients refuse it by default."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        alone = Path(path).read_text(encoding="ascii", errors="replace").count("BEGIN CERTIFICATE") == 1
        context.load_verify_locations(cafile=path)
    except (OSError, ssl.SSLError):
        return False
    return alone and any(entry.get("subject") == entry.get("issuer") for entry in context.get_ca_certs())


def _curl(url: str, model: str, tasks: Sequence[str], *, chat: bool, key: bool, self_signed: bool = False) -> str:
    """Return a command to paste into a shell. `self_signed`: the certificate is self-signed."""
    question = "What is 12 + 30?"
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt: dict[str, Any] = {"prompt": question}
    if chat:
        prompt = {"messages": [{"role": "user", "content": question}]}
    if "generate" not in tasks:
        path, prompt = ("/v1/embeddings" if "embed" in tasks else "/classify"), {"input": question}
    if "score" in tasks and tasks[0] != "embed":
        path, prompt = "/v1/rerank", {"query": question, "documents": ["It is 42.", "Paris is in France."]}
    body = json.dumps({"model": model, **prompt})
    authorization = ' -H "Authorization: Bearer $WEFT_API_KEY"' if key else ""
    if url.startswith(UNIX):
        where = f"--unix-socket {shlex.quote(url.removeprefix(UNIX))} http://localhost{path}"
    else:
        where = ("-k " if self_signed else "") + shlex.quote(url + path)
    return f"curl {where} -H 'Content-Type: application/json'{authorization} -d {shlex.quote(body)}"
