"""The `weft` command. Each subcommand imports the heavy modules it needs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weft import __version__
from weft.engine.config import EngineConfig, expanded
from weft.engine.errors import ConfigError, ModelError, WeftError
from weft.server.config import ServeConfig
from weft.server.options import Parser, add_flags, load, nearest, unknown_variables

_HELP = """\
Serve large language models over the OpenAI HTTP API.

  weft serve                       serve the embedded demo model on http://127.0.0.1:8000
  weft serve ORG/NAME              serve a model from the Hugging Face hub, downloaded once
  weft serve /models/Llama-3-8B    serve a Hugging Face model directory
  weft chat                        chat with the server on port 8000, or with a model: weft chat ORG/NAME
  weft models                      list the models on this machine and whether weft supports them
  weft doctor                      check this machine for problems
  weft load --rate 4               send requests to a server; measure latency, throughput, SLOs
"""

_SOURCES = (
    "Every option can also be set as WEFT_<NAME> in the environment or as a key of --config FILE. "
    "Flags take precedence over the environment, the environment over the file."
)
_HELP_ALL = " --help lists the common options, --help-all lists every option."


M = TypeVar("M", bound=EngineConfig)

USAGE = 2
"""Exit status for errors in the command line, such as an unknown option or an invalid value."""
INTERRUPTED = 130  # Exit status after Ctrl-C.


class Command(NamedTuple):
    """A subcommand. `run` and `flags` may be `module:function`, which is imported when needed."""

    name: str  # One or two words.
    help: str
    run: str | Callable[[argparse.Namespace], int]
    """Takes the configuration, if any, and the parsed arguments; with `own_parser`, the remaining words."""
    flags: str | Callable[[argparse.ArgumentParser], None] | None = None
    """Adds its options. Separate from `run`, so that help does not import torch."""
    config: type[EngineConfig] | None = None
    own_parser: bool = False


def _version(_: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    print(f"weft {__version__}")
    for name in ("torch", "transformers", "triton"):
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} not installed")
    print(f"python {sys.version.split()[0]}")
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    from weft.server.commands.completion import script

    print(script(_parser(), arguments.shell), end="")
    return 0


def _shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell to print the script for")


def _cache(arguments: argparse.Namespace) -> int:
    from weft.engine.memory.cache_tool import run

    return run(arguments.parser.prog.rpartition(" ")[2], arguments.path)


def _cache_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help="the directory of --ssd-kv-path")


GROUPS = {
    "cache": ("inspect the KV pages in --ssd-kv-path", "COMMAND"),
    "plan": ("inspect plans of weft search", "COMMAND"),
}

COMMANDS = (
    Command("serve", "serve a model over HTTP until stopped", "weft.server.daemon.daemon:run", config=ServeConfig),
    Command(
        "chat", "chat with a model in this terminal",
        "weft.server.commands.chat:run", "weft.server.commands.options:add_chat_flags",
    ),
    Command(
        "batch", "send the requests in a file (OpenAI's Batch API format) and write the responses; resumable",
        "weft.server.commands.batch:run", "weft.server.commands.options:add_batch_flags",
    ),
    Command(
        "pull", "download or update a model from the Hugging Face hub",
        "weft.server.commands.models:pull", "weft.server.commands.options:add_pull_flags",
    ),
    Command(
        "models", "list the models on this machine and whether weft supports them",
        "weft.server.commands.models:run", "weft.server.commands.options:add_models_flags",
    ),
    Command(
        "inspect", "show a model's architecture, its memory, and whether it fits this machine",
        "weft.engine.runner.start.inspect_command:run", "weft.engine.runner.start.inspect_command:add_inspect_flags",
    ),
    Command(
        "quantize", "convert a model to FP8 (compressed-tensors) and report the error of each layer",
        "weft.engine.model.quantize_command:run", "weft.engine.model.quantize_command:add_quantize_flags",
    ),
    Command(
        "doctor", "check this machine: Python, torch, GPU, kernels, ports, disk, hub; exits with 1 on problems",
        "weft.server.commands.doctor:run", "weft.server.commands.options:add_doctor_flags",
    ),
    Command(
        "health", "check the servers on this machine; exits with 1 unless all are healthy",
        "weft.server.commands.health:run", "weft.server.commands.options:add_health_flags",
    ),
    Command(
        "load", "send requests to any OpenAI-compatible server and measure it",
        "weft.loadgen.command:run", "weft.loadgen.options:add_load_flags",
    ),
    Command(
        "fleet", "simulate a fleet under a load: the engines needed, their configuration, latency and energy",
        "weft.deploy.fleet.command:run", "weft.deploy.fleet.options:add_fleet_flags",
    ),
    Command("cache stats", "show the size and contents of the store", _cache, _cache_path),
    Command("cache verify", "verify the checksum of every page; exits with 1 on a mismatch", _cache, _cache_path),
    Command("cache clear", "delete every page; the file stays", _cache, _cache_path),
    Command(
        "search", "search for the best nano-batch pipeline for a model and a workload",
        "weft.autosearch.command:run", "weft.autosearch.options:add_search_flags",
    ),
    Command(
        "advise", "find the best --max-num-seqs: measure the engine at several limits and write a configuration",
        "weft.autosearch.advisor.command:run", "weft.autosearch.advisor.options:add_advise_flags", EngineConfig,
    ),
    Command(
        "plan model", "estimate a model's compute, memory and network time with the cost model",
        "weft.autosearch.plan_model:main", own_parser=True,
    ),
    Command("plan show", "print a plan and draw its pipelines", "weft.autosearch.plan_show:main", own_parser=True),
    Command("completion", "print a shell completion script", _completion, _shell),
    Command(
        "compile", "compile a model's GPU kernels into --cache-dir, even without the GPU",
        "weft.engine.runner.start.compile_command:run", "weft.engine.runner.start.compile_command:add_compile_flags",
        EngineConfig,
    ),
    Command("version", "print the versions of weft and its main dependencies", _version),
)  # fmt: skip


CHECKOUT_GROUPS = ("bench", "demo")
CHECKOUT_COMMANDS = "weft.tools.commands"  # The commands of `CHECKOUT_GROUPS`, which the wheel leaves out.


@cache
def all_commands() -> tuple[tuple[Command, ...], dict[str, tuple[str, str]]]:
    """Commands and groups, including those that only a checkout has."""
    if find_spec("weft.tools") is None:
        return COMMANDS, GROUPS
    tools = import_module(CHECKOUT_COMMANDS)
    return COMMANDS + tools.COMMANDS, GROUPS | tools.GROUPS


def _imported(function: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(function):
        return function
    module, _, name = function.partition(":")
    imported: Callable[..., Any] = getattr(import_module(module), name)
    return imported


def _run(command: Command, arguments: argparse.Namespace) -> int:
    if command.config is None:
        return int(_imported(command.run)(arguments))
    flags = {name: getattr(arguments, name, None) for name in command.config.model_fields}
    if command.config is ServeConfig:
        flags |= _models(arguments.model_argument, flags["model"] or [], flags["models"] or [])
    elif arguments.model_argument is not None:
        flags["model"] = arguments.model_argument
    config = load(command.config, flags, arguments.config)
    config = _all_located(config) if isinstance(config, ServeConfig) else _located(config)
    if command.flags is not None:
        return int(_imported(command.run)(config, arguments))
    for line in unknown_variables(command.config):
        print(f"{arguments.parser.prog}: {line}", file=sys.stderr)
    for one in config.each if isinstance(config, ServeConfig) else [config]:
        if one.load_format != "dummy":
            continue
        own = " and the demo model's tokenizer" if one.uses_demo_tokenizer else ""
        print(f"weft: {one.model_name} has random weights{own}: its answers are meaningless", file=sys.stderr)
    return int(_imported(command.run)(config))


def _models(argument: str | None, named: list[str], several: list[str]) -> dict[str, Any]:
    """Return `model` and `models` from MODEL, --model and --models. Several of the first two become `models`. They
    override both options in the environment and the file. Raises `ConfigError`."""
    if argument is not None:
        named = [argument] if len(named) < 2 else [argument, *named]
    if several and named:
        raise ConfigError("give --model or --models, not both: --models lists all of them")
    several = several or (named if len(named) > 1 else [])
    if several:
        return {"model": "demo", "models": several}
    return {"model": named[0], "models": []} if named else {"model": None, "models": None}


def _all_located(config: ServeConfig) -> ServeConfig:
    """Apply `_located` to all models."""
    if not config.models:
        return _located(config)
    models = [
        {**entry, **({"model": located.model} if "model" in entry else {})}
        for entry, located in zip(config.models, map(_located, config.each), strict=True)
    ]
    return config.model_copy(update={"models": models})


def _located(config: M) -> M:
    """Locate, or download, the model, and check everything that needs no engine. Raises `ConfigError` and
    `ModelError`."""
    from weft.engine.config.tokenizer import require_tokenizer
    from weft.engine.model.hub import find_model, missing
    from weft.engine.model.implementation import check_known
    from weft.engine.plans.plan import load_plan

    if config.plan not in ("auto", "serial"):
        load_plan(expanded(config.plan))
    if config.model_preset is not None:
        check_known(config.model_path, config.model_impl, trusted=config.trust_remote_code)
        return config
    dummy = config.load_format == "dummy"
    path = find_model(config.model, config.revision, weights=not dummy)
    check_known(path, config.model_impl, trusted=config.trust_remote_code)
    if not dummy and (absent := missing(path)):
        raise ModelError(f"{path} lacks {len(absent)} weight file(s): {', '.join(absent[:3])}")
    if isinstance(config, ServeConfig) and not dummy:
        require_tokenizer(path)
    return config if config.model == "demo" else config.model_copy(update={"model": str(path)})


def _sentence(help: str) -> str:
    return f"{help[0].upper()}{help[1:]}."


def _parser() -> Parser:
    parser = Parser(prog="weft", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    top = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    groups: dict[str, Any] = {}
    commands, about = all_commands()
    for command in commands:
        group, _, name = command.name.rpartition(" ")
        if group and group not in groups:
            text, metavar = about[group]
            of_group = top.add_parser(group, help=text, description=_sentence(text))
            of_group.set_defaults(parser=of_group)
            groups[group] = of_group.add_subparsers(title="commands", metavar=metavar, parser_class=Parser)
        sub = groups.get(group, top).add_parser(name, help=command.help, description=_sentence(command.help))
        sub.set_defaults(parser=sub, command=command)
        if command.config is not None:
            sub.add_argument("model_argument", metavar="MODEL", nargs="?", help="same as --model [demo]")
            if command.config is ServeConfig:
                sub.hide({name for group in ServeConfig.GROUPS for name in group.more})
            sub.add_argument("--config", metavar="FILE", type=Path, help="YAML file with any of the options")
            add_flags(sub, command.config, repeated=("model",) if command.config is ServeConfig else ())
            sub.epilog = _SOURCES + (_HELP_ALL if command.config is ServeConfig else "")
            sub.usage = f"weft {command.name} [MODEL] [OPTION ...]"
        if command.flags is not None:
            _imported(command.flags)(sub)
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. A `WeftError` becomes one line on stderr, and status 2 for a bad
    option, else 1. A file without permission (status 2) and a failed write to stdout (status 1) get one line, too."""
    try:
        try:
            status = _main(list(sys.argv[1:] if argv is None else argv))
        except KeyboardInterrupt:
            status = INTERRUPTED
        print(end="", flush=True)
        return status
    except OSError:
        if (error := _unwritten()) is None:
            raise
        # Keep the interpreter from failing when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader, such as `head`, has closed the pipe
            print(f"weft: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 1


def _unwritten() -> OSError | None:
    """Return the error of a failed write to stdout, if any."""
    try:
        print(end="", flush=True)
    except OSError as error:
        return error
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    found: OSError | None = getattr(raw, "error", None)
    return found


def _main(argv: list[str]) -> int:
    commands, groups = all_commands()
    if argv and argv[0] in CHECKOUT_GROUPS and argv[0] not in groups:
        where = "run it in a checkout of weft's repository, after `pip install -e .` there"
        print(f"weft {argv[0]}: this command is not part of the installed package: {where}", file=sys.stderr)
        return USAGE
    own = next((command for command in commands if command.own_parser and command.name == " ".join(argv[:2])), None)
    if own is not None:
        return _translated(f"weft {own.name}", lambda: int(_imported(own.run)(argv[2:]) or 0))
    parser = _parser()
    names = list(dict.fromkeys(command.name.split()[0] for command in commands))
    if argv and not argv[0].startswith("-") and argv[0] not in names:
        parser.error(f"unknown command {argv[0]}{nearest(argv[0], names)}")
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "command"):
        (getattr(arguments, "parser", None) or parser).print_help()
        return 0
    return _translated(arguments.parser.prog, partial(_run, arguments.command, arguments))


def _translated(name: str, run: Callable[[], int]) -> int:
    """Return the result of `run`, or the exit status for its exception."""
    try:
        return run()
    except WeftError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else 1
    except PermissionError as error:
        if error.filename is None:
            raise
        print(f"{name}: {error.filename}: {error.strerror}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    raise SystemExit(main())
