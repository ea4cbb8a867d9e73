"""Pauses between restarts grow, old restarts are forgotten, and too many of them end the daemon."""

from __future__ import annotations

from weft.server.daemon.restarts import WINDOW_SECONDS, Restarts


def test_pauses_grow_up_to_the_longest() -> None:
    restarts = Restarts(1, 5, clock=lambda: 0.0)
    assert [restarts.next_pause() for _ in range(5)] == [1, 2, 4, 5, 5]
    restarts.forget()
    assert restarts.next_pause() == 1


def test_the_limit_counts_recent_restarts() -> None:
    now = 0.0
    restarts = Restarts(1, 30, 2, clock=lambda: now)
    assert [restarts.next_pause() for _ in range(3)] == [1, 2, None]
    assert restarts.count == 2
    now = WINDOW_SECONDS + 1
    assert restarts.next_pause() == 1
