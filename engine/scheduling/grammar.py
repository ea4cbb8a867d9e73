"""`Grammar`: where one request stands in what its output must follow; llguidance works out which tokens may come next.

A grammar must know a token before it can say what may follow, so a request with one is launched again only when its
last step is committed and the mask for the next is there. Requests without a grammar never wait for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

Mask = npt.NDArray[np.int32]
"""`[ceil(V / 32)]`, bit i of word w: token 32 w + i is allowed"""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Compiled:
    """A grammar at its beginning. Shared: requests copy the matcher, which shares what was compiled."""

    matcher: LLMatcher
    first: Mask


class Grammar:
    """One request's copy of a grammar.

    compute: starts to work out the next masks of several grammars at once, beside the iterations.
    """

    def __init__(self, compiled: Compiled, compute: Callable[[Sequence[Grammar]], None]) -> None:
        self.compute = compute
        self._compiled = compiled
        """held: what it takes is counted for as long as a request uses it"""
        self.matcher = compiled.matcher.deep_copy()
        self._allowed = compiled.first
        self._computing: Future[None] | None = None

    @property
    def ready(self) -> bool:
        return self._computing is None or self._computing.done()

    def allowed(self) -> Mask:
        """The mask of the next token; waits for it when it is still being computed."""
        if self._computing is not None:
            self._computing.result()
            self._computing = None
        return self._allowed

    def expect(self, mask: Mask, computing: Future[None]) -> None:
        self._allowed, self._computing = mask, computing
