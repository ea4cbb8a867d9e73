"""An interrupt at any time leaves no partial state."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from weft.loadgen.processes import run_async


class _Interrupted(asyncio.DefaultEventLoopPolicy):
    """Ctrl-C arrives while a loop is created."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[asyncio.AbstractEventLoop] = []

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        os.kill(os.getpid(), signal.SIGINT)
        self.made.append(super().new_event_loop())
        return self.made[-1]


def test_an_interrupt_while_an_event_loop_is_created_leaves_a_closed_loop_and_no_coroutine() -> None:
    async def work() -> None:
        raise AssertionError("this is not begun")

    policy = _Interrupted()
    asyncio.set_event_loop_policy(policy)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process started in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_async(work)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        asyncio.set_event_loop_policy(None)
    assert [loop.is_closed() for loop in policy.made] == [True]
