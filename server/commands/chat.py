"""`weft chat`: a conversation in the terminal, with a server that runs already or with one started for it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from weft.engine.errors import ConfigError, WeftError
from weft.server.commands.endpoint import Endpoint, Refused
from weft.server.commands.options import URL, key_of
from weft.server.commands.own_server import own_server

HELP = """\
/clear          forget the conversation
/system TEXT    what the model is told first; without TEXT, nothing
/retry          answer the last message again
/exit           as Ctrl-D
A line that ends with \\ goes on. Ctrl-C ends an answer, at the prompt it clears the line, twice it leaves.
"""


class Conversation:
    """What was said, and how it is asked for more."""

    def __init__(self, endpoint: Endpoint, arguments: argparse.Namespace) -> None:
        self._endpoint = endpoint
        self.system: str | None = arguments.system
        self.turns: list[dict[str, str]] = []
        """messages that were answered, if only in part"""
        self._options = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}

    def ask(self, question: str) -> Iterator[str]:
        """Pieces of the answer. Whatever came of it is remembered, however it ends. Raises `Refused`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        turn = {"role": "user", "content": question}
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
                self.turns += [turn, {"role": "assistant", "content": answer}]

    def take_back(self) -> str | None:
        """Forget the last answer; returns its question."""
        if not self.turns:
            return None
        question = self.turns[-2]["content"]
        del self.turns[-2:]
        return question


def shown(text: str) -> str:
    """Without what a terminal would obey: a model must not move the cursor, set a title or colour."""
    return "".join(
        c if c in "\n\t" or (c.isprintable() or c == "\u200d") else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def run(arguments: argparse.Namespace) -> int:
    """The command; 0 once the user has left, 1 when there is no server to talk to."""
    notes = Console(stderr=True, highlight=False, markup=False)
    with contextlib.ExitStack() as stack:
        endpoint = _endpoint(arguments, stack, notes)
        conversation = Conversation(endpoint, arguments)
        if not sys.stdin.isatty():  # a question from a pipe: one answer
            return _answer(conversation, _piped(), endpoint, notes)
        notes.print(f"{endpoint.model} at {endpoint.url}. /help tells what else there is; Ctrl-D leaves.", style="dim")
        _talk(conversation, endpoint, notes)
    return 0


def _endpoint(arguments: argparse.Namespace, stack: contextlib.ExitStack, notes: Console) -> Endpoint:
    """The server to talk to. Raises `WeftError`."""
    key = key_of(arguments)
    if arguments.url is not None or arguments.model is None:
        endpoint = Endpoint(arguments.url or URL, key, arguments.model, insecure=arguments.insecure)
        try:
            endpoint.connect()
            return endpoint
        except Refused as error:
            if arguments.url is not None or error.status is not None:
                raise WeftError(f"{endpoint.url}: {error}") from None
        notes.print(f"Nothing serves at {URL}; starting one with the demo model for this.", style="dim", soft_wrap=True)
    url = stack.enter_context(own_server(arguments.model or "demo", arguments.revision, notes))
    endpoint = Endpoint(url, None, None)
    try:
        endpoint.connect()
    except Refused as error:
        raise WeftError(f"{url}: {error}") from None
    return endpoint


def _piped() -> str:
    """What stands on standard input. Raises `ConfigError`."""
    try:
        return sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the question on standard input is not UTF-8, from byte {error.start} on") from None


def _talk(conversation: Conversation, endpoint: Endpoint, notes: Console) -> None:
    with contextlib.suppress(ModuleNotFoundError):
        import readline  # noqa: F401  (gives `input` its arrow keys)
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
            notes.print("Once more, or Ctrl-D, leaves.", style="dim")
            continue
        interrupted = False
        if (asked := _command(question, conversation, notes)) is None:
            return
        if asked:
            _answer(conversation, asked, endpoint, notes)


def _line() -> str:
    """A message of one line, or of several."""
    text = input("> ")
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{input('. ')}"
    return text.strip()


def _command(text: str, conversation: Conversation, notes: Console) -> str | None:
    """Do what a line says; what is to be asked after it, '' for nothing, None to leave."""
    word, _, rest = text.partition(" ")
    match word:
        case "/exit" | "/quit":
            return None
        case "/clear":
            conversation.turns.clear()
            notes.print("A new conversation.", style="dim")
        case "/system":
            conversation.system = rest.strip() or None
            notes.print("Told first: " + (conversation.system or "nothing"), style="dim")
        case "/retry":
            return conversation.take_back() or ""
        case "/help":
            notes.print(HELP, end="", style="dim")
        case _ if word.startswith("/") and word[1:].isalpha() and not rest:
            notes.print(f"There is no {word}; /help tells what there is.", style="dim")
        case _:
            return text
    return ""


def _answer(conversation: Conversation, question: str, endpoint: Endpoint, notes: Console) -> int:
    """Show the answer as it comes; 1 when there was none."""
    if not question:
        raise ConfigError("there is no question on standard input")
    status = 0
    ended = ""
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
    if said := ", ".join(part for part in (endpoint.figures() if not status else "", ended) if part):
        notes.print(said, style="red" if status else "dim")
    return status
