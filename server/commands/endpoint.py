"""`Endpoint`: a client of an OpenAI-compatible server, for its model and streamed answers."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Generator, Sequence
from typing import Any
from urllib.parse import urlsplit

from weft.engine.errors import ConfigError
from weft.server.observe.server_urls import UNIX, UnixConnection

CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 600.0  # Maximum seconds until the first token or between two tokens.


class Refused(Exception):
    """No response, or an error. `status`: the HTTP status; None without a response."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """One server. `connect` finds its model."""

    def __init__(self, url: str, key: str | None, model: str | None, *, insecure: bool = False) -> None:
        """`model`: None for the first that is served. Raises `ConfigError` for an invalid URL or key."""
        try:
            parts = urlsplit(url if "://" in url or url.startswith(UNIX) else f"http://{url}")
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            fits = fits or (parts.scheme == "unix" and bool(parts.path))
        except ValueError:
            fits = False
        if not fits:
            raise ConfigError(f"--url {url}: must be like http://127.0.0.1:8000 or unix:/run/weft.sock")
        if key and not key.isprintable():
            raise ConfigError("--api-key: must not contain line breaks or other control characters")
        self._parts = parts
        path = "" if parts.scheme == "unix" else parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        self.url = url if parts.scheme == "unix" else f"{parts.scheme}://{parts.netloc}{path}"
        self.model = model or ""
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}".encode().decode("latin-1")
        self._insecure = insecure
        self._first: float | None = None
        self._last = self._begun = 0.0
        self._tokens = self._pieces = 0

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """Raises `Refused`."""
        host, port = self._parts.hostname or "", self._parts.port
        connection: http.client.HTTPConnection
        if self._parts.scheme == "unix":
            connection = UnixConnection(self._parts.path, CONNECT_SECONDS)
        elif self._parts.scheme == "https":
            context = ssl._create_unverified_context() if self._insecure else ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE_SECONDS if body else CONNECT_SECONDS)
            connection.request(method, self._base + path, json.dumps(body).encode() if body else None, self._headers)
            response = connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            raise Refused(
                f"its certificate is not trusted ({error.verify_message}); use --insecure to accept it", 0
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise Refused(f"no response ({error or type(error).__name__})") from None
        if response.status != 200:
            raise Refused(_message(response), response.status)
        return response

    def connect(self) -> None:
        """Find the model. Raises `Refused`."""
        try:
            served = [str(model["id"]) for model in json.loads(self._send("GET", "/models").read())["data"]]
        except (ValueError, LookupError, TypeError, OSError, http.client.HTTPException):
            raise Refused("not an OpenAI-compatible server", 0) from None
        if not served:
            raise Refused("it serves no models", 0)
        if self.model and self.model not in served:
            raise Refused(f"it does not serve {self.model}, only {', '.join(served[:5])}", 0)
        self.model = self.model or served[0]

    def answer(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> Generator[str, None, None]:
        """Yield pieces of the answer. Closing the generator closes the connection. Raises `Refused`."""
        self._begun, self._first, self._tokens, self._pieces = time.perf_counter(), None, 0, 0
        body = {"model": self.model, "messages": list(messages), "stream": True, **options}
        response = self._send("POST", "/chat/completions", {**body, "stream_options": {"include_usage": True}})
        try:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if event.get("error"):
                    raise Refused(str(event["error"].get("message")), 0)
                usage = event.get("usage") or {}
                self._tokens = usage.get("completion_tokens") or self._tokens
                piece = str(((event.get("choices") or [{}])[0].get("delta") or {}).get("content") or "")
                if piece:
                    self._last = time.perf_counter()
                    self._first = self._first or self._last
                    self._pieces += 1
                    yield piece
            raise Refused("the connection closed before the end of the answer", 0)
        except TimeoutError:
            raise Refused(f"no data for {SILENCE_SECONDS:.0f} s", 0) from None
        except (OSError, http.client.HTTPException, ValueError, LookupError, AttributeError) as error:
            raise Refused(f"the answer was cut off ({error or type(error).__name__})", 0) from None
        finally:
            response.close()

    def figures(self) -> str:
        """Describe the speed of the last answer."""
        if self._first is None:
            return ""
        tokens = self._tokens or self._pieces
        parts = [f"{tokens} {'token' if tokens == 1 else 'tokens'}", f"first after {self._first - self._begun:.2f} s"]
        if tokens > 1 and self._last > self._first:
            parts.append(f"{(tokens - 1) / (self._last - self._first):.0f} tokens/s")
        return ", ".join(parts)


def _message(response: http.client.HTTPResponse) -> str:
    try:
        error = json.loads(response.read(1 << 16))["error"]
        text = str(error.get("message") if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, AttributeError, OSError):
        text = f"status {response.status}"
    return f"{text} (use --api-key)" if response.status == 401 else text
