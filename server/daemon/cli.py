"""The `weft` command. Heavy modules are imported by the subcommand that needs them."""

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

from weft import __version__, install_hint
from weft.engine.config import EngineConfig, expanded
from weft.engine.errors import ConfigError, ModelError, WeftError
from weft.server.config import ServeConfig
from weft.server.options import Parser, add_flags, load, nearest, unknown_variables

_HELP = """\
Serve large language models over the OpenAI HTTP API.

  weft serve                       serve the embedded demo model on http://127.0.0.1:8000
  weft serve ORG/NAME              serve a model of the Hugging Face hub, downloaded once
  weft serve /models/Llama-3-8B    serve a Hugging Face model directory
  weft chat                        talk to the server on port 8000, or to a model: weft chat ORG/NAME
  weft models                      which models are on this machine, and whether weft serves them
  weft doctor                      what is wrong with this machine, if something does not work
  weft load --rate 4               send it requests; measure latency, throughput, SLOs
"""

_SOURCES = (
    "Every option can also be set as WEFT_<NAME> in the environment or as a key of --config FILE. "
    "Flags take precedence over the environment, the environment over the file."
)
_HELP_ALL = " --help lists the common options, --help-all lists every option."


M = TypeVar("M", bound=EngineConfig)

USAGE = 2
"""exit status when the command line is at fault: an unknown option, or a value that cannot work"""
INTERRUPTED = 130
"""by Ctrl-C"""


class Command(NamedTuple):
    """A subcommand. `run` and `flags` are `module:function`, imported when needed."""

    name: str
    """of one or two words"""
    help: str
    run: str | Callable[[argparse.Namespace], int]
    """gets the parsed arguments, after the configuration if there is one; with `own_parser` the rest of the line"""
    flags: str | Callable[[argparse.ArgumentParser], None] | None = None
    """adds its options; kept apart from `run`, so that help imports no torch"""
    config: type[EngineConfig] | None = None
    own_parser: bool = False
    parser_class: bool = False
    """with `own_parser`: `run` takes the class to parse with, whose errors are those of this command"""
    cache_folder: bool = False
    """with `own_parser`: `run` takes what tells where `weft serve` keeps kernels and what it measured"""


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
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose script to print")


def _cache_folder() -> Path:
    """Raises `ConfigError`."""
    return load(EngineConfig, {}, None).cache_path


def _cache(arguments: argparse.Namespace) -> int:
    from weft.engine.memory.cache_tool import run

    return run(arguments.parser.prog.rpartition(" ")[2], arguments.path)


def _cache_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help="the directory of --ssd-kv-path")


GROUPS = {
    "cache": ("look at the KV pages that --ssd-kv-path keeps", "COMMAND"),
    "plan": ("look at plans of weft search", "COMMAND"),
}

COMMANDS = (
    Command("serve", "serve a model over HTTP until stopped", "weft.server.daemon.daemon:run", config=ServeConfig),
    Command(
        "chat",
        "talk to a model in this terminal: one that is served, or one that is served for this",
        "weft.server.commands.chat:run",
        "weft.server.commands.options:add_chat_flags",
    ),
    Command(
        "batch",
        "answer the requests of a file, in the form of OpenAI's Batch API; stopped anywhere, it goes on",
        "weft.server.commands.batch:run",
        "weft.server.commands.options:add_batch_flags",
    ),
    Command(
        "pull",
        "download a model of the Hugging Face hub, or what is new in it",
        "weft.server.commands.models:pull",
        "weft.server.commands.options:add_pull_flags",
    ),
    Command(
        "models",
        "the models on this machine: the demo, the hub's cache, directories; and whether weft serves them",
        "weft.server.commands.models:run",
        "weft.server.commands.options:add_models_flags",
    ),
    Command(
        "inspect",
        "what a model is made of, what it takes, and whether this machine serves it",
        "weft.engine.runner.start.inspect_command:run",
        "weft.engine.runner.start.inspect_command:add_inspect_flags",
    ),
    Command(
        "quantize",
        "write a model's matrices in FP8 (compressed-tensors), and say what each layer loses",
        "weft.engine.model.quantize_command:run",
        "weft.engine.model.quantize_command:add_quantize_flags",
    ),
    Command(
        "doctor",
        "check this machine: Python, torch, GPU, kernels, ports, disk, the hub; exits 1 if something is bad",
        "weft.server.commands.doctor:run",
        "weft.server.commands.options:add_doctor_flags",
    ),
    Command(
        "health",
        "ask the servers that run on this machine, whatever their ports and TLS; exits 1 unless all are well",
        "weft.server.commands.health:run",
        "weft.server.commands.options:add_health_flags",
    ),
    Command(
        "load",
        "send requests to any OpenAI-compatible server and measure it",
        "weft.loadgen.command:run",
        "weft.loadgen.options:add_load_flags",
    ),
    Command(
        "fleet",
        "simulate engines under a load: how many it needs, in which configuration, at what latency and energy",
        "weft.deploy.fleet.command:run",
        "weft.deploy.fleet.options:add_fleet_flags",
    ),
    Command("cache stats", "how full the store is, and of what", _cache, _cache_path),
    Command(
        "cache verify",
        "read every page and compare its checksum; exits 1 if one does not hold",
        _cache,
        _cache_path,
    ),
    Command("cache clear", "forget every page; the file stays", _cache, _cache_path),
    Command(
        "search",
        "find the pipeline of nano-batches for a model and a workload",
        "weft.autosearch.command:run",
        "weft.autosearch.options:add_search_flags",
    ),
    Command(
        "advise",
        "find how many requests should run at once: measure the engine at each bound, write a configuration",
        "weft.autosearch.advisor.command:run",
        "weft.autosearch.advisor.options:add_advise_flags",
        EngineConfig,
    ),
    Command(
        "plan model",
        "what a model needs of an accelerator, by the cost model alone",
        "weft.autosearch.model:main",
        own_parser=True,
    ),
    Command("plan show", "print a plan and draw its pipelines", "weft.autosearch.show:main", own_parser=True),
    Command("completion", "print a script that completes weft's commands and options in a shell", _completion, _shell),
    Command(
        "compile",
        "compile a model's GPU kernels into --cache-dir, also without the GPU",
        "weft.engine.runner.start.compile_command:run",
        "weft.engine.runner.start.compile_command:add_compile_flags",
        EngineConfig,
    ),
    Command("version", "print the versions of weft and of what it runs on", _version),
)


