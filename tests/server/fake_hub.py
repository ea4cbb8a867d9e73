"""A server with the part of the Hugging Face hub's API that a download needs. It breaks connections where a test sets
it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    files: dict[str, bytes]
    branches: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    refuse: tuple[int, str] | None = None
    """status and the hub's code for it"""
    gated: bool = False
    """its information is given, its files are not"""
    token: str | None = None
    """token that a request must have"""


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """method, path, Range"""
    break_after: dict[str, list[int]] = field(default_factory=dict)
    """by file: bytes after which a connection breaks, for each of the next ones"""

    hold: dict[str, tuple[int, threading.Event]] = field(default_factory=dict)
    """by file: bytes after which the transfer waits for an event"""

    def fetched(self) -> list[str]:
        """The requested files."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "no")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _answer(self) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
        repository = hub.repositories.get(name)
        if repository is None:
            return self._error(401, "RepoNotFound")
        if repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            return self._error(401, "RepoNotFound")
        if repository.refuse is not None:
            return self._error(*repository.refuse)
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.branches.get(revision, revision)
        if commit not in repository.branches.values():
            return self._error(404, "RevisionNotFound")
        if api and (not rest or rest[0] == "revision"):
            siblings = [{"rfilename": file} for file in repository.files]
            return self._json({"id": name, "sha": commit, "siblings": siblings, "private": False})
        if api and rest[0] == "tree":
            folder = "".join(f"{part}/" for part in rest[2:])
            there = [file for file in repository.files if file.startswith(folder)]
            if "recursive=true" in urlsplit(self.path).query.lower():
                return self._json([_entry(file, repository.files[file]) for file in there])
            names = dict.fromkeys(folder + file.removeprefix(folder).partition("/")[0] for file in there)
            return self._json([_entry(name, repository.files.get(name)) for name in names])
        if repository.gated:
            return self._error(403, "GatedRepo")
        if rest[:1] == ["resolve"]:
            return self._file("/".join(rest[2:]), repository, commit)
        return self._error(404, "EntryNotFound")

    def _file(self, file: str, repository: Repository, commit: str) -> None:
        if file not in repository.files:
            return self._error(404, "EntryNotFound")
        data = repository.files[file]
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{_digest(data)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return None
        breaks = self.hub.break_after.get(file)
        if breaks:
            self.wfile.write(data[begin : begin + breaks.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return None
        first, released = self.hub.hold.pop(file, (len(data), None))
        self.wfile.write(data[begin : begin + first])
        if released is not None:
            self.wfile.flush()
            released.wait(240)
            self.wfile.write(data[begin + first :])
        return None


def _entry(path: str, data: bytes | None) -> dict[str, Any]:
    if data is None:
        return {"type": "directory", "oid": _digest(path.encode()), "path": path}
    return {"type": "file", "oid": _digest(data), "size": len(data), "path": path}


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def hub() -> Iterator[Hub]:
    """A separate hub on a free port."""
    state = Hub()
    handler = type("Handler", (_Handler,), {"hub": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
