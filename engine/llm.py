"""`LLM`: runs the engine in this process, for scripts and notebooks. Text in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.config.tokenizer import load_tokenizer, read_template
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError, RequestError, invalid_option
from weft.engine.model.hub import find_model
from weft.engine.progress import ProgressBar
from weft.engine.wire.messages import AddRequest, Finish, TokenLogprobs
from weft.engine.wire.sampling import SamplingParams

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor
Messages = Sequence[dict[str, Any]]

_NO_IDS = "a prompt of token ids must be a list, an array or a tensor of 32-bit integers"


class Completion(NamedTuple):
    """The answer to one prompt. `finish_reason` is 'stop' or 'length', or an error: 'nonfinite' if the model computed
    NaN or inf, 'refused' if the constraints allowed no token."""

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_token_ids: list[int]
    cached_tokens: int
    logprobs: list[TokenLogprobs]

    def __getitem__(self, key: Any) -> Any:
        """Return a field by name, as Nano-vLLM's outputs do, or by position. Raises `KeyError` for another name."""
        if isinstance(key, str) and key not in self._fields:
            raise KeyError(key)
        return getattr(self, key) if isinstance(key, str) else tuple.__getitem__(self, key)


def _several(prompts: Any) -> Sequence[Any]:
    """Return the argument of `LLM.generate` as a sequence of prompts. Raises `RequestError`."""
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise RequestError(
            f"prompts must be text, token ids or a list of them, not {type(prompts).__name__}", "prompts"
        )
    return [prompts] if len(prompts) and isinstance(_plain(prompts[0]), int) else prompts


def _plain(value: Any) -> Any:
    """Convert an array or tensor to Python numbers."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic | Tensor) else value


def _token_ids(prompt: Any) -> list[int]:
    """Raises `RequestError` if the ids are not integers."""
    try:
        # numpy would truncate 1.9 and accept "7".
        return [index(token) for token in _plain(prompt)]
    except TypeError:
        raise RequestError(_NO_IDS, "prompt") from None


def _as_bytes(tokens: list[int]) -> bytes:
    try:
        return np.fromiter(tokens, np.int32, len(tokens)).tobytes()
    except OverflowError:
        raise RequestError(_NO_IDS, "prompt") from None


class LLM:
    """A model loaded in this process::

        LLM("demo").generate(["1 2 3"], SamplingParams(max_tokens=8, temperature=0))

    `model` is 'demo', a directory, or ORG/NAME on the Hugging Face hub. Keyword arguments are fields of `EngineConfig`.
    `progress` shows a bar on stderr while the model loads. Raises `WeftError`, with one clear line, if the model or an
    option is invalid."""

    def __init__(self, model: str = "demo", *, progress: bool = True, **options: Any) -> None:
        try:
            config = EngineConfig(model=model, **options)
        except ValidationError as error:
            raise ConfigError(": ".join(filter(None, invalid_option(error, EngineConfig)))) from None
        if model != "demo":
            there = find_model(model, config.revision, weights=config.load_format != "dummy")
            config = config.model_copy(update={"model": str(there)})
        with ProgressBar(enabled=progress) as bar:
            self.engine = Engine(config, bar)
        self.tokenizer = load_tokenizer(config.tokenizer_path)
        if config.chat_template is not None:
            self.tokenizer.chat_template = read_template(config.chat_template)
        self._next_handle = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Complete each prompt: text, or token ids in a list, a numpy array or a torch tensor; the rows of one with two
        dimensions are a prompt each. One `SamplingParams` for all, or one each. `use_tqdm` means the same as
        `progress`. Raises `RequestError`."""
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else _token_ids(p) for p in _several(prompts)]
        return self._run(ids, params, progress and use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer one conversation or several, through the model's chat template."""
        conversations = [messages] if len(messages) and isinstance(messages[0], dict) else messages
        ids = [
            self.tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=True, return_dict=False)
            for c in conversations
        ]
        return self._run(ids, params or SamplingParams(max_tokens=None, temperature=0.0), progress)

    def _run(
        self, ids: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None, progress: bool
    ) -> list[Completion]:
        if params is None:
            params = SamplingParams()
        each = [params] * len(ids) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(ids):
            raise RequestError(f"{len(each)} SamplingParams for {len(ids)} prompts", "params")
        base = self._next_handle
        self._next_handle += len(ids)
        try:
            for handle, (prompt, wanted) in enumerate(zip(ids, each, strict=True), start=base):
                self.engine.add(AddRequest(handle=handle, prompt_token_ids=_as_bytes(prompt), params=wanted))
            return self._collect(base, ids, progress)
        except BaseException:
            # On a refused prompt or Ctrl-C, leave the engine idle for the next call.
            for handle in range(base, base + len(ids)):
                self.engine.abort(handle)
            while self.engine.has_work:
                self.engine.step()
            raise

    def _collect(self, base: int, ids: list[list[int]], progress: bool) -> list[Completion]:
        """Step until the requests from handle `base` on have ended."""
        tokens: list[list[int]] = [[] for _ in ids]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in ids]
        finish = [Finish.RUNNING] * len(ids)
        cached = [0] * len(ids)
        columns = (TextColumn("[progress.description]{task.description}"), BarColumn(), MofNCompleteColumn())
        # On stderr, because stdout belongs to the caller.
        console = Console(stderr=True)
        shown = progress and (console.is_terminal or console.is_jupyter)
        with Progress(*columns, TimeRemainingColumn(), console=console, disable=not shown, transient=True) as bar:
            task = bar.add_task("generating", total=len(ids))
            while self.engine.has_work:
                outputs = self.engine.step()
                if outputs is None:
                    continue
                for started in outputs.started:
                    cached[started.handle - base] = started.cached_tokens
                for handle, entries in outputs.logprobs.items():
                    logprobs[handle - base] += entries
                for handle, token, reason in zip(*(c.tolist() for c in outputs.columns()), strict=True):
                    if token >= 0:
                        tokens[handle - base].append(token)
                    if reason:
                        finish[handle - base] = Finish(reason)
                        bar.advance(task)
        return [
            Completion(self.tokenizer.decode(t, skip_special_tokens=True), t, f.name.lower(), p, c, lp)
            for t, f, p, c, lp in zip(tokens, finish, ids, cached, logprobs, strict=True)
        ]

    def close(self) -> None:
        self.engine.close()
