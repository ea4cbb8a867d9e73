"""`Chances`: the chance that each token of a draft is right, learned from earlier drafts and the text that came.

A draft can be compared with the output whether or not it was verified, so the chances are learned without a price.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

MATCHES = (2, 3, 4, 6, 9, 16)  # lengths of matches at which a new class begins
AGREEMENTS = (0.3, 0.5, 0.7, 0.9, 0.999)  # likewise for agreement
POSITIONS = (1, 3)  # likewise for the position in the draft
FIRST_CHANCES = (0.05, 0.2, 0.4, 0.5, 0.7, 0.8, 0.85)
"""Chance for each class of match before anything is learned, at full agreement."""
PRIOR_WEIGHT = 4.0  # trials that the first chance counts as
MEMORY = 2000.0  # trials of a class after which the older ones count half
HIGHEST = 0.98
OWN_WEIGHT = 6.0  # trials that all requests' chances count as within one request
OWN_MEMORY = 0.95  # decay of a request's earlier trials, for each draft


class Own:
    """How one request's drafts do, compared with what was expected of them."""

    def __init__(self) -> None:
        self.right = self.expected = 0.0

    @property
    def factor(self) -> float:
        return (self.right + OWN_WEIGHT) / (self.expected + OWN_WEIGHT)


class Chances:
    """The chances of one engine's drafts."""

    def __init__(self) -> None:
        shape = len(MATCHES) + 1, len(AGREEMENTS) + 1, len(POSITIONS) + 1
        first = np.array(FIRST_CHANCES)[:, None, None] * np.array([0.2, 0.4, 0.6, 0.8, 0.95, 1.0])[:, None]
        self._tried = np.full(shape, PRIOR_WEIGHT)
        self._right = np.broadcast_to(first, shape) * PRIOR_WEIGHT

    def _classes(self, match: int, agreement: Sequence[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        number = len(agreement)
        return (
            np.full(number, np.searchsorted(MATCHES, match, "right")),
            np.searchsorted(AGREEMENTS, agreement, "right"),
            np.searchsorted(POSITIONS, np.arange(number), "right"),
        )

    def survival(self, match: int, agreement: Sequence[float], own: Own) -> list[float]:
        """Return for each token the chance that it and all before it are right."""
        classes = self._classes(match, agreement)
        chances = np.minimum(self._right[classes] / self._tried[classes] * own.factor, HIGHEST)
        return list(accumulate(chances.tolist(), mul))

    def learn(self, match: int, agreement: Sequence[float], right: int, tried: int, own: Own) -> None:
        """Take in a draft of which `tried` tokens met the text, the first `right` of them with success. `tried` is
        `right`, or one more."""
        if tried == 0:
            return
        classes = self._classes(match, agreement[:tried])
        expected = self._right[classes] / self._tried[classes]
        own.right = own.right * OWN_MEMORY + right
        own.expected = own.expected * OWN_MEMORY + float(expected.sum())
        np.add.at(self._tried, classes, 1.0)
        np.add.at(self._right, tuple(axis[:right] for axis in classes), 1.0)
        old = self._tried > MEMORY
        if old.any():
            self._tried[old] /= 2
            self._right[old] /= 2
