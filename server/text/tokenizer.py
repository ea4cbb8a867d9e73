"""`Tokenizer`: a model's tokenizer and chat template, without torch."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError
from pydantic import BaseModel

from weft.engine.config import GGUF_INDEX
from weft.engine.config.tokenizer import load_tokenizer, require_tokenizer
from weft.engine.errors import ModelError
from weft.engine.images.plan import ImageRule
from weft.server.bodies import parse_json
from weft.server.errors import ApiError, bad_request, clip
from weft.server.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from weft.server.text.encoder import Encoder, any_of
from weft.server.text.gguf_tokenizer import GgufTokenizer
from weft.server.text.image_marks import find_form, for_template
from weft.server.text.token_bytes import TokenBytes

_CONTEXT_TOKENS = 8  # prompt tokens in a window detokenizer's context

_TAIL_TOKENS = 16

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TRUSTED = ("system", "developer", "assistant")  # their messages may spell control tokens


class Tokenizer:
    """Thread-safe: immutable while it serves. Call encoding and rendering in worker threads."""

    def __init__(self, hf: Any) -> None:
        """`hf`: a `PreTrainedTokenizerFast` or compatible object with a `backend_tokenizer`."""
        self._hf = hf
        self._backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.skip_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that never appear in text."""
        self.mark_ids = frozenset(
            token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        )
        """Ids that grammars do not treat as text: special tokens and, as in llguidance, all that look like tags."""
        self._encoder = Encoder(self._backend)
        self._control = [token.content for token in added.values() if token.special and len(token.content) > 1]
        self._spells_control = any_of(self._control)
        self._seam = str(secrets.randbits(96))
        """Breaks up text that spells a control token, from `as_text` to `encode`. Random digits pass any template and
        cannot be guessed."""
        self._token_bytes = TokenBytes.of(self._backend)
        self.token_text: Callable[[int], str] = cache(lambda token_id: spell(self.token_bytes(token_id)))
        """A token's bytes as a string, see `spell`."""
        self._byte_size = cache(lambda token_id: len(self.token_bytes(token_id)))
        self.longest_token = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        """Maximum characters of one token."""
        self._template_fault = self._find_template_fault()
        self.takes_late_system = self._find_late_system()
        """The chat template renders a later system message at its position."""
        self._content_form = find_form(self._render_user, self._seam)

    @classmethod
    def load(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """Read the tokenizer of a model directory. Takes a second, so call it in a thread. Raises `ModelError`.
        `chat_template`: replaces the model's templates."""
        if not path.is_dir():
            raise ModelError(f"the model directory {path} does not exist")
        require_tokenizer(path)
        hf = GgufTokenizer(path) if (path / GGUF_INDEX).is_file() else load_tokenizer(path)
        if chat_template is not None:
            hf.chat_template = chat_template
        return cls(hf)

    def name_unknown_ids(self) -> None:
        """Render ids outside the vocabulary as `<id>`, for a tokenizer that substitutes another one."""
        if self._token_bytes is not None:
            self._token_bytes.names_unknown = True

    def hide(self, token_ids: Iterable[int]) -> None:
        """Hide additional ids from text, such as end tokens that are not marked as special."""
        self.skip_ids |= frozenset(token_ids)

    # -- to ids

    def encode(self, text: str, *, add_special_tokens: bool = True, salt: str | None = None) -> list[int]:
        """Token ids of a text. `salt`: cache segments of the text for later turns with the same salt."""
        first, *rest = text.split(self._seam)
        if salt is not None and not add_special_tokens:
            ids = self._encoder.encode_cached(first, salt)
        else:
            (ids,) = self._encoder.encode([first], add_special_tokens=add_special_tokens)
        if salt is not None:
            return sum((self._encoder.encode_cached(part, salt) for part in rest), ids)
        return sum(self._encoder.encode(rest, add_special_tokens=False), ids)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[PairIds]:
        """Token ids of pairs of texts, in the tokenizer's own form."""
        inputs = getattr(self._hf, "init_kwargs", {}).get("model_input_names")  # only if the model's files list them
        marked = inputs is None or "token_type_ids" in inputs
        found = []
        for each in self._backend.encode_batch(list(pairs), add_special_tokens=True):
            own = [i for i, number in enumerate(each.sequence_ids) if number == 1]
            at = (own[0], own[-1] + 1) if own else (len(each.ids), len(each.ids))
            segment = next((i for i, kind in enumerate(each.type_ids) if kind), 0) if marked else 0
            found.append(PairIds(list(each.ids), *at, segment))
        return found

    def encode_prompt_of(self, pair: tuple[str, str], form: str, instruction: str) -> PairIds:
        """Token ids of the prompt that asks whether a document answers a query. form: `template` for the chat template,
        else a format string. Special tokens in the texts remain text."""
        query, document = map(self.as_text, pair)
        mark = f"{self._seam}document{self._seam}"
        if form == "template":
            conversation = [{"role": "query", "content": query}, {"role": "document", "content": mark}]
            prompt: str = self._hf.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, instruction=instruction
            )
        else:
            prompt = form.format(instruction=self.as_text(instruction), query=query, document=mark)
        before, _, after = prompt.partition(mark)
        whole, end = (
            self.encode(before + document, add_special_tokens=False),
            self.encode(after, add_special_tokens=False),
        )
        begin = len(self.encode(before, add_special_tokens=False))
        return PairIds(whole + end, min(begin, len(whole)), len(whole))

    def as_text(self, text: str) -> str:
        """The text, with seams so that `encode` finds no control tokens in it."""
        if self._spells_control is None or not self._spells_control.search(text):
            return text
        inside: set[int] = set()
        for token in self._control:
            at = text.find(token)
            while at >= 0:
                inside.add(at + 1)
                at = text.find(token, at + 1)
        cuts = [0, *sorted(inside), len(text)]
        return self._seam.join(text[begin:end] for begin, end in pairwise(cuts))

    def without_seams(self, text: str) -> str:
        """Text from `as_text` or `render_chat` for display; it no longer separates text from control tokens."""
        return text.replace(self._seam, "")

    @property
    def has_chat_template(self) -> bool:
        return self._hf.chat_template is not None

    @property
    def can_chat(self) -> bool:
        return self.has_chat_template and self._template_fault is None

    def faults(self, vocab_size: int) -> list[str]:
        """Problems of this tokenizer with a model of `vocab_size`, one line each, for the operator."""
        found = []
        if (fault := self._template_fault) is not None:
            found.append(f"the model's chat template is broken: {fault}; chat requests fail with 500")
        if (size := self.vocab_size) > vocab_size:
            what = f"the tokenizer has {size} tokens, but the model only {vocab_size}"
            found.append(f"{what}; prompts that use the others are rejected")
        return found

    def _find_template_fault(self) -> str | None:
        """Why the template cannot render any conversation; None if it can be parsed."""
        if not self.has_chat_template:
            return None
        try:
            self._hf.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
        except TemplateSyntaxError as error:
            return f"line {error.lineno}: {clip(str(error.message))}"
        except Exception:
            pass
        return None

    def _find_late_system(self) -> bool:
        before, late = f"a{self._seam}", f"b{self._seam}"
        roles = [("user", before), ("assistant", "c"), ("system", late), ("user", "d")]
        try:
            conversation = [{"role": role, "content": content} for role, content in roles]
            text: str = self._hf.apply_chat_template(conversation, tokenize=False)
        except Exception:  # templates raise anything
            return False
        return -1 < text.find(before) < text.find(late)

    def _render_user(self, content: Any) -> str:
        text: str = self._hf.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        return text

    @property
    def template_names(self) -> tuple[str, ...]:
        """Names of the model's templates, if it has several."""
        template = self._hf.chat_template
        return tuple(template) if isinstance(template, dict) else ()

    @property
    def chat_template(self) -> str | None:
        """The template's text. If there are several, the one for tools or the default."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            return template.get("tool_use") or template.get("default")
        return template

    def render_chat(
        self, messages: Sequence[BaseModel], arguments: Mapping[str, Any], *, control: bool = False,
        images: ImageRule | None = None,
    ) -> str:  # fmt: skip
        """Render a conversation for `encode`. Raises `ApiError`. Special tokens spelled by users and tools remain text
        unless `control`. `messages`: `ChatMessage`s. `arguments`: the template's, from `TemplateBody`. `images`: how to
        write images, if there are marks of them."""
        if not self.has_chat_template:
            what = "This model has no chat template, so it cannot chat"
            how = "Use /v1/completions, or start the server with --chat-template FILE"
            raise bad_request(f"{what}. {how}.", "messages", "no_chat_template")
        if self._template_fault is not None:
            why = f"This model's chat template is broken ({self._template_fault}); use /v1/completions."
            raise ApiError(500, why, code="broken_chat_template")
        if (named := arguments.get("chat_template")) is not None and named not in self.template_names:
            names = f": {', '.join(self.template_names)}" if self.template_names else ""
            what = f"Chat templates in requests are not supported; only the model's own can be used{names}."
            raise bad_request(what, "chat_template")
        template = self._hf.chat_template[named] if named is not None else self.chat_template or ""
        roles = {} if "developer" in template else {"developer": "system"}
        absent = None if _TESTS_FOR_NONE.search(template) else ""
        conversation = [_as_template_input(message, roles, absent) for message in messages]
        for message in conversation:
            if "reasoning_content" in message:
                _place_thinking(message, template)
        if not control:
            for message in conversation:
                if message["role"] not in _TRUSTED and isinstance(message["content"], str):
                    message["content"] = self.as_text(message["content"])
                    if "name" in message:
                        message["name"] = self.as_text(message["name"])
            outer = [name for name in ("tools", "documents") if name in arguments]
            arguments = {**arguments, **{name: self._strings_as_text(arguments[name]) for name in outer}}
        written = "" if images is None else images.written
        for message in conversation:
            if isinstance(message["content"], str):
                message["content"] = for_template(message["content"], self._content_form, written)
        try:
            text = self._render(conversation, arguments)
            left_out = self._left_out(conversation, arguments)
        except (TemplateError, TypeError, ValueError, LookupError) as error:  # templates raise them for odd messages
            self._blame_tool(conversation, arguments)
            # the template's own words, or those of Python, which say nothing to a client
            own = isinstance(error, TemplateError) and not isinstance(error, UndefinedError)
            reason = clip(self.without_seams(str(error))) if own else "a field has a value that it does not expect."
            raise bad_request(f"The chat template rejects these messages: {reason}", "messages") from error
        if left_out:
            what = f"The chat template leaves out messages with the role {left_out[0]}"
            raise bad_request(f"{what}. Use one of {', '.join(_ROLES)}.", "messages")
        return text if images is None else text.replace(written, written.join(images.around))

    def _left_out(self, conversation: list[dict[str, Any]], arguments: Mapping[str, Any]) -> list[str]:
        """Roles outside `_ROLES` whose messages the template does not render."""
        probes = {i: f"_{i}_{self._seam}" for i, message in enumerate(conversation) if message["role"] not in _ROLES}
        if not probes:
            return []
        probed = [{**message, "content": probes.get(i, message["content"])} for i, message in enumerate(conversation)]
        text = self._render(probed, arguments)
        return [conversation[i]["role"] for i, probe in probes.items() if probe not in text]

    def _blame_tool(self, conversation: list[dict[str, Any]], arguments: Mapping[str, Any]) -> None:
        """Raises `ApiError` if the conversation can be rendered, but not with one of the tools."""
        for i, tool in enumerate([None, *(arguments.get("tools") or ())]):
            try:
                self._render(conversation, {**arguments, "tools": [tool] if tool else []})
            except (TemplateError, TypeError, ValueError, LookupError) as error:
                if tool is None:
                    return
                what = f"tools[{i - 1}].function.parameters"
                why = "the chat template cannot render this schema; a value has a type that it does not expect"
                raise bad_request(f"{what}: {why}", what) from error

    def _render(self, conversation: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        if all(message["content"] is not None for message in conversation):
            return self._hf.apply_chat_template(conversation, tokenize=False, **arguments)
        # `apply_chat_template` drops nulls, which breaks templates that test for them.
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self._hf.special_tokens_map, **arguments}
        template = self._hf.get_chat_template(variables.pop("chat_template", None), variables.get("tools"))
        return render_jinja_template(conversations=[conversation], chat_template=template, **variables)[0][0]

    def _strings_as_text(self, value: Any) -> Any:
        """Apply `as_text` to all strings of a JSON value."""
        if isinstance(value, str):
            return self.as_text(value)
        if isinstance(value, list):
            return [self._strings_as_text(item) for item in value]
        if isinstance(value, dict):
            return {self._strings_as_text(key): self._strings_as_text(item) for key, item in value.items()}
        return value

    # -- to text

    def tail(self, token_ids: Sequence[int]) -> str:
        """The text of the last few tokens, including special tokens."""
        return self._decode(token_ids[-_TAIL_TOKENS:])

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of a sequence. `special`: with special tokens."""
        if special:
            return self._decode(token_ids)
        return self._decode([token_id for token_id in token_ids if token_id not in self.skip_ids])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def detokenizer(self, prompt: Sequence[int] = (), *, show: frozenset[int] = frozenset()) -> Detokenizer:
        """A detokenizer for text that continues `prompt`. `show`: special tokens to keep in the text."""
        skip = self.skip_ids - show
        if self._token_bytes is not None:
            at_start = all(token_id in self.skip_ids for token_id in prompt)
            return ByteDetokenizer(self._token_bytes, skip, at_start=at_start)
        context = [token_id for token_id in prompt if token_id not in self.skip_ids]
        return WindowDetokenizer(self._decode, skip, context[-_CONTEXT_TOKENS:])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be special."""
        if self._token_bytes is not None:
            return self._token_bytes[token_id]
        return self._decode([token_id]).encode()

    def byte_sizes(self, token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """The number of bytes of each token."""
        return np.fromiter(map(self._byte_size, token_ids), np.int64, len(token_ids))

    def token_id(self, name: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        return self._backend.token_to_id(name)

    def token_name(self, token_id: int) -> str:
        """A token's spelling in the vocabulary."""
        return self._backend.id_to_token(token_id) or ""

    @property
    def first_token_id(self) -> int | None:
        """The special token before a text: that of a decoder, or that of an encoder."""
        bos: int | None = self._hf.bos_token_id
        return getattr(self._hf, "cls_token_id", None) if bos is None else bos

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The content of its `tokenizer.json`."""
        return self._backend.to_str()

    def info(self) -> dict[str, Any]:
        return {
            "tokenizer_class": type(self._hf).__name__,
            "vocab_size": self.vocab_size,
            "bos_token": self._hf.bos_token,
            "eos_token": self._hf.eos_token,
            "pad_token": self._hf.pad_token,
            "unk_token": self._hf.unk_token,
            "chat_template": self._hf.chat_template,
        }


def spell(data: bytes) -> str:
    """A token's bytes as a string. Incomplete characters are escaped, so that tokens stay distinct."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


