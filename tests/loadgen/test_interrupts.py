"""An interrupt in the middle of things leaves no halves behind."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from weft.loadgen.processes import run_async


class _Interrupted(asyncio.DefaultEventLoopPolicy):
    """Ctrl-C comes while a loop is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[asyncio.AbstractEventLoop] = []

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        os.kill(os.getpid(), signal.SIGINT)
        self.made.append(super().new_event_loop())
        return self.made[-1]


def test_an_interrupt_while_an_event_loop_is_made_leaves_a_closed_one_and_no_coroutine() -> None:
    async def work() -> None:
        raise AssertionError("this is not begun")

    policy = _Interrupted()
    asyncio.set_event_loop_policy(policy)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who is started in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_async(work)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        asyncio.set_event_loop_policy(None)
    assert [loop.is_closed() for loop in policy.made] == [True]
