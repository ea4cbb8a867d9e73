"""`in_json_string` converts a client's Lark grammar to match text inside a JSON string, for the input of a tool.

Each terminal is rewritten to match the escaped form of its text (`"` as `\\"`, a line break as `\\n`), with one
spelling per character; control characters without a short escape cannot be written.

The lexer ends a terminal at the first character that does not fit and never backtracks. Escapes have two characters, so
a terminal that can continue with one escape (a line) would also consume the start of another (the line break after
it). So a grammar without recursion becomes a single terminal; in recursive grammars such text is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from weft.engine.errors import RequestError
from weft.engine.wire.grammar_text import literal
from weft.server.errors import clip

_ESCAPED = {char: json.dumps(char)[1:-1] for char in '\b\f\n\r\t"\\'}
"""Characters that a JSON string must escape, and their escapes."""
_PLAIN = r'[^"\\\x00-\x1f]'

_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "SIGNED_FLOAT": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+|[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "SIGNED_NUMBER": r"[+-]?([0-9]+|[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals of Lark's `common` as regular expressions."""

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|\#[^\n]*)
  | (?P<range>"(?:[^"\\\n]|\\.)+"\s*\.\.\s*"(?:[^"\\\n]|\\.)+")
  | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
  | (?P<regex>/(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[imslux]*)
  | (?P<statement>%[a-z]+)
  | (?P<option>[A-Za-z_][A-Za-z0-9_]*(?:\[[a-z_]+[,=\]]|\.-?[0-9]+\s*:|\{[A-Za-z]))
  | (?P<name>[!?]*_?[A-Za-z][A-Za-z0-9_]*)
  | (?P<alias>->\s*[A-Za-z_][A-Za-z0-9_]*)
  | (?P<mark>[:|()?*+\[\],.{}]|~|[0-9]+)
    """,
    re.VERBOSE,
)
_IMPORT = re.compile(r"\s*common\s*(?:\.\s*(?P<one>\w+)(?:\s*->\s*(?P<as>\w+))?|\((?P<all>[\w\s,]+)\))[^\S\n]*(?=\n|$)")


class _Definition:
    """A rule or a terminal; without a name, the text between definitions."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.body: list[tuple[str, str]] = []  # (kind, text) of its rewritten tokens.

    @property
    def references(self) -> set[str]:
        return {text for kind, text in self.body if kind == "name"}


def in_json_string(text: str) -> str:
    """Return the Lark grammar. Raises `RequestError` for unsupported features: nested grammars, tokens, negation, and
    text that is ambiguous inside a string (see above)."""
    definitions = _definitions(_rewritten(text))
    named = {definition.name: definition for definition in definitions if definition.name}
    if "start" not in named:
        raise RequestError("a Lark grammar needs a rule named start")
    loose = any(kind == "statement" for definition in definitions for kind, _ in definition.body)
    if loose or _refers_to_itself(named):
        mark = {"regex": "(?-i:", "string": "\\\\"}
        escapes = {body for d in definitions for kind, body in d.body if kind in mark and mark[kind] in body}
        if len(escapes) > 1 and any(map(_ENDLESS.search, escapes)):
            raise RequestError(
                "inside a call, a grammar that refers to itself (or has %ignore) cannot tell the end of text with line "
                "breaks, quotes or backslashes in it"
            )
        new = {}
    else:
        new = {name: f"RULE_{i}" for i, name in enumerate(n for n in named if not n.isupper())}
    lines = [
        (f"{new.get(d.name, d.name)}:" if d.name else "")
        + "".join(new.get(text, text) if kind == "name" else text for kind, text in d.body)
        for d in definitions
    ]
    return "\n".join([*([f"start: {new['start']}"] if new else []), *lines])


_ENDLESS = re.compile(r"\(\?-i:.*[*+]|\(\?-i:.*\{[0-9]*,\}")
"""Detects a regular expression that may repeat an escape."""


def _refers_to_itself(named: Mapping[str, _Definition]) -> bool:
    done, open_ = set[str](), set[str]()

    def visit(name: str) -> bool:
        if name in open_:
            return True
        if name in done or name not in named:
            return False
        open_.add(name)
        found = any(visit(inner) for inner in named[name].references)
        open_.discard(name)
        done.add(name)
        return found

    return any(map(visit, named))


def _definitions(tokens: Sequence[tuple[str, str]]) -> list[_Definition]:
    """Split the tokens into definitions; each starts with a name and a colon."""
    out = [_Definition()]
    for i, (kind, text) in enumerate(tokens):
        if kind == "name" and _begins(tokens, i):
            out.append(_Definition(text.lstrip("!?")))
        elif kind == "statement":
            out.append(_Definition())
            out[-1].body.append((kind, text))
        elif kind != "colon":
            out[-1].body.append((kind, text.lstrip("!?") if kind == "name" else text))
    return out


def _begins(tokens: Sequence[tuple[str, str]], at: int) -> bool:
    """Return whether a name starts a definition."""
    following = [kind for kind, text in tokens[at + 1 : at + 3] if not (kind == "space" and "\n" not in text)]
    return following[:1] == ["colon"]


def _rewritten(text: str) -> list[tuple[str, str]]:
    """Return (kind, text) of the tokens, with terminals for escaped text and imports expanded."""
    out, at = list[tuple[str, str]](), 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise RequestError(f"this cannot be followed inside a call: {clip(text[at : at + 20])!r}")
        kind, token, at = str(found.lastgroup), found.group(), found.end()
        match kind:
            case "space":
                out.append((kind, "\n" if "\n" in token else " "))
            case "string":
                out.append((kind, _string(token)))
            case "range":
                first, last = (json.loads(part) for part in re.findall(r'"(?:[^"\\]|\\.)+"', token))
                if len(first) != 1 or len(last) != 1:
                    raise RequestError(f"a range is between two characters: {clip(token)}")
                out.append(("regex", f"/{_regex(f'[{re.escape(first)}-{re.escape(last)}]', '')}/"))
            case "regex":
                body, _, flags = token[1:].rpartition("/")
                out.append((kind, f"/{_regex(body, flags)}/{'i' if 'i' in flags else ''}"))
            case "statement" if token == "%import":
                imported = _IMPORT.match(text, at)
                if imported is None:
                    raise RequestError("%import: only terminals of common are known")
                out += _imported(imported)
                at = imported.end()
            case "statement" if token != "%ignore":
                raise RequestError(f"{token} is not supported inside a call")
            case "option":
                raise RequestError(f"{clip(token)} is not supported inside a call")
            case "mark" if token == "~" and not re.match(r"\s*[0-9]", text[at:]):
                raise RequestError("negation (~) is not supported inside a call")
            case "alias":
                pass
            case _:
                out.append(("colon" if token == ":" else kind, token))
    return out


def _string(token: str) -> str:
    """Rewrite a string. In a case-insensitive string, escapes stay case-sensitive."""
    body, flag = (token[:-1], "i") if token.endswith("i") else (token, "")
    try:
        value = json.loads(body, strict=False)
    except ValueError:
        raise RequestError(f"this text cannot be read: {clip(body)}") from None
    if not flag:
        return literal("".join(_ESCAPED.get(char, char) for char in value))
    pieces = [
        literal(_ESCAPED[piece]) if piece in _ESCAPED else f"{literal(piece)}i"
        for piece in re.split(r'(["\\\x00-\x1f])', value)
        if piece
    ]
    return f"({' '.join(pieces)})" if pieces else '""'


def _imported(found: re.Match[str]) -> list[tuple[str, str]]:
    names = [found["one"]] if found["one"] else [name.strip() for name in found["all"].split(",")]
    out = [("space", "\n")]
    for name in names:
        if name not in _COMMON:
            raise RequestError(f"%import common.{clip(name)} is not known")
        out += [("name", found["as"] or name), ("colon", ":"), ("regex", f" /{_regex(_COMMON[name], '')}/")]
        out.append(("space", "\n"))
    return out


def _regex(source: str, flags: str) -> str:
    """Rewrite an expression for escaped text: character matchers are replaced, operators are kept."""
    if "x" in flags:
        raise RequestError("the flag x of a regular expression is not supported inside a call")
    out = ""
    for found in _PIECE.finditer(source):
        piece = found.group()
        if piece in ("^", "$", "(?") or piece in _PLACES:
            raise RequestError(f"{piece} is not supported in a regular expression inside a call")
        if piece == ".":
            out += _alternatives(_PLAIN, [char for char in _ESCAPED if "s" in flags or char != "\n"])
        elif piece[0] == "[" or piece[1:2] in _CATEGORIES:
            out += _class(piece)
        elif len(piece) > 1 and piece[0] == "\\":
            out += _character(_meant(piece))
        else:
            out += _character(piece) if piece in _ESCAPED else piece
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", out)  # the result is written between slashes


_PIECE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|[pP]\{[^}]*\}|.)"
    r"|\[\^?\]?(?:[^\]\\]|\\.)*\]|\(\?[a-zA-Z:-]*[:)]|\(\?|\{[0-9]*,?[0-9]*\}|.",
    re.DOTALL,
)
_PLACES = (r"\b", r"\B", r"\A", r"\z", r"\Z")
_CATEGORIES = tuple("dDwWsSpP")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}


def _meant(piece: str) -> str:
    """Return the character of a regular expression's escape."""
    if piece[1] in "xu" and len(piece) > 2:
        return chr(int(piece[2:].strip("{}"), 16))
    if piece[1].isalnum() and piece[1] not in _LETTERS:
        raise RequestError(f"{piece} is not supported in a regular expression inside a call")
    return _LETTERS.get(piece[1], piece[1])


def _character(char: str) -> str:
    return f"(?-i:{re.escape(_ESCAPED[char])})" if char in _ESCAPED else re.escape(char)


def _class(source: str) -> str:
    r"""Rewrite a character class such as `[a-z]` or `\d`: plain characters, or the escapes of the others."""
    try:
        known = re.compile(re.sub(r"\\[xu]\{([0-9a-fA-F]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", source))
    except re.error:
        raise RequestError(f"{clip(source)} is not supported in a regular expression inside a call") from None
    inside = source if source[0] == "[" else f"[{source}]"
    return _alternatives(f"[{inside}&&{_PLAIN}]", [char for char in _ESCAPED if known.fullmatch(char)])


def _alternatives(plain: str, others: Sequence[str]) -> str:
    return f"(?:{'|'.join([plain, *map(_character, others)])})" if others else plain
