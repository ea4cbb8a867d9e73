"""Errors of the load generator. Each is one line with the remedy."""

from __future__ import annotations


class LoadError(Exception):
    """Unusable input or an unusable server. Becomes one line on stderr and exit status 2."""


class AnswerTooLong(LoadError):
    """A server sent more than any valid answer has."""
