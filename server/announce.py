"""What the daemon prints on stdout when it serves: where, what, and a command to try it with."""

from __future__ import annotations

import json
import shlex
from typing import Any

from weft import __version__
from weft.engine.wire.messages import EngineReady
from weft.server.config import ServeConfig


def announce(
    config: ServeConfig, address: tuple[Any, ...], ready: EngineReady, seconds: float, *, chat: bool, key: bool
) -> None:
    """`address`: of the listening socket. `seconds`: from start to now. `key`: requests need one."""
    host, port = address[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"{'https' if config.tls_cert is not None else 'http'}://{host}:{port}"
    name = config.model_names[0]
    pages = f"{ready.num_pages} KV pages of {ready.page_size} tokens"
    print(
        f"weft {__version__} serves {name} at {url} "
        f"({ready.model_type}, {ready.dtype} on {ready.device}, {pages}, ready in {seconds:.1f} s)\n"
        f"try: {_curl(url, name, chat=chat, key=key)}",
        flush=True,
    )


def _curl(url: str, model: str, *, chat: bool, key: bool) -> str:
    """A command that works when pasted into a shell."""
    question = "What is 12 + 30?"
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": question}]} if chat else {"prompt": question}
    body = json.dumps({"model": model, **prompt})
    authorization = ' -H "Authorization: Bearer $WEFT_API_KEY"' if key else ""
    return f"curl {shlex.quote(url + path)} -H 'Content-Type: application/json'{authorization} -d {shlex.quote(body)}"
