"""Reads a pydantic model from command-line flags, `WEFT_*` variables and YAML keys, in that precedence."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from weft.engine.config import NO_OPTION, OptionGroup
from weft.engine.errors import ConfigError, invalid_option

ENV_PREFIX = "WEFT_"
HELP_COLUMNS = 110
"""Width of help texts, unless `COLUMNS` is smaller."""
LONGEST_CHOICES = 60
"""Characters of a list of choices that `--help` shows; `--help-all` shows longer ones, too."""
M = TypeVar("M", bound=BaseModel)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and name the nearest known option."""

    hidden: Collection[str] = ()
    """Options, by field name, that `--help-all` lists and `--help` does not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=")[0]
            parser: Parser = getattr(parsed, "parser", self)
            if not name.startswith("-"):
                parser.error(f"unexpected argument {name}")
            parser.error(f"unknown option {name}{nearest(name, parser.option_names())}")
        return parsed

    def option_names(self) -> list[str]:
        return list(self._option_string_actions)

    def hide(self, names: Collection[str]) -> None:
        """Leave these options out of `--help`, and add `--help-all`."""
        self.hidden = names
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options and exit")

    def _get_formatter(self) -> argparse.HelpFormatter:
        formatter = super()._get_formatter()
        if isinstance(formatter, _Formatter):
            formatter.hidden = self.hidden
        return formatter


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        parser.hidden = ()
        parser.print_help()
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    hidden: Collection[str] = ()

    def __init__(self, prog: str) -> None:
        columns = os.environ.get("COLUMNS", "")
        narrow = columns.isdecimal() and 0 < int(columns) < HELP_COLUMNS
        super().__init__(prog, max_help_position=34, width=int(columns) if narrow else HELP_COLUMNS)

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest not in self.hidden:
            super().add_argument(action)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if self.hidden and len(str(action.metavar)) > LONGEST_CHOICES:
            return lambda size: ("NAME",) * size
        return super()._metavar_formatter(action, default_metavar)


def nearest(name: str, known: Sequence[str]) -> str:
    """Return `; did you mean X?` if a known name is close to `name`, else nothing. Common prefixes are ignored."""
    plain = {other.removeprefix("--").removeprefix(ENV_PREFIX): other for other in known}
    close = difflib.get_close_matches(name.removeprefix("--").removeprefix(ENV_PREFIX), plain, n=1)
    return f"; did you mean {plain[close[0]]}?" if close else ""


def _plain_type(annotation: Any) -> Any:
    """Return the type without `| None`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation


def _is_list(field: FieldInfo) -> bool:
    return typing.get_origin(_plain_type(field.annotation)) in (list, tuple)


def _shown_default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is None or default == [] or default == "":
        return ""
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f" [{default}]"


def options_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields that an operator can set: all except those marked with `NO_OPTION`."""
    return {name: field for name, field in model.model_fields.items() if field.json_schema_extra != NO_OPTION}


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel], *, repeated: Sequence[str] = ()) -> None:
    """Add one flag per field, in the model's `GROUPS`. Values stay text, so that only the model validates them.
    `repeated`: single-valued fields with a flag that may be repeated, which makes a list."""
    fields = options_of(model)
    groups: Sequence[OptionGroup] = getattr(model, "GROUPS", None) or (OptionGroup("options", tuple(fields)),)
    for group in groups:
        into = parser.add_argument_group(group.title)
        for name in (*group.common, *group.more):
            _add_flag(into, name, fields[name], repeated=name in repeated)


def _add_flag(into: argparse._ArgumentGroup, name: str, field: FieldInfo, *, repeated: bool) -> None:
    kind = _plain_type(field.annotation)
    text = (field.description or "").replace("%", "%%") + _shown_default(field).replace("%", "%%")
    options: dict[str, Any] = {"dest": name, "default": None, "help": text}
    if repeated:
        into.add_argument(as_flag(name), action="append", metavar=name.upper(), **options)
    elif kind is bool:
        into.add_argument(as_flag(name), action=argparse.BooleanOptionalAction, **options)
    elif typing.get_origin(kind) is typing.Literal:
        into.add_argument(as_flag(name), metavar="{" + ",".join(map(str, typing.get_args(kind))) + "}", **options)
    elif _is_list(field):
        into.add_argument(as_flag(name), nargs="+", action="extend", metavar="X", **options)
    else:
        metavar = {int: "N", float: "X"}.get(kind, name.rsplit("_", 1)[-1].upper())
        into.add_argument(as_flag(name), metavar=metavar, **options)


def read_yaml(path: Path, model: type[BaseModel]) -> dict[str, Any]:
    """Read options from a YAML file, with keys in `_` or `-` style. Raises `ConfigError` for invalid files."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {_where(error)}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} must be a mapping of options to values")
    out = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in options_of(model):
            hint = nearest(name.replace("_", "-"), [known.replace("_", "-") for known in options_of(model)])
            raise ConfigError(f"--config {path}: unknown option {key}{hint}")
        out[name] = [value] if _is_list(model.model_fields[name]) and isinstance(value, str) else value
    return out


