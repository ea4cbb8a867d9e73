"""`end_tokens`: collects the tokens that end an answer from every file of a checkpoint that can name them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

NAMES = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]",
    "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
"""Names of tokens that end a turn in any model that has them."""
_HARMONY = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"}, {"<|channel|>", "<|message|>"})
"""A model that has one of these pairs ends only a part of its answer with `<|end|>`."""
_NESTED = ("text_config", "llm_config", "language_config")  # Configuration of the language model inside another one.
_TOKENIZER = "tokenizer_config.json"
_ANSWER = "weft-answer"
_HEAD = 1 << 21  # Characters of `tokenizer.json` that hold the added tokens of most models.


class EndTokens(NamedTuple):
    """End tokens with the reason for each."""

    sources: dict[int, list[str]]  # Token id -> files that name it.
    ignored: dict[int, list[str]]  # Ids outside the vocabulary.
    names: dict[int, str]  # Token id -> its name, as far as known.

    def __str__(self) -> str:
        used = [f"{i} {self.names.get(i, '')}".strip() + f" ({', '.join(why)})" for i, why in self.sources.items()]
        text = f"end tokens: {', '.join(used)}" if used else "no end tokens: answers end at max_tokens or a stop string"
        odd = ", ".join(f"{i} ({', '.join(why)})" for i, why in self.ignored.items())
        return f"{text}; ignored, outside the vocabulary: {odd}" if odd else text


def turn_ends(names: set[str]) -> set[str]:
    """Return those of the names that end a turn in a model with these tokens."""
    return names & NAMES - ({"<|end|>"} if any(pair <= names for pair in _HARMONY) else set())


def end_tokens(
    path: Path, config: dict[str, Any], generation: dict[str, Any], source: str, vocab_size: int | None = None,
    template: str | None = None,
) -> EndTokens:  # fmt: skip
    """Collect the end tokens of a model directory. config, generation: its `config.json` and `generation_config.json`.
    source: name of the latter in messages. template: replaces the model's chat template.

    `generation_config.json` has precedence over `config.json`, as in `transformers`. The tokenizer's end token and
    those that end an answer in the chat template are added. Null, negative and unknown values count as absent."""
    tokenizer = {**_read(path / "special_tokens_map.json"), **_read(path / _TOKENIZER)}
    added, special = _added_tokens(path, tokenizer)
    found: dict[int, list[str]] = {}
    size = vocab_size if vocab_size is not None else float("inf")

    def add(value: Any, source: str) -> bool:
        ids = {_id(item, added, path) for item in (value if isinstance(value, list) else [value])} - {None}
        for token in sorted(ids):  # type: ignore[type-var]
            found.setdefault(token, []).append(source)  # type: ignore[arg-type]
        return any(token < size for token in ids)  # type: ignore[operator]

    places = [(generation, source), (config, "config.json")]
    places += [(inner, f"config.json, {key}") for key in _NESTED if isinstance(inner := config.get(key), dict)]
    any(add(place.get("eos_token_id"), source) for place, source in places)
    end = _content(tokenizer.get("eos_token"))
    if end is not None:
        add([end], _TOKENIZER)
    if template := template or _chat_template(path, tokenizer):
        known = turn_ends(set(added))
        ends = {name for name in known if name in template}
        ends |= _after_answer(template, tokenizer, special | known) - (NAMES - known)
        add(sorted(ends), "chat template")
    names = {token: name for name, token in added.items()}
    return EndTokens(
        {token: why for token, why in found.items() if token < size},
        {token: why for token, why in found.items() if token >= size},
        names,
    )


def _read(path: Path) -> dict[str, Any]:
    """Read a file of the tokenizer; a missing or damaged one is the tokenizer's to report."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _id(value: Any, added: dict[str, int], path: Path) -> int | None:
    """Return the id that a value of a configuration means: a number, a name, or an object with the name; None for no
    id."""
    value = value.get("content") if isinstance(value, dict) else value
    if isinstance(value, str):
        token = added.get(value)
        if token is None:
            token = _in_vocabulary(value, path)
        return token if token is not None else int(value) if value.isdecimal() else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 63 or value % 1:
        return None
    return int(value)


