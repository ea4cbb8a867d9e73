"""`weft inspect`: prints a model's structure and memory use, and whether this machine can serve it."""

from __future__ import annotations

import argparse
import gc
import json
from typing import TYPE_CHECKING, Any, get_args

from weft.engine.config import GGUF_INDEX, EngineConfig, ModelImpl
from weft.engine.errors import ConfigError, WeftError
from weft.engine.wire.preloaded import gpus

if TYPE_CHECKING:
    from weft.engine.model.spec import ModelSpec

GIB = 2**30
MAX_RANKS = 8  # Maximum of `EngineConfig`.


def add_inspect_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="MODEL", nargs="?", help="directory, ORG/NAME on the hub, or 'demo' [demo]")
    parser.add_argument("--model-preset", metavar="NAME", help="built-in model shape instead of MODEL")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of ORG/NAME [main]")
    parser.add_argument(
        "--max-model-len", metavar="N", type=int, help="context length to plan for [the model's maximum]"
    )
    parser.add_argument(
        "--model-impl", choices=get_args(ModelImpl), default="auto", help="implementation of the layers [auto]"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's directory")
    parser.add_argument(
        "--tensor-parallel-size", metavar="N", type=int, default=1, help="number of ranks to split the model over [1]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _config(arguments: argparse.Namespace) -> EngineConfig:
    """Return the configuration to inspect. Raises `ConfigError` and `ModelError`."""
    from weft.engine.model.hub import find_model

    if arguments.name is not None and arguments.model_preset is not None:
        raise ConfigError("give a model or --model-preset, not both")
    if arguments.max_model_len is not None and arguments.max_model_len < 2:
        raise ConfigError("--max-model-len must be 2 or more")
    if not 1 <= arguments.tensor_parallel_size <= MAX_RANKS:
        raise ConfigError(f"--tensor-parallel-size must be 1 to {MAX_RANKS}")
    options: dict[str, Any] = {
        "tensor_parallel_size": arguments.tensor_parallel_size, "load_format": "dummy",
        "max_model_len": arguments.max_model_len, "model_impl": arguments.model_impl,
        "trust_remote_code": arguments.trust_remote_code,
    }  # fmt: skip
    if arguments.model_preset is not None:
        return EngineConfig(model_preset=EngineConfig.known_preset(arguments.model_preset), **options)
    if arguments.name in (None, "demo"):
        return EngineConfig(**options)
    return EngineConfig(
        model=str(find_model(arguments.name, arguments.revision, weights=False, tokenizer=False)), **options
    )


def _on_cpu(config: EngineConfig, spec: ModelSpec) -> dict[str, Any] | None:
    """Return what `resolve` gives for a CPU, without torch, which takes most of a second to import. None for a model
    that does not fit, and for one that is computed or stored in another way than plainly."""
    from weft.engine.model.packed import packed_as
    from weft.engine.runner.options.cards import bytes_per_token
    from weft.engine.runner.options.machine import CPU_MEMORY_SHARE, CPU_SEQUENCES, has_bfloat16, machine_memory
    from weft.kernels.native import library

    plain = spec.native and spec.quantization is None and spec.integers is None and len(set(spec.kv_heads)) == 1
    if not plain or spec.recurrent or config.tensor_parallel_size > 1:
        return None
    if (config.model_path / GGUF_INDEX).is_file() and library.usable():
        spec = packed_as(spec, config.model_path)
    dtype, itemsize = ("bfloat16", 2) if spec.dtype == "bfloat16" and has_bfloat16() else ("float32", 4)
    weights, memory, page_size = spec.weight_bytes(itemsize), machine_memory(), config.page_size
    token_bytes = spec.kv_planes * itemsize * sum(heads * width for heads, width in spec.kv_heads)
    sequences, longest = config.sequence_limit or CPU_SEQUENCES, config.max_model_len or spec.max_positions
    most = sequences * -(-longest // page_size) + 1
    pages = min(most, int((int(memory * CPU_MEMORY_SHARE) - weights) // (page_size * token_bytes)))
    tables = longest * (4 * spec.head_dim + 4 * sequences)
    if longest > spec.max_positions or tables > memory or weights > 0.9 * memory or pages < 2:
        return None
    found = {
        "served": True, "dtype": dtype, "weight_bytes": weights, "kv_bytes_per_token": token_bytes,
        "kv_tokens": pages * page_size, "max_model_len": max(2, min(longest, (pages - 1) * page_size)),
    }  # fmt: skip
    if spec.packed is None:
        return found
    return {**found, "weight_format": spec.packed.formats, "bytes_per_token": bytes_per_token(spec, itemsize)}


def _devices(config: EngineConfig, spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """Return KV capacity and limits of each of this machine's devices for one rank, or why it cannot serve it."""
    if not gpus() and (quick := _on_cpu(config, spec)) is not None:
        return {"cpu": quick}
    from weft.engine.runner.options.cards import bytes_per_token
    from weft.engine.runner.options.footprint import memory_bytes
    from weft.engine.runner.options.resolve import resolve, served_as
    from weft.kernels.common.gpu import gpu

    found: dict[str, dict[str, Any]] = {}
    for name in ("cpu",) if gpu() is None else ("cpu", "cuda"):
        there = config.model_copy(update={"device": name})
        # Dummy weights, which need no files, are never packed.
        own = served_as(spec, there.model_copy(update={"load_format": "auto"}))
        try:
            resolved = resolve(there, own)
        except WeftError as error:
            found[name] = {"served": False, "why_not": str(error)}
            continue
        weights = own.weight_bytes(resolved.weight_dtype.itemsize)
        pages = resolved.num_pages
        if pages is None:  # an upper limit: the engine measures this after allocating its buffers
            room = memory_bytes(resolved.device) * resolved.gpu_memory_utilization - weights
            pages = max(0, resolved.kv.pages_in(room))
        found[name] = {
            "served": True,
            "dtype": str(resolved.compute_dtype).removeprefix("torch."),
            "weight_bytes": weights,
            "kv_bytes_per_token": resolved.kv.token_bytes,
            "kv_tokens": pages * resolved.kv.page_size,
            "max_model_len": resolved.max_model_len,
        }
        if own.native and own.packed is not None:
            found[name]["weight_format"] = own.packed.formats
            found[name]["bytes_per_token"] = bytes_per_token(own, resolved.weight_dtype.itemsize)
        if resolved.states.pages:
            found[name]["state_bytes_per_request"] = resolved.states.nbytes
    return found


def inspect(config: EngineConfig) -> dict[str, Any]:
    """Return the command's output as data. Raises `ModelError` for a model that no device supports."""
    from weft.engine.model.description import describe
    from weft.engine.model.encoders import serves_encoder
    from weft.engine.model.implementation import choose_spec
    from weft.engine.runner.options.cards import on_cards

    if serves_encoder(config.model_copy(update={"load_format": "auto"})):
        return _encoder(config)
    spec, implementation = choose_spec(config)
    own = spec.shard(0, config.tensor_parallel_size)
    devices = _devices(config, own)
    if devices["cpu"]["served"]:
        _add_bound(devices["cpu"], own, config.tensor_parallel_size)
    return {
        "model": config.model_name,
        "architecture": spec.architecture,
        "implementation": implementation,
        "parts": dict(describe(spec)),
        "parameters": spec.num_parameters,
        "active_parameters": spec.active_parameters,
        "kv_values_per_token": spec.kv_planes * sum(heads * width for heads, width in spec.kv_heads),
        "ranks": [ranks for ranks in range(1, MAX_RANKS + 1) if _splits(spec, ranks)],
        "devices": devices,
        "cards": on_cards(own),
    }


def _add_bound(cpu: dict[str, Any], spec: ModelSpec, ranks: int) -> None:
    """Add what bounds the tokens a second of one request on this machine's CPU: ranks share its memory."""
    from weft.engine.runner.options.cards import bytes_per_token
    from weft.engine.runner.options.machine import CACHED_BYTES, read_bandwidth

    itemsize = 2 if cpu["dtype"] == "bfloat16" else 4
    read = cpu.setdefault("bytes_per_token", bytes_per_token(spec, itemsize))
    if read <= CACHED_BYTES:
        return
    bandwidth = read_bandwidth()
    cpu |= {"bytes_per_second": int(bandwidth), "tokens_per_second_bound": round(bandwidth / (ranks * read), 1)}


def _encoder(config: EngineConfig) -> dict[str, Any]:
    """Return the command's output for an encoder."""
    from weft.engine.model.encoders import read_encoder

    spec = read_encoder(config.model_path)
    parts = {"layers": f"{spec.num_layers} of width {spec.hidden_size}", "vocabulary": f"{spec.vocab_size} tokens"}
    if spec.classifies:
        parts["classes"] = f"{len(spec.labels)}: {', '.join(spec.labels[:8])}"
    longest = config.max_model_len or spec.max_tokens
    device = {"served": True, "dtype": "float32", "weight_bytes": 4 * spec.num_parameters, "max_model_len": longest}
    if longest > spec.positions:
        device = {"served": False, "why_not": f"{longest} tokens are more than its {spec.positions} positions"}
    return {
        "model": config.model_name,
        "architecture": spec.architecture,
        "implementation": "transformers' code, as an encoder",
        "parts": parts,
        "parameters": spec.num_parameters,
        "active_parameters": spec.num_parameters,
        "kv_values_per_token": 0,
        "ranks": [1],
        "devices": {"cpu": device},
    }


def _splits(spec: ModelSpec, ranks: int) -> bool:
    try:
        spec.shard(0, ranks)
    except WeftError:
        return False
    return True


def _weights_status(config: EngineConfig) -> str:
    from weft.engine.model.hub import damaged, missing

    if config.model_preset is not None:
        return "none: a preset is measured with dummy weights"
    if absent := missing(config.model_path):
        return f"not here: {', '.join(absent[:2])}"
    cut = damaged(config.model_path)
    return f"cannot be read whole: {', '.join(cut[:2])}" if cut else "here"


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Raises `WeftError`, one line."""
    gc.disable()  # imports create no garbage, and the process ends soon
    config = _config(arguments)
    facts = {**inspect(config), "weights": _weights_status(config)}
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    rows = [("model", f"{facts['model']} ({facts['architecture']})"), ("computed by", facts["implementation"])]
    rows += facts["parts"].items()
    rows.append(("parameters", f"{_amount(facts['parameters'])}, {_amount(facts['active_parameters'])} a token"))
    values = facts["kv_values_per_token"]
    if values:
        rows.append(("KV", f"{values:,} values a token, {values * 2 / 1024:.1f} KiB in bfloat16"))
    rows.append(("weights", facts["weights"]))
    rows.append(("ranks", " or ".join(map(str, facts["ranks"]))))
    each = f"on each of {ranks} ranks, " if (ranks := config.tensor_parallel_size) > 1 else ""
    rows += [(name, _device_text(device, each)) for name, device in facts["devices"].items()]
    rows += [(name, each + _card_text(formats)) for name, formats in facts.get("cards", {}).items()]
    width = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        print(f"{name:{width}}{text}")
    return 0


def _amount(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _device_text(device: dict[str, Any], each: str) -> str:
    if not device["served"]:
        return f"does not serve it: {device['why_not']}"
    size = device.get("state_bytes_per_request", 0) / 2**20
    states = f" and {size:.2f} MiB of states a request" if size else ""
    if "kv_tokens" not in device:
        size = device["weight_bytes"] / GIB
        return (
            f"serves it in {device['dtype']}: {size:.1f} GiB of weights, inputs of {device['max_model_len']:,} tokens"
        )
    packed = f" that stay packed ({device['weight_format']})" if "weight_format" in device else ""
    return (
        f"serves it in {device['dtype']}: {each}{device['weight_bytes'] / GIB:.1f} GiB of weights{packed}, "
        f"{device['kv_bytes_per_token'] / 1024:.1f} KiB of KV a token{states}, "
        f"room for {device['kv_tokens']:,} tokens, contexts of {device['max_model_len']:,}{_bound(device)}"
    )


def _bound(device: dict[str, Any]) -> str:
    if "tokens_per_second_bound" not in device:
        return ""
    read, speed = device["bytes_per_token"] / 2**20, device["bytes_per_second"] / 1e9
    rate = device["tokens_per_second_bound"]
    return f"; one request reads {read:,.0f} MiB a token, so {rate:,} tokens/s at most at the {speed:.0f} GB/s measured"


def _card_text(formats: dict[str, dict[str, Any]]) -> str:
    """Return one line; a reason that excludes every format is said once."""
    reasons = {facts.get("why_not") for facts in formats.values()}
    if len(reasons) == 1 and None not in reasons:
        return f"does not serve it: {reasons.pop()}"
    return "; ".join(f"{name}: {_format_text(facts)}" for name, facts in formats.items())


def _format_text(facts: dict[str, Any]) -> str:
    if not facts["fits"]:
        return f"does not fit, {facts['why_not']}" if "weight_bytes" in facts else f"not served, {facts['why_not']}"
    room = "" if facts["kv_tokens"] is None else f", room for {facts['kv_tokens']:,} tokens"
    rate = facts["tokens_per_second_bound"]
    bound = "" if rate is None else f", one request {rate:,} tokens/s at most"
    return f"{facts['weight_bytes'] / GIB:.1f} GiB{room}{bound}"
