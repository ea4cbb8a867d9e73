"""`LoadError`: input or a server that the load generator cannot work with; one line that says what to change."""

from __future__ import annotations


class LoadError(Exception):
    """Becomes one line on stderr and exit status 2."""


class AnswerTooLong(LoadError):
    """A server sends something without an end; the message says what."""
