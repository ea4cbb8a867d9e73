"""The `weft` command. Heavy modules are imported by the subcommand that needs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft import __version__
from weft.engine.config import EngineConfig
from weft.engine.errors import WeftError
from weft.server.config import ServeConfig
from weft.server.options import Parser, add_flags, load, nearest, unknown_variables

OWN_PARSERS: dict[tuple[str, ...], str] = {
    ("demo", "evaluate"): "weft.engine.demo.evaluate",
    ("demo", "train"): "weft.engine.demo.train",
    ("bench", "kernels"): "weft.kernels.bench",
}
COMMANDS = ("serve", "bench", "demo", "version")

_HELP = """\
Serve large language models over the OpenAI HTTP API.

  weft serve                       serve the embedded demo model on http://127.0.0.1:8000
  weft serve /models/Llama-3-8B    serve a Hugging Face model directory
  weft bench offline               measure throughput in this process
  weft demo evaluate               measure the demo model's skills
"""


def _config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file with any of the options below")


def _model_options(parser: Parser, model: type[EngineConfig]) -> None:
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="as --model [demo]")
    _config_flag(parser)
    add_flags(parser, model)
    parser.epilog = (
        "Every option can also be set as WEFT_<NAME> in the environment or as a key of --config FILE; "
        "a flag wins over the environment, the environment over the file."
    )


def _flags(arguments: argparse.Namespace, model: type[EngineConfig]) -> dict[str, Any]:
    flags = {name: getattr(arguments, name, None) for name in model.model_fields}
    if arguments.model_argument is not None:
        flags["model"] = arguments.model_argument
    return flags


def _serve(arguments: argparse.Namespace) -> int:
    config = load(ServeConfig, _flags(arguments, ServeConfig), arguments.config)
    for line in unknown_variables(ServeConfig):
        print(f"weft serve: {line}", file=sys.stderr)
    from weft.server.daemon import run

    return run(config)


def _bench_offline(arguments: argparse.Namespace) -> int:
    config = load(EngineConfig, _flags(arguments, EngineConfig), arguments.config)
    from weft.engine.bench import run_offline

    return run_offline(config, arguments)


def _bench_scheduler(arguments: argparse.Namespace) -> int:
    from weft.engine.bench import run_scheduler

    return run_scheduler(arguments)


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


def _hand_over(module: str, rest: Sequence[str]) -> int:
    """Run a module that parses its own options."""
    from importlib import import_module

    try:
        run = import_module(module).main
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        print("weft: this needs Triton: pip install 'weft-serve[gpu]'", file=sys.stderr)
        return 1
    return int(run(list(rest)) or 0)


def _parser() -> Parser:
    parser = Parser(prog="weft", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)

    def command(name: str, run: Any, text: str, parents: Any = commands) -> Parser:
        sub: Parser = parents.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(run=run, parser=sub)
        return sub

    _model_options(command("serve", _serve, "serve a model over HTTP until stopped"), ServeConfig)

    bench = commands.add_parser("bench", help="measure throughput and CPU cost")
    bench.set_defaults(parser=bench)
    benches = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", parser_class=Parser)
    from weft.engine.bench_options import add_offline_flags, add_scheduler_flags

    offline = command("offline", _bench_offline, "throughput of the engine in this process, without HTTP", benches)
    _model_options(offline, EngineConfig)
    add_offline_flags(offline)
    scheduler = command("scheduler", _bench_scheduler, "CPU time per iteration, without a model", benches)
    add_scheduler_flags(scheduler)

    benches.add_parser("kernels", help="each GPU kernel beside its ceiling and the vendor's")  # see OWN_PARSERS

    demo = commands.add_parser("demo", help="train or evaluate the embedded demo model")
    demo.set_defaults(parser=demo)
    demos = demo.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    demos.add_parser("evaluate", help="accuracy of each of its skills")
    demos.add_parser("train", help="make it again")
    command("version", _version, "print the versions of weft and of what it runs on")
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. A `WeftError` becomes one line on stderr and status 1."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if module := OWN_PARSERS.get(tuple(argv[:2])):
        return _hand_over(module, argv[2:])
    parser = _parser()
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(f"unknown command {argv[0]}{nearest(argv[0], COMMANDS)}")
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        (getattr(arguments, "parser", None) or parser).print_help()
        return 0
    try:
        return int(arguments.run(arguments))
    except WeftError as error:
        print(f"{arguments.parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