def _where(error: Exception) -> str:
    """Describe a YAML error, with its line and column."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error).splitlines()[0]
    what = getattr(error, "problem", None) or getattr(error, "context", None) or "unreadable"
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}"


def _kubernetes_noise(name: str, value: str) -> bool:
    # A Service called "weft" makes Kubernetes set WEFT_PORT=tcp://… and WEFT_SERVICE_* in every pod.
    return name.startswith(("WEFT_SERVICE_", "WEFT_PORT_")) or (name == "WEFT_PORT" and value.startswith("tcp://"))


def _read_environment(model: type[BaseModel]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in options_of(model).items():
        variable = ENV_PREFIX + name.upper()
        value = os.environ.get(variable)
        if value is not None and not _kubernetes_noise(variable, value):
            # An empty variable becomes one empty entry, which fails validation: WEFT_API_KEY= must not mean "no keys".
            entries = [part.strip() for part in value.split(",") if part.strip()] or [""]
            values[name] = entries if _is_list(field) else value
    return values


def unknown_variables(model: type[BaseModel]) -> list[str]:
    """Return a line for each unknown `WEFT_*` variable, with the nearest option."""
    known = [ENV_PREFIX + name.upper() for name in options_of(model)]
    return [
        f"environment variable {name} is not an option{nearest(name, known)}"
        for name, value in sorted(os.environ.items())
        if name.startswith(ENV_PREFIX) and name not in known and not _kubernetes_noise(name, value)
    ]


def load(model: type[M], flags: dict[str, Any], config_file: Path | None) -> M:
    """Build `model` from flags, `WEFT_*` variables, the YAML file and defaults, in that precedence. Raises
    `ConfigError` with one line that names the option if a value is invalid."""
    from_file = read_yaml(config_file, model) if config_file is not None else {}
    from_env = _read_environment(model)
    given = {n: v for n, v in flags.items() if v is not None}
    for name, value in {**from_env, **given}.items():
        if not _is_text(value):  # the value is later sent to other processes as JSON
            raise ConfigError(f"{_source(name, given, from_env, config_file)}: must be UTF-8")
    try:
        return model(**{**from_file, **from_env, **given})
    except ValidationError as error:
        name, reason = invalid_option(error, model)
        source = _source(name, given, from_env, config_file)
        # Errors about several options name them as fields.
        spelt = re.sub(
            r"\b[a-z]+(?:_[a-z]+)+\b", lambda m: as_flag(m[0]) if m[0] in model.model_fields else m[0], reason
        )
        raise ConfigError(f"{source}: {spelt[0].lower()}{spelt[1:]}" if name else spelt) from None


def _is_text(value: Any) -> bool:
    """Return whether all values are valid UTF-8: Python maps other bytes to surrogates."""
    words = value if isinstance(value, list | tuple) else [value]
    return not any("\udc80" <= c <= "\udcff" for word in words if isinstance(word, str) for c in word)


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _source(name: str, given: dict[str, Any], from_env: dict[str, Any], config_file: Path | None) -> str:
    if name not in given and name in from_env:
        return ENV_PREFIX + name.upper()
    if name not in given and config_file is not None:
        return f"{name.replace('_', '-')} in {config_file}"
    return as_flag(name)
