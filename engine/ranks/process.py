"""The process of a follower rank. `wire.child` runs it with the arguments RANK HEARTBEATS ROW STACKS.

HEARTBEATS, ROW and STACKS say where it writes heartbeats and stacks. Stdin has two lines of JSON: an `EngineConfig` and
`Descriptors`. The process exits when stdin closes, when its parent exits or when rank 0 sends `END`, and writes the
reason of a failure to its `State` for rank 0.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import traceback

from weft.engine.config import EngineConfig
from weft.engine.errors import WeftError
from weft.engine.progress import progress_text
from weft.engine.ranks.links import Descriptors, Links
from weft.engine.runner.device.compile_job import use_cache
from weft.engine.wire.heartbeat import Heartbeat, Heartbeats
from weft.engine.wire.log_sink import flush_lines, install
from weft.engine.wire.stacks import write_stacks_to


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _serve(config: EngineConfig, links: Links, heartbeat: Heartbeat, start_timeout: float) -> None:
    heartbeat.stage("importing", start_timeout)
    use_cache(config)

    def report(phase: str, done: int, total: int) -> None:
        heartbeat.stage(progress_text(phase, done, total), start_timeout)

    from weft.engine.memory.model_id import model_id
    from weft.engine.memory.tier_setup import open_store, reopened
    from weft.engine.model.adapter import AdapterReader
    from weft.engine.model.directory import read_config, read_spec
    from weft.engine.model.implementation import in_format
    from weft.engine.ranks.adapters import FollowingAdapters
    from weft.engine.ranks.agreement import agree
    from weft.engine.ranks.follower import Follower
    from weft.engine.ranks.runners import rank_runner
    from weft.engine.ranks.shared_collectives import SharedCollectives
    from weft.engine.runner.options.resolve import resolve, served_as
    from weft.engine.runner.start.load import prepare, read_weights, within_memory
    from weft.engine.runner.start.vision import image_pool

    whole = in_format(read_spec(config.model_path), config.quantization)
    spec = served_as(whole, config).shard(links.rank, links.ranks)
    resolved = resolve(config, spec)
    model = model_id(config, resolved.kv, spec, resolved.compute_dtype, resolved.max_model_len)
    store = config, resolved.kv, model, spec.shard_of, resolved.packed
    file = open_store(*store)
    with within_memory():
        prepare(resolved)
        weights = read_weights(spec, config, resolved, report)
        heartbeat.stage("waiting for the other ranks", start_timeout)
        links.on_progress = heartbeat.still
        collectives = SharedCollectives(links)
        resolved, stores = agree(collectives, resolved, model, store=file is not None)
        if file is not None and not stores:
            file.close()
            file = None
        images = image_pool(read_config(config.model_path), whole, config, resolved)
        runner = rank_runner(links, spec, weights, config, resolved, collectives, report, images=images)
        links.on_progress = heartbeat
    adapters = None
    if config.adapters and runner.adapters is not None:
        reader = AdapterReader(spec, config.model_path, resolved.compute_dtype, config.max_lora_rank)
        adapters = FollowingAdapters(runner.adapters, reader)
    follower = Follower(
        links, runner, collectives, file, resolved.cpu_threads, lambda: reopened(*store), adapters, images
    )
    follower.run(heartbeat)


def main() -> int:
    gc.enable()
    gc.freeze()  # later collections skip everything imported
    install()
    logging.getLogger("weft.engine").setLevel(logging.ERROR)  # rank 0 logs how options and plan resolve
    rank, heartbeats_fd, row, stacks_fd = map(int, sys.argv[1:5])
    write_stacks_to(stacks_fd)
    config = EngineConfig.model_validate_json(sys.stdin.buffer.readline())
    links = Links(rank, Descriptors.load(sys.stdin.buffer.readline().decode()))
    threading.Thread(target=_end_with_stdin, name="weft-stdin", daemon=True).start()
    heartbeats = Heartbeats(row + 1, heartbeats_fd)
    state, code = links.state(rank), 0
    try:
        _serve(config, links, heartbeats.rank(row, rank), heartbeats.start_timeout)
    except WeftError as error:
        state.end(str(error))
        code = 1
    except MemoryError:
        state.end("out of memory")
        code = 1
    except Exception as error:  # a bug: full trace to the log, one line to rank 0
        traceback.print_exc()
        state.end(f"{type(error).__name__}: {error}".splitlines()[0])
        code = 70
    flush_lines()
    os._exit(code)


if __name__ == "__main__":
    main()
