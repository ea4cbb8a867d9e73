"""Engines with shared weights: one loads, all map, and the weights outlive each of them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fp8_files import FORMATS, write_fp8
from tiny import FAMILIES, save_tiny
from torch import Tensor

from weft.engine.config import EngineConfig, Share
from weft.engine.engine import Engine
from weft.engine.errors import ModelError
from weft.engine.model.directory import read_spec
from weft.engine.model.weights import Weights, load_weights
from weft.engine.runner.memory.shared_memory import HostMemory
from weft.engine.runner.memory.shared_weights import shared_weights
from weft.engine.runner.start import load as model_load
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams
from weft.engine.wire.weight_exchange import COUNT, WeightExchange

CPU = {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 64}
SHARE = Share(sharers=2, weight_sharers=2)


@pytest.fixture
def exchange() -> Iterator[WeightExchange]:
    made = WeightExchange()
    yield made
    made.clear()
    made.close()


def file_of(text: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, text)
    return fd


def other(exchange: WeightExchange, what: str) -> subprocess.Popen[str]:
    """Start a process with the exchange that has run the code `what`, and then sleeps."""
    code = (
        "import os, sys, time; from weft.engine.wire.weight_exchange import WeightExchange; "
        f"exchange = WeightExchange.of({exchange.fds}); {what}; print('done', flush=True); time.sleep(1e6)"
    )
    made = subprocess.Popen(
        [sys.executable, "-P", "-c", code], pass_fds=exchange.fds, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert made.stdout is not None
    assert made.stdout.readline() == "done\n"
    return made


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_queued_weights_stay_and_are_replaced(exchange: WeightExchange) -> None:
    assert exchange.find() is None
    assert len(exchange.fds) == COUNT
    for name in ("first", "second"):
        fd = file_of(name.encode())
        exchange.put(name, fd, fd)
        os.close(fd)
        for _ in range(2):
            found = exchange.find()
            assert found is not None
            assert found.name == name
            assert os.pread(found.memory, 9, 0) == os.pread(found.contents, 9, 0) == name.encode()
            found.close()
    exchange.clear()
    assert exchange.find() is None


def test_memory_outlives_the_process_that_put_it_there(exchange: WeightExchange) -> None:
    ended(other(exchange, "fd = os.memfd_create('x'); os.write(fd, b'weights'); exchange.put('name', fd, fd)"))
    found = exchange.find()
    assert found is not None
    assert (found.name, os.pread(found.memory, 9, 0)) == ("name", b"weights")
    found.close()


def test_an_exiting_engine_releases_the_lock(exchange: WeightExchange) -> None:
    loading = other(exchange, "lock = exchange.lock(); lock.__enter__()")
    waited = []

    def waiting() -> None:
        if not waited:
            ended(loading)
        waited.append(1)

    with exchange.lock(waiting):
        assert waited


def parts(value: Any) -> Iterator[Any]:
    """All fields of the weights, in order."""
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from parts(part)
    elif isinstance(value, tuple):
        yield len(value)
        for part in value:
            yield from parts(part)
    else:
        yield value


def assert_same(found: Weights, expected: Weights) -> None:
    for a, b in zip(parts(found), parts(expected), strict=True):
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(a.float(), b.float())
        else:
            assert a == b


@pytest.mark.parametrize("family", ["llama3.1", "mixtral", "qwen2", "gpt2", "gemma3", "gpt-oss"])
def test_mapped_weights_equal_the_loaded_ones(family: str, tmp_path: Path, exchange: WeightExchange) -> None:
    assert family in FAMILIES
    path = save_tiny(family, tmp_path)
    spec = read_spec(path)
    expected = load_weights(spec, path, **CPU)
    loads: list[int] = []

    def load() -> Weights:
        loads.append(1)
        return load_weights(spec, path, **CPU)

    for _ in range(2):
        found = shared_weights(exchange, "name", HostMemory(), load)
        assert_same(found, expected)
        assert (found.lm_head is found.embedding) == (expected.lm_head is expected.embedding)
    assert len(loads) == 1


def test_weights_in_fp8_are_mapped(tmp_path: Path, exchange: WeightExchange) -> None:
    there, _ = write_fp8(save_tiny("llama2", tmp_path / "llama2"), tmp_path / "fp8", next(iter(FORMATS)))
    spec = read_spec(there)
    assert_same(
        shared_weights(exchange, "name", HostMemory(), lambda: load_weights(spec, there, **CPU)),
        load_weights(spec, there, **CPU),
    )


def test_shared_weights_are_read_only() -> None:
    def fill(home: Tensor) -> None:
        home.fill_(7)

    fd = HostMemory().make(8, fill)
    assert HostMemory().map(fd, 8).tolist() == [7] * 8
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 8)
    os.close(fd)


def test_after_a_failed_load_the_next_engine_loads(exchange: WeightExchange) -> None:
    def broken() -> Weights:
        raise ModelError("cut off")

    for _ in range(2):
        with pytest.raises(ModelError, match="cut off"):
            shared_weights(exchange, "name", HostMemory(), broken)
    assert exchange.find() is None


def tokens(engine: Engine) -> list[int]:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    engine.add(AddRequest(handle=1, prompt_token_ids=np.arange(5, 30, dtype=np.int32).tobytes(), params=params))
    out: list[int] = []
    while engine.has_work:
        if (outputs := engine.step()) is not None:
            out += outputs.columns()[1].tolist()
    return out


def test_engines_with_shared_weights_answer_like_one_alone(
    exchange: WeightExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(device="cpu", page_size=8, num_pages=32, max_num_seqs=4, cpu_threads=1)
    alone = tokens(Engine(config))
    loads: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Weights:
        loads.append(1)
        return load_weights(*arguments, **options)

    monkeypatch.setattr(model_load, "load_weights", counted)
    first, second = (Engine(config.model_copy(update={"share": SHARE}), exchange=exchange) for _ in range(2))
    assert (tokens(first), tokens(second), len(loads)) == (alone, alone, 1)
    # Other weights are distinct under any name, and those in use are kept.
    renewed = config.model_copy(update={"share": SHARE, "load_format": "dummy"})
    others = tokens(Engine(renewed, exchange=exchange))
    assert len(loads) == 2
    assert (others != alone, tokens(first)) == (True, alone)
    assert tokens(Engine(renewed, exchange=exchange)) == others
    assert len(loads) == 2
