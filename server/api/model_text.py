"""`ModelText`: tokenizes and checks requests for a loaded model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, NamedTuple

from weft.engine.images.plan import ImageRule
from weft.engine.wire.messages import EngineReady
from weft.server.api.chat_message import ChatMessage
from weft.server.api.protocol import GenerationBody
from weft.server.errors import ApiError, bad_request
from weft.server.text.tokenizer import PairIds, Side, Tokenizer, Truncation

RENDER_SECONDS = 5.0  # time limit of a chat template, in seconds


class PairLimits(NamedTuple):
    """How pairs of texts are truncated. Only documents are, never the query or the end of a prompt."""

    prompt: int | None = None  # tokens of the prompt; -1: what the model allows; None: no limit is asked for
    document: int | None = None  # tokens of the document; None: no limit is asked for
    side: Side = "right"  # the side that is cut

    def total(self, longest: int) -> int | None:
        """The limit of a prompt, at most `longest`; None if nothing may be truncated."""
        if self.prompt is None and self.document is None:
            return None
        return longest if self.prompt in (None, -1) else min(longest, self.prompt or 0)


class EncodedChat(NamedTuple):
    ids: list[int]
    text: str  # rendered, with seams; see `Tokenizer.without_seams`


class ModelText:
    """Tokenizes in worker threads. Rejects text that cannot fit the context before any work."""

    def __init__(self, tokenizer: Tokenizer, ready: EngineReady, threads: Executor, *, control: bool) -> None:
        """`control`: parse special tokens in messages instead of treating them as text."""
        self._tokenizer, self._ready, self._threads, self._control = tokenizer, ready, threads, control

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, param: str, truncation: Truncation | None = None,
        salt: str | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Token ids of texts. Raises `ApiError` for a text that cannot fit. `truncation`: shorten such texts instead.
        `salt`: see `Tokenizer.encode`."""
        if truncation is not None:
            texts = [truncation.text(text, self._longest_text) for text in texts]
        for text in texts:
            self._check_length(len(text), param)
        encode = self._tokenizer.encode
        ids = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: [encode(text, add_special_tokens=add_special_tokens, salt=salt) for text in texts]
        )
        if truncation is None:
            return ids
        bos = self._tokenizer.first_token_id if add_special_tokens else None
        ending = [i for i in encode("", add_special_tokens=True) if i != bos] if add_special_tokens else []
        return [truncation.ids(i, bos, ending) for i in ids]

    async def encode_inputs(
        self, inputs: Sequence[Any], *, add_special_tokens: bool, param: str, truncation: Truncation | None = None
    ) -> list[list[int]]:
        """Token ids of texts, or the client's own token ids. Raises `ApiError`, also for an input without tokens."""
        if isinstance(inputs[0], str):
            found = await self.encode(inputs, add_special_tokens=add_special_tokens, param=param, truncation=truncation)
        else:
            found = [ids if truncation is None else truncation.ids(ids) for ids in inputs]
            for ids in found:
                self.check_ids(ids, param)
        if not all(found):
            raise bad_request(f"{param}: must have at least one token.", param)
        return found

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], limits: PairLimits, form: str, instruction: str
    ) -> list[tuple[list[int], int]]:
        """Token ids of pairs of query and document, and the tokens before the second text if the model distinguishes
        them. form: see `Scorer.prompt`. Raises `ApiError` for a pair that cannot fit, and for one that would have to be
        truncated although that is not asked for."""
        longest = self._ready.max_model_len
        total = limits.total(longest)
        if total is not None:
            cut = Truncation(longest, limits.side)
            pairs = [(query, cut.text(document, self._longest_text)) for query, document in pairs]
        for query, document in pairs:
            self._check_length(len(query) + len(document), "query" if len(query) > len(document) else "documents")
        tokenizer = self._tokenizer

        def encode() -> list[PairIds]:
            if form == "pair":
                return tokenizer.encode_pairs(pairs)
            return [tokenizer.encode_prompt_of(pair, form, instruction) for pair in pairs]

        found = []
        for i, pair in enumerate(await asyncio.get_running_loop().run_in_executor(self._threads, encode)):
            ids = pair.ids if total is None else pair.truncated(total, limits.document, limits.side)
            if len(ids) > (longest if total is None else total):
                how = "give truncate_prompt_tokens: -1 or max_tokens_per_doc to truncate documents"
                if total is not None:
                    raise bad_request(f"query: it leaves no room for document {i} in {total} tokens.", "query")
                raise too_long(longest, f"document {i} makes a prompt of {len(ids)} tokens; {how}", "documents")
            found.append((ids, pair.segment))
        return found

    async def render(self, messages: Sequence[ChatMessage], arguments: Mapping[str, Any]) -> str:
        """The text of a conversation, for display. `arguments`: the template's. Raises `ApiError`."""
        tokenizer, control = self._tokenizer, self._control
        if any(message.images for message in messages):
            raise bad_request("messages: images cannot be shown as text here.", "messages")
        self._check_length(sum(len(message.content or "") for message in messages), "messages")
        text = await self._in_time(lambda: tokenizer.render_chat(messages, arguments, control=control))
        return tokenizer.without_seams(text)

    async def encode_chat(
        self, messages: Sequence[ChatMessage], arguments: Mapping[str, Any], *, add_special_tokens: bool,
        truncation: Truncation | None = None, salt: str | None = None, images: ImageRule | None = None,
    ) -> EncodedChat:  # fmt: skip
        """Render and tokenize a conversation. Raises `ApiError`. `arguments`: the template's, which usually writes the
        special tokens itself. `salt`: see `Tokenizer.encode`. `images`: see `Tokenizer.render_chat`."""
        render, control = self._tokenizer.render_chat, self._control
        if truncation is None:
            self._check_length(sum(len(message.content or "") for message in messages), "messages")
        text = await self._in_time(lambda: render(messages, arguments, control=control, images=images))
        (ids,) = await self.encode(
            [text], add_special_tokens=add_special_tokens, param="messages", truncation=truncation, salt=salt
        )
        return EncodedChat(ids, text)

    async def _in_time(self, render: Callable[[], str]) -> str:
        """Run `render` in a worker thread. Raises `ApiError` 400 if it takes too long once it has a thread."""
        loop = asyncio.get_running_loop()

        def begin() -> None:
            with suppress(RuntimeError):  # the client may have disconnected
                limit.reschedule(loop.time() + RENDER_SECONDS)

        def work() -> str:
            loop.call_soon_threadsafe(begin)
            return render()

        try:
            async with asyncio.timeout(None) as limit:
                return await loop.run_in_executor(self._threads, work)
        except TimeoutError:
            what = f"The chat template took longer than {RENDER_SECONDS:g} s to render these messages."
            raise bad_request(what, "messages") from None

    @property
    def _longest_text(self) -> int:
        """The maximum number of characters that fill the context."""
        return self._ready.max_model_len * max(self._tokenizer.longest_token, 8)

    def _check_length(self, characters: int, param: str) -> None:
        if characters > self._longest_text:
            what = f"the {param} has {characters} characters, more than that many tokens can hold"
            raise too_long(self._ready.max_model_len, what, param)

    def check_sampled_ids(self, body: GenerationBody) -> None:
        """Check the token ids in a body's sampling fields. Raises `ApiError`."""
        self.check_ids(body.stop_token_ids, "stop_token_ids")
        self.check_ids(list(body.logit_bias), "logit_bias")
        self.check_ids(body.logprob_token_ids, "logprob_token_ids")
        self.check_ids(body.allowed_token_ids or [], "allowed_token_ids", at_most=self._ready.vocab_size)

    def check_ids(self, ids: Sequence[int], param: str, *, at_most: int | None = None) -> None:
        """Raises `ApiError` for ids outside the vocabulary and for more than `at_most` ids."""
        if at_most is not None and len(ids) > at_most:
            raise bad_request(f"{param}: must have at most {at_most} token ids, not {len(ids)}.", param)
        size = self._ready.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            raise bad_request(f"{param}: token ids must be between 0 and {size - 1}.", param)


def too_long(max_model_len: int, what: str, param: str) -> ApiError:
    limit = f"This model's maximum context length is {max_model_len} tokens"
    return bad_request(f"{limit}. However, {what}. Please reduce the length.", param, "context_length_exceeded")