CHECKOUT_GROUPS = ("bench", "demo")
CHECKOUT_COMMANDS = "weft.tools.commands"
"""The commands of `CHECKOUT_GROUPS`, which the wheel leaves out."""


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
        own = ", the demo's tokenizer in place of its own" if one.uses_demo_tokenizer else ""
        print(f"weft: {one.model_name} has made-up weights{own}: what it answers means nothing", file=sys.stderr)
    return int(_imported(command.run)(config))


def _models(argument: str | None, named: list[str], several: list[str]) -> dict[str, Any]:
    """The values of `model` and `models`, of MODEL, each --model, and --models: several of the first are the second.

    What is said here takes the place of both in the environment and the file. Raises `ConfigError`.
    """
    if argument is not None:
        named = [argument] if len(named) < 2 else [argument, *named]
    if several and named:
        raise ConfigError("give --model or --models, not both: --models lists all of them")
    several = several or (named if len(named) > 1 else [])
    if several:
        return {"model": "demo", "models": several}
    return {"model": named[0], "models": []} if named else {"model": None, "models": None}


def _all_located(config: ServeConfig) -> ServeConfig:
    """As `_located`, of all models."""
    if not config.models:
        return _located(config)
    models = [
        {**entry, **({"model": located.model} if "model" in entry else {})}
        for entry, located in zip(config.models, map(_located, config.each), strict=True)
    ]
    return config.model_copy(update={"models": models})


def _located(config: M) -> M:
    """With the directory of its model, downloaded if need be. What can be refused without an engine is refused here.

    Raises `ConfigError` and `ModelError`.
    """
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
        raise ModelError(f"{path} lacks {len(absent)} file(s) of its weights: {', '.join(absent[:3])}")
    return config if config.model == "demo" else config.model_copy(update={"model": str(path)})


def _hand_over(command: Command, rest: Sequence[str]) -> int:
    """Run a module that parses its own options."""
    try:
        run = _imported(command.run)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        print(f"weft: this needs Triton: {install_hint('gpu')}", file=sys.stderr)
        return 1
    more = [what for what, wanted in ((Parser, command.parser_class), (_cache_folder, command.cache_folder)) if wanted]
    return int(run(list(rest), *more) or 0)


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
            sub.add_argument("model_argument", metavar="MODEL", nargs="?", help="as --model [demo]")
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
    """Run one command; returns the exit status.

    A `WeftError` becomes one line on stderr, and status 2 if an option is at fault, else 1; so do a file that this user
    may not see and what cannot be written to stdout.
    """
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
        # The interpreter would complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # whoever reads it, `head` say, has seen enough
            print(f"weft: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 1


def _unwritten() -> OSError | None:
    """Why what was printed cannot be written."""
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
    for command in commands:
        if command.own_parser and command.name == " ".join(argv[:2]):
            return _translated(f"weft {command.name}", partial(_hand_over, command, argv[2:]))
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
    """What `run` returns, or the exit status of what it raises."""
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