def _content(token: Any) -> str | None:
    """Return the text of a token of `tokenizer_config.json`: a string, or an object with its flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _added_tokens(path: Path, tokenizer: dict[str, Any]) -> tuple[dict[str, int], set[str]]:
    """Return the ids of added tokens by name, and the names of special ones."""
    listed = tokenizer.get("added_tokens_decoder")
    listed = listed.items() if isinstance(listed, dict) else ()
    tokens = [{**t, "id": int(i)} for i, t in listed if i.isdecimal() and isinstance(t, dict)]
    tokens += [{"id": i, "content": name} for name, i in _read(path / "added_tokens.json").items()]
    for size in (_HEAD, -1):
        try:
            with (path / "tokenizer.json").open(encoding="utf-8") as file:
                text = file.read(size)
            # Only this list is parsed, because the file may have many megabytes.
            at = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)
            tokens += json.JSONDecoder().raw_decode(text, at.end())[0] if at else []
        except (OSError, ValueError):
            continue
        if at:
            break
    there = [t for t in tokens if isinstance(t, dict) and isinstance(t.get("content"), str)]
    there = [t for t in there if type(t.get("id")) is int]
    return {t["content"]: t["id"] for t in there}, {t["content"] for t in there if t.get("special")}


def _in_vocabulary(name: str, path: Path) -> int | None:
    """Return the id of a token that is in the vocabulary only."""
    vocabulary = (_read(path / "tokenizer.json").get("model") or {}).get("vocab") or _read(path / "vocab.json")
    if isinstance(vocabulary, list):  # pieces with scores
        vocabulary = {piece[0]: i for i, piece in enumerate(vocabulary)}
    token = vocabulary.get(name)
    return token if isinstance(token, int) else None


def _chat_template(path: Path, tokenizer: dict[str, Any]) -> str:
    """Return the chat template that a conversation gets without tools, "" for none."""
    try:
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        pass
    template = tokenizer.get("chat_template") or _read(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    if isinstance(template, dict):
        template = template.get("default") or template.get("tool_use")
    return template if isinstance(template, str) else ""


def _after_answer(template: str, tokenizer: dict[str, Any], special: set[str]) -> set[str]:
    """Return the special token that ends an answer in a template, if only such tokens follow the last answer."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    variables: dict[str, Any] = {"tools": None, "documents": None, "messages": [], "add_generation_prompt": False}
    variables |= {name: _content(value) or "" for name, value in tokenizer.items() if name.endswith("_token")}
    # transformers' own tag marks the text of the assistant
    source = re.sub(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}", "", template)

    def rendered(content: Callable[[str], object]) -> list[str]:
        """Return what follows the answer of a conversation that ends with it, and of one that goes on."""
        user, answer = {"role": "user", "content": content("a")}, {"role": "assistant", "content": content(_ANSWER)}
        compiled = environment.from_string(source)
        texts = (compiled.render({**variables, "messages": [user, answer, *more]}) for more in ([], [user]))
        return [text.rpartition(_ANSWER)[2] for text in texts if _ANSWER in text]

    found: list[str] = []
    for content in (str, _parts):
        with suppress(Exception):  # templates raise anything
            found = found or rendered(content)
    if len(found) < 2:
        return set()
    at_end, inside = found
    last, rest = _leading(at_end, special)
    both = [token for token, other in zip(last, _leading(inside, special)[0], strict=False) if token == other]
    # What follows every answer ends it; what follows only the last one may end the conversation.
    return set((both or last)[-1:]) if not rest else set()


def _parts(text: str) -> list[dict[str, str]]:
    """Return a message's content as templates of models that take images expect it."""
    return [{"type": "text", "text": text}]


def _leading(text: str, special: set[str]) -> tuple[list[str], str]:
    """Return the special tokens at the start of a text, and the text after them."""
    found, text = [], text.strip()
    while token := max((t for t in special if text.startswith(t)), key=len, default=""):
        found.append(token)
        text = text[len(token) :].lstrip()
    return found, text
