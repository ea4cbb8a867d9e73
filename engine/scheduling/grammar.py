"""`Grammar`: the state of one request in its grammar. llguidance computes which tokens are allowed next.

A grammar needs a token before it can compute the mask after it. So a request with a grammar is launched again only when
its last step is committed and the next mask is ready. Requests without a grammar never wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

Mask = npt.NDArray[np.int32]  # `[ceil(V / 32)]` int32: bit i of word w is set if token 32 w + i is allowed


@dataclass(eq=False, slots=True, weakref_slot=True)
class Compiled:
    """A grammar in its initial state. Requests copy the matcher; copies share the compiled grammar."""

    matcher: LLMatcher
    first: Mask


class Grammar:
    """One request's copy of a grammar. `compute` starts to compute the next masks of several grammars on threads.
    `compute_ahead` returns the masks of several grammars before and after each of their draft tokens, as far as the
    grammar accepts them."""

    def __init__(
        self, compiled: Compiled, compute: Callable[[Sequence[Grammar]], None],
        compute_ahead: Callable[[Sequence[tuple[Grammar, Sequence[int]]]], list[Sequence[Mask]]],
    ) -> None:  # fmt: skip
        self.compute, self.compute_ahead = compute, compute_ahead
        self._compiled = compiled  # a reference that keeps its memory counted while a request uses it
        self.matcher = compiled.matcher.deep_copy()
        self._allowed = compiled.first
        self._computing: Future[None] | None = None

    @property
    def ready(self) -> bool:
        return self._computing is None or self._computing.done()

    def allowed(self) -> Mask:
        """Return the mask of the next token, waiting for it if needed."""
        if self._computing is not None:
            self._computing.result()
            self._computing = None
        return self._allowed

    def expect(self, mask: Mask, computing: Future[None]) -> None:
        self._allowed, self._computing = mask, computing
