"""`weft completion`: shell scripts that complete commands, options and values, generated from the parsers."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

_ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""
"""Loads zsh's completion, then its support for bash scripts."""


class Option(NamedTuple):
    flag: str
    help: str
    values: tuple[str, ...]  # Allowed values, if they are a fixed set.
    takes: bool  # Whether it takes a value.


class Word(NamedTuple):
    """A command or a group of commands."""

    words: tuple[str, ...]
    help: str
    options: tuple[Option, ...]


def walk(parser: argparse.ArgumentParser, words: tuple[str, ...] = (), help: str = "") -> Iterator[Word]:
    """Yield the parser and its subcommands."""
    yield Word(words, help, tuple(_options(parser)))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                yield from walk(sub, (*words, name), texts.get(name, ""))
        elif action.choices and not action.option_strings:
            for choice in action.choices:
                yield Word((*words, str(choice)), "", ())


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        takes = action.nargs != 0
        found = re.fullmatch(r"\{(.*)\}", str(action.metavar or ""))
        values = tuple(found[1].split(",")) if found else tuple(map(str, action.choices or ()))
        for flag in action.option_strings:
            if flag.startswith("--"):
                text = (action.help or "").replace("%%", "%")
                yield Option(flag, text, values, takes and not isinstance(action, argparse.BooleanOptionalAction))


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for `shell`: 'bash', 'zsh' or 'fish'."""
    words = list(walk(parser))
    if shell == "fish":
        return "\n".join(_fish(words)) + "\n"
    text = "\n".join(_bash(words)) + "\n"
    return _ZSH + text if shell == "zsh" else text


def _bash(words: list[Word]) -> Iterator[str]:
    """Write the script for bash. After the last subcommand, it completes files and options."""
    yield "_weft() {"
    yield '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" path="" word words="" flags="" i'
    yield "  for ((i = 1; i < COMP_CWORD; i++)); do"
    yield '    word="$path ${COMP_WORDS[i]}"; word="${word# }"'
    yield '    case "$word" in'
    names = "|".join(shlex.quote(" ".join(w.words)) for w in words if w.words)
    yield f'      {names}) path="$word" ;;'
    yield "    esac"
    yield "  done"
    yield '  case "$path" in'
    for word in words:
        below = [w.words[-1] for w in words if w.words[:-1] == word.words and w.words]
        flags = " ".join(option.flag for option in word.options)
        yield f'    {shlex.quote(" ".join(word.words))}) words="{" ".join(below)}"; flags="{flags}"'
        valued = [option for option in word.options if option.values]
        if valued:
            yield '      case "$prev" in'
            for option in valued:
                choices = " ".join(option.values)
                yield f'        {option.flag}) COMPREPLY=($(compgen -W "{choices}" -- "$cur")); return ;;'
            yield "      esac"
        yield "      ;;"
    yield "  esac"
    yield '  if [[ "$cur" == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$cur")); return; fi'
    yield '  if [[ -n "$words" ]]; then COMPREPLY=($(compgen -W "$words" -- "$cur")); return; fi'
    yield "  compopt -o default 2>/dev/null; COMPREPLY=()"
    yield "}"
    yield "complete -F _weft weft"


def _fish(words: list[Word]) -> Iterator[str]:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    yield "complete -c weft -e"
    for word in words:
        below = [w.words[-1] for w in words if w.words[:-1] == word.words and w.words]
        seen = [f"__fish_seen_subcommand_from {name}" for name in word.words]
        if below:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(below)}")
        condition = f"-n {quoted('; and '.join(seen))}" if seen else ""
        for w in words:
            if w.words and w.words[:-1] == word.words:
                yield f"complete -c weft -f {condition} -a {w.words[-1]} -d {quoted(w.help)}"
        for option in word.options:
            takes = " -r" if option.takes else ""
            values = f" -f -a {quoted(' '.join(option.values))}" if option.values else ""
            yield f"complete -c weft {condition} -l {option.flag[2:]}{takes}{values} -d {quoted(option.help)}"
