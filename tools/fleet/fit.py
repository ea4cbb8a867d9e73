"""`fit` finds the times of an `IterationProfile` in recorded iterations, and how far they are off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.deploy.fleet.profile import Error, Features, Floats


class Fit(NamedTuple):
    dense_ms: tuple[float, ...]
    rest: tuple[float, float, float, float]
    """Milliseconds per context position, query-key pair, chunk and decode."""
    error: Error


def knots_for(rows: Sequence[Features]) -> tuple[float, ...]:
    """Powers of two within the range of recorded tokens, and both ends of the range."""
    tokens = sorted({row.tokens for row in rows})
    powers = [float(1 << i) for i in range(20) if tokens[0] < 1 << i < tokens[-1]]
    return tuple(dict.fromkeys((float(tokens[0]), *powers, float(tokens[-1]))))


def fit(rows: Sequence[Features], seconds: Sequence[float], knots: Sequence[float]) -> Fit:
    """Nonnegative least squares of the relative error. A second round leaves out iterations that are far off, which
    another process disturbed."""
    ms = np.asarray(seconds) * 1e3
    features = _columns(rows, knots)
    keep = np.ones(len(ms), np.bool_)
    parts = np.zeros(features.shape[1])
    for _ in range(2):
        parts = nonnegative(features[keep] / ms[keep, None], np.ones(int(keep.sum())))
        off = np.abs(features @ parts - ms) / ms
        keep = off <= max(0.25, 4 * float(np.median(off)))
    off, fitted = np.abs(features @ parts - ms) / ms, features @ parts
    k = len(knots)
    # A range without iterations has no measured time; times never decrease with tokens.
    dense = np.maximum.accumulate(np.maximum(parts[:k], 1e-6))
    error = Error(len(ms), float(np.median(off)), float(np.quantile(off, 0.9)), float(fitted.sum() / ms.sum() - 1))
    a, b, c, d = (float(x) for x in parts[k:])
    return Fit(tuple(float(x) for x in dense), (a, b, c, d), error)


def _columns(rows: Sequence[Features], knots: Sequence[float]) -> Floats:
    """`[n, knots + 4]`: weights of the knots at each row's tokens, then the other features."""
    tokens = np.array([row.tokens for row in rows], np.float64)
    hats = np.stack([np.interp(tokens, knots, np.eye(len(knots))[i]) for i in range(len(knots))], axis=1)
    rest = np.array([(r.context, r.pairs, r.chunks, r.decodes) for r in rows], np.float64)
    return np.concatenate((hats, rest), axis=1)


def nonnegative(a: Floats, b: Floats) -> Floats:
    """x >= 0 with the least |a x - b|, by coordinate descent. `a [n, k]`, `b [n]`."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    gram, target = (a / scale).T @ (a / scale), (a / scale).T @ b
    x = np.zeros(a.shape[1])
    for _ in range(3000):
        before = x.copy()
        for i in range(len(x)):
            if gram[i, i] > 0:
                x[i] = max(0.0, x[i] + (target[i] - gram[i] @ x) / gram[i, i])
        if np.abs(x - before).max() <= 1e-10 * max(1.0, np.abs(x).max()):
            break
    return np.asarray(x / scale)
