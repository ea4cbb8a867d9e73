"""`weft chat`: a conversation in the terminal with a running server, or with one started for it."""

from __future__ import annotations

import argparse
import base64
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from weft.engine.errors import ConfigError, WeftError
from weft.server.commands.endpoint import Endpoint, Refused
from weft.server.commands.options import URL, key_of
from weft.server.commands.own_server import own_server

HELP = """\
/clear          start a new conversation
/image FILE     send an image with the next message (for models that take images)
/system TEXT    set the system prompt; without TEXT, remove it
/retry          answer the last message again
/exit           leave (also Ctrl-D)
End a line with \\ to continue it. Ctrl-C stops an answer or clears the line; press it twice to leave.
"""


class Conversation:
    """The messages of a conversation."""

    def __init__(self, endpoint: Endpoint, arguments: argparse.Namespace) -> None:
        self._endpoint = endpoint
        self.system: str | None = arguments.system
        self.turns: list[dict[str, Any]] = []  # Messages and their answers, including partial ones.
        self.images: list[str] = []  # `data:` URLs to send with the next message.
        self._options = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}

    def ask(self, question: str) -> Iterator[str]:
        """Yield pieces of the answer. A partial answer is remembered, too. Raises `Refused`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": question}] if parts else question}
        options = {name: value for name, value in self._options.items() if value is not None}
        answer = ""
        pieces = self._endpoint.answer([*system, *self.turns, turn], options)
        try:
            for piece in pieces:
                answer += piece
                yield piece
        finally:
            pieces.close()
            if answer:
                self.images = []
                self.turns += [turn, {"role": "assistant", "content": answer}]

    def undo(self) -> str | None:
        """Remove the last answer and return its question."""
        if not self.turns:
            return None
        content = self.turns[-2]["content"]
        del self.turns[-2:]
        if isinstance(content, str):
            return content
        *images, text = content
        self.images = [part["image_url"]["url"] for part in images]
        return str(text["text"])

    def attach(self, file: str) -> str:
        """Send an image with the next message. Returns why not, or an empty string."""
        try:
            data = Path(file).expanduser().read_bytes()
        except (OSError, ValueError, RuntimeError) as error:
            return f"cannot read {file}: {getattr(error, 'strerror', None) or error}"
        self.images.append(f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}")
        return ""


def shown(text: str) -> str:
    """Replace control characters: a model must not move the cursor or set a title or color."""
    return "".join(
        c if c in "\n\t" or (c.isprintable() or c == "\u200d") else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns 0 when the user leaves, 1 if a piped question gets no answer."""
    notes = Console(stderr=True, highlight=False, markup=False)
    with contextlib.ExitStack() as stack:
        endpoint = _endpoint(arguments, stack, notes)
        conversation = Conversation(endpoint, arguments)
        if not sys.stdin.isatty():  # one question from a pipe
            return _answer(conversation, _piped(), endpoint, notes)
        notes.print(f"{endpoint.model} at {endpoint.url}. Type /help for commands, Ctrl-D to leave.", style="dim")
        _talk(conversation, endpoint, notes)
    return 0


def _endpoint(arguments: argparse.Namespace, stack: contextlib.ExitStack, notes: Console) -> Endpoint:
    """Return the server to talk to. Raises `WeftError`."""
    key = key_of(arguments)
    template = arguments.chat_template
    if template is not None and (arguments.url is not None or arguments.model is None):
        raise ConfigError("--chat-template needs a MODEL to serve; a running server has its own option")
    if arguments.url is not None or arguments.model is None:
        endpoint = Endpoint(arguments.url or URL, key, arguments.model, insecure=arguments.insecure)
        try:
            endpoint.connect()
            return endpoint
        except Refused as error:
            if arguments.url is not None or error.status is not None:
                raise WeftError(f"{endpoint.url}: {error}") from None
        notes.print(f"No server at {URL}; starting one with the demo model.", style="dim", soft_wrap=True)
    options = [] if template is None else ["--chat-template", template]
    url = stack.enter_context(own_server(arguments.model or "demo", arguments.revision, notes, options=options))
    endpoint = Endpoint(url, None, None)
    try:
        endpoint.connect()
    except Refused as error:
        raise WeftError(f"{url}: {error}") from None
    return endpoint


def _piped() -> str:
    """Return the text on standard input. Raises `ConfigError`."""
    try:
        return sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the question on standard input is not UTF-8 at byte {error.start}") from None


def _talk(conversation: Conversation, endpoint: Endpoint, notes: Console) -> None:
    with contextlib.suppress(ModuleNotFoundError):
        import readline  # noqa: F401  (adds line editing to `input`)
    interrupted = False
    while True:
        try:
            question = _line()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if interrupted:
                return
            interrupted = True
            notes.print("Press Ctrl-C again, or Ctrl-D, to leave.", style="dim")
            continue
        interrupted = False
        if (asked := _command(question, conversation, notes)) is None:
            return
        if asked:
            _answer(conversation, asked, endpoint, notes)


def _line() -> str:
    """Read a message of one or more lines."""
    text = input("> ")
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{input('. ')}"
    return text.strip()


def _command(text: str, conversation: Conversation, notes: Console) -> str | None:
    """Run a command line. Returns the message to send, '' for none, None to leave."""
    word, _, rest = text.partition(" ")
    match word:
        case "/exit" | "/quit":
            return None
        case "/clear":
            conversation.turns.clear()
            conversation.images.clear()
            notes.print("New conversation.", style="dim")
        case "/system":
            conversation.system = rest.strip() or None
            notes.print("System prompt: " + (conversation.system or "none"), style="dim")
        case "/image" if file := rest.strip():
            notes.print(conversation.attach(file) or "The next message has this image.", style="dim", soft_wrap=True)
        case "/retry":
            return conversation.undo() or ""
        case "/help":
            notes.print(HELP, end="", style="dim")
        case _ if word.startswith("/") and word[1:].isalpha() and not rest:
            notes.print(f"Unknown command {word}; type /help for commands.", style="dim")
        case _:
            return text
    return ""


def _answer(conversation: Conversation, question: str, endpoint: Endpoint, notes: Console) -> int:
    """Stream the answer to stdout. Returns 1 if it failed."""
    if not question:
        raise ConfigError("standard input has no question")
    status, ended = 0, ""
    pieces: Any = conversation.ask(question)
    try:
        for piece in pieces:
            sys.stdout.write(shown(piece))
            sys.stdout.flush()
    except KeyboardInterrupt:
        ended = "stopped"
    except Refused as error:
        status, ended = 1, f"error: {error}"
    finally:
        pieces.close()
    print()
    if summary := ", ".join(part for part in (endpoint.figures() if not status else "", ended) if part):
        notes.print(summary, style="red" if status else "dim")
    return status
