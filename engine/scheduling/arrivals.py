"""`Arrivals`: converts messages into requests."""

from __future__ import annotations

import time

import numpy as np

from weft.engine.memory.pages import PagePool
from weft.engine.scheduling.bad_words import only
from weft.engine.scheduling.request import Request, check_request
from weft.engine.scheduling.thinking import ThinkingBound
from weft.engine.wire.messages import AddRequest


class Arrivals:
    """Numbers an engine's requests in arrival order, and assigns seeds to those without one."""

    def __init__(
        self, pool: PagePool, *, max_model_len: int, vocab_size: int, eos_token_ids: tuple[int, ...], seed: int
    ) -> None:
        self._pool = pool
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._seeds = np.random.default_rng(seed)
        self._count = 0

    def request(self, message: AddRequest) -> Request:
        """Return the request of a message. Raises `RequestError` if it can never be served."""
        params = message.params
        token_ids = np.frombuffer(message.prompt_token_ids, np.int32)
        max_total_tokens = check_request(
            token_ids,
            params,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            max_tokens_in_pool=self._pool.capacity * self._pool.page_size,
        )
        eos = () if params.ignore_eos else self._eos_token_ids
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**63))
        self._count += 1
        request = Request(
            handle=message.handle,
            token_ids=token_ids,
            prompt_len=len(token_ids),
            params=params,
            max_total_tokens=max_total_tokens,
            priority=message.priority,
            order=self._count,
            arrival=time.monotonic(),
            salt=message.cache_salt,
            stop_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
            seed=seed % 2**64,
            leader=message.leader,
            tenant=message.tenant,
            metered=message.metered,
            retention=message.retention,
            names=message.names,
        )
        if params.allowed_token_ids is not None:
            request.allowed = only(params.allowed_token_ids, self._vocab_size)
        if params.thinking is not None:
            request.thinking = ThinkingBound(params.thinking, self._vocab_size)
        return request