_TESTS_FOR_NONE = re.compile(r"""content['"\])]*\s*(?:is\s+(?:not\s+)?none|[!=]=\s*none)\b""", re.IGNORECASE)
"""Matches templates that distinguish null content from empty content; others would print "None" or fail."""


def _as_template_input(message: BaseModel, roles: Mapping[str, str], absent: str | None) -> dict[str, Any]:
    """A message for the template: without absent keys, and with tool arguments as objects. `roles`: replacements for
    unsupported roles. `absent`: the value of missing content."""
    data = message.model_dump(exclude_none=True)
    data["role"] = roles.get(data["role"], data["role"])
    data.setdefault("content", absent)
    for call in data.get("tool_calls", ()):
        with suppress(ValueError):
            call["function"]["arguments"] = parse_json(call["function"]["arguments"])
    return data


_READS = {name: re.compile(rf"""\.{name}\b|[\['"]{name}['"]""") for name in ("reasoning", "thinking")}
_THINKING_PART = re.compile(r"""type['"]?\]?\s*==\s*['"]thinking['"]""")


def _place_thinking(message: dict[str, Any], template: str) -> None:
    """Copy `reasoning_content` to where the template looks for it."""
    thinking = message["reasoning_content"]
    if _THINKING_PART.search(template) and isinstance(message["content"], str | None):
        # Mistral's form: a part of the content.
        text = [{"type": "text", "text": message["content"]}] if message["content"] else []
        message["content"] = [{"type": "thinking", "thinking": thinking, "closed": True}, *text]
        return
    for name, reads in _READS.items():
        if reads.search(template):
            message[name] = thinking
    if "thinking" in message and message.get("tool_calls") and message["content"] and "<|channel|>" in template:
        # gpt-oss renders either of them before a call and rejects both.
        message["thinking"], message["content"] = f"{thinking}\n\n{message['content']}", ""


Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class PairIds:
    """Token ids of a query and a document, with the document's from `begin` to `end`."""

    ids: list[int]
    begin: int
    end: int
    segment: int = 0  # tokens before the second text, if the tokenizer marks it as such

    def truncated(self, limit: int, document: int | None, side: Side) -> list[int]:
        """The ids, with the document cut to `document` tokens and to what `limit` leaves for it."""
        size = self.end - self.begin
        kept = max(0, min(size, size if document is None else document, limit - (len(self.ids) - size)))
        own = self.ids[self.end - kept : self.end] if side == "left" else self.ids[self.begin : self.begin + kept]
        return self.ids[: self.begin] + own + self.ids[self.end :]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cuts prompts to at most `limit` tokens, at `side`."""

    limit: int
    side: Side

    def text(self, text: str, longest: int) -> str:
        """Cut a text to the `longest` characters that the kept tokens can cover."""
        return text[-longest:] if self.side == "left" else text[:longest]

    def ids(self, ids: list[int], bos: int | None = None, ending: Sequence[int] = ()) -> list[int]:
        """Cut token ids. `bos`: a leading token to keep. `ending`: tokens to keep at the end, if they are there."""
        if len(ids) <= self.limit:
            return ids
        if self.side == "right":
            count = min(len(ending), self.limit) if ids[len(ids) - len(ending) :] == list(ending) else 0
            return ids[: self.limit - count] + ids[len(ids) - count :]
        kept = 1 if ids[0] == bos and self.limit else 0
        return ids[:kept] + ids[len(ids) - self.limit + kept :]
