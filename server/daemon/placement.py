"""`place` assigns GPUs, cores, directories and memory to engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.engine.config import EngineConfig, Share
from weft.engine.errors import ConfigError
from weft.engine.images.rules import serves_images
from weft.engine.wire.cores import shares
from weft.engine.wire.pixels import PixelShelf
from weft.server.config import ServeConfig


def place(config: ServeConfig, gpus: Sequence[str], cpus: set[int], nodes: Mapping[int, int]) -> list[EngineConfig]:
    """Return the configurations of all engines, model by model; see `_of_a_model` for the arguments.

    Several models share GPUs and cores, and split the memory by their shares. Raises `ConfigError`, also if two models
    have the same name."""
    each, memory = config.each, config.memory_shares
    if len(each) == 1:
        return _of_a_model(config, gpus, cpus, nodes)
    names = [name for own in each for name in {*own.model_names, *own.served_model_name}]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two models are named {twice}: give one of them another served_model_name inside --models")
    on_gpus = bool(gpus) and config.device != "cpu"
    awake = sorted((c.num_engines * c.tensor_parallel_size for c in each), reverse=True)[: config.max_awake_models]
    threads = None if on_gpus else max(1, (len(cpus) - 1) // sum(awake))
    engines: list[EngineConfig] = []
    for own, part in zip(each, memory, strict=True):
        if own.ssd_kv_path is not None:
            path = Path(own.ssd_kv_path) / own.model_names[0].replace("/", "--")
            own = own.model_copy(update={"ssd_kv_path": str(path)})
        for alone in _of_a_model(own, gpus, set(), {}):
            fields = {"engine": len(engines), "memory": part, "sleeps": True, "models": len(each), "awake": len(awake)}
            share = alone.share.model_copy(update=fields)
            engines.append(alone.model_copy(update={"share": share, "cpu_threads": own.cpu_threads or threads}))
    return engines


def _of_a_model(
    config: ServeConfig, gpus: Sequence[str], cpus: set[int], nodes: Mapping[int, int]
) -> list[EngineConfig]:
    """Return the configurations of one model's engines.

    `gpus`: names of all GPUs. `cpus`: core numbers. `nodes`: the NUMA node of each core.

    Sizes that the operator sets (pages, host memory, threads) apply to each engine; the rest is divided. Engines on a
    CPU divide the cores, or only the threads if there are too few cores. Raises `ConfigError` for missing GPUs."""
    count = config.num_engines
    on_gpus = bool(gpus) and config.device != "cpu"
    shared = shares_weights(config)
    # A single model sleeps only on an operator's request. Replicas cannot release shared weights.
    sleeps = config.admin_api_key is not None and not shared
    if count == 1:
        return [config.engine.model_copy(update={"share": Share(sleeps=True)}) if sleeps else config.engine]
    ranks = config.tensor_parallel_size
    if on_gpus and config.data_parallel_size * ranks > len(gpus):
        each = f" of {ranks} each" if ranks > 1 else ""
        raise ConfigError(
            f"--data-parallel-size {config.data_parallel_size} needs as many GPUs{each}: there are {len(gpus)}"
        )
    parts = [] if on_gpus or not cpus else shares(cpus, nodes, count)
    threads = None if on_gpus or parts else max(1, (len(cpus) - 1) // (count * ranks))
    configs = []
    for engine in range(count):
        share = Share(
            engine=engine,
            sharers=config.replicas if on_gpus else count,
            weight_sharers=config.replicas if shared else 1,
            sleeps=sleeps,
            cpus=tuple(sorted(parts[engine])) if parts else (),
            gpu=",".join(gpus[engine // config.replicas * ranks :][:ranks]) if on_gpus else "",
        )
        own: dict[str, object] = {"share": share, "cpu_threads": config.cpu_threads or threads}
        if config.ssd_kv_path is not None:
            own["ssd_kv_path"] = str(Path(config.ssd_kv_path) / f"engine-{engine}")
        configs.append(config.engine.model_copy(update=own))
    return configs


def with_pixels(config: EngineConfig, shelf: PixelShelf) -> EngineConfig:
    """Return an engine's configuration with the shelf of pixels, if its model takes images."""
    if not serves_images(config.model_path):
        return config
    return config.model_copy(update={"share": config.share.model_copy(update={"pixels": str(shelf.directory)})})


def shares_weights(config: ServeConfig) -> bool:
    """Return whether the replicas on a device share one copy of the weights. With several models, replicas sleep
    independently and need their own copies."""
    return config.replicas > 1 and config.tensor_parallel_size == 1 and len(config.each) == 1


def described(config: EngineConfig) -> str:
    """Describe an engine's assignment for the log."""
    share = config.share
    gpu = f"GPU {share.gpu}" if share.gpu else ""
    cpus = f"cores {_ranges(share.cpus)}" if share.cpus else ""
    if not cpus and not gpu and config.cpu_threads:
        cpus = f"all cores, {config.cpu_threads} threads"
    store = f"KV store {config.ssd_kv_path}" if config.ssd_kv_path else ""
    return f"engine {share.engine}: {', '.join(filter(None, (gpu, cpus, store)))}"


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: `0-3, 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
