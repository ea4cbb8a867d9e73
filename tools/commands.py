"""`weft bench` and `weft demo`, the commands of a checkout. `weft.server.daemon.cli` looks this module up by name."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from weft import install_hint
from weft.engine.config import EngineConfig
from weft.server.daemon.cli import Command
from weft.server.options import Parser, load

_OPTIONS = "weft.tools.bench.options"


def _cache_folder() -> Path:
    """The folder of compiled and tuned kernels. Raises `ConfigError`."""
    return load(EngineConfig, {}, None).cache_path


def _kernel_bench(module: str, rest: Any) -> int:
    """Run a module of tools/kernels, which need Triton and parse their own options."""
    try:
        main = import_module(f"weft.tools.kernels.{module}").main
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        print(f"weft: this needs Triton: {install_hint('gpu')}", file=sys.stderr)
        return 1
    return int(main(rest, Parser, _cache_folder))


GROUPS = {
    "bench": ("measure throughput and CPU cost", "BENCHMARK"),
    "demo": ("train or evaluate the embedded demo model", "COMMAND"),
}

COMMANDS = (
    Command(
        "bench offline",
        "throughput of the engine in this process, without HTTP",
        "weft.tools.bench.offline:run_offline",
        f"{_OPTIONS}:add_offline_flags",
        EngineConfig,
    ),
    Command(
        "bench multiround",
        "conversations that exceed GPU memory, with and without KV tiers",
        "weft.tools.bench.multiround:run_multiround",
        f"{_OPTIONS}:add_multiround_flags",
        EngineConfig,
    ),
    Command(
        "bench agent",
        "turns of one long conversation, with its prefix on the device and in each lower tier",
        "weft.tools.bench.agent:run_agent",
        f"{_OPTIONS}:add_agent_flags",
        EngineConfig,
    ),
    Command(
        "bench speculation",
        "throughput on real prompts, with and without speculation",
        "weft.tools.bench.speculation:run",
        f"{_OPTIONS}:add_speculation_flags",
        EngineConfig,
    ),
    Command(
        "bench scheduler",
        "CPU time per iteration, without a model",
        "weft.tools.bench.offline:run_scheduler",
        f"{_OPTIONS}:add_scheduler_flags",
    ),
    Command(
        "bench gguf",
        "speed of converting GGUF weights on a CPU, by type and threads",
        "weft.tools.bench.gguf:run",
        f"{_OPTIONS}:add_gguf_flags",
    ),
    Command(
        "bench server",
        "CPU time of an API process per streamed token, without a model",
        "weft.tools.bench.server.server:run",
        "weft.tools.bench.server.options:add_server_flags",
    ),
    Command(
        "bench compare",
        "the same load on several OpenAI-compatible servers in turn",
        "weft.tools.bench.compare:main",
        own_parser=True,
    ),
    Command(
        "bench iterations",
        "record how long an engine's iterations take, for weft fleet",
        "weft.tools.fleet.record:run",
        "weft.tools.fleet.options:add_iterations_flags",
        EngineConfig,
    ),
    Command(
        "bench kernels",
        "compare each GPU kernel with its hardware limit and the vendor's library",
        partial(_kernel_bench, "bench"),
        own_parser=True,
    ),
    Command(
        "bench attention",
        "compare ways to compute attention of hybrid batches, in bursts and sustained",
        partial(_kernel_bench, "bench_attention"),
        own_parser=True,
    ),
    Command(
        "bench ranks",
        "compare ways to compute sums over ranks in an iteration on several GPUs",
        "weft.tools.papers.ablation:main",
        own_parser=True,
    ),
    Command(
        "bench batching",
        "reproduce Table IV and the figures of Mind the Memory Gap with this engine",
        "weft.tools.papers.paper:main",
        own_parser=True,
    ),
    Command(
        "bench formulas",
        "derive the constants of the plan search's formulas from recorded profiles",
        "weft.tools.papers.formulas:main",
        own_parser=True,
    ),
    Command("demo evaluate", "measure the accuracy of each skill", "weft.tools.demo.evaluate:main", own_parser=True),
    Command("demo train", "train the model again", "weft.tools.demo.train:main", own_parser=True),
)
