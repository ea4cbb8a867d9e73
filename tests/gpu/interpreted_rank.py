"""A rank of a GPU that is not there, as a process: `python interpreted_rank.py RANK RANKS FILE OUT MODEL…`.

FILE is the memory that all ranks share, for as long as they run; what the rank comes to is saved as OUT.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from interpreted import streams_in_order
from test_executor import Machine, _expert_specs, _spec
from torch import Tensor

from weft.autosearch.bench_protocol import Load
from weft.engine.model.parts import Norm, Placement
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import serial_period
from weft.engine.runner.collectives import Graph
from weft.engine.runner.peer_collectives import PeerCollectives, Sizes
from weft.kernels import collectives as kernels
from weft.kernels.gpu import gpu

MAPPED: list[np.memmap] = []
"""what kernels know the addresses of"""
ARENA = 4 << 20
"""bytes of a rank in one case"""
TOKENS = 8
LOAD = Load(7, 4, 20, 3)
SUMS = (5, 200)
"""tokens and hidden size: parts of a row that are not alike"""


def models() -> dict[str, ModelSpec]:
    """One of each kind of layer that ranks are told apart by."""
    plain = replace(_spec(64, 128, 4, 2, 32), vocab_size=161)
    return {
        "llama": plain,
        "sandwich": replace(plain, placement=Placement.SANDWICH, embedding_scale=8.0),
        "parallel": replace(
            plain, placement=Placement.PARALLEL, norm=Norm(1e-5, centred=True, bias=True), o_bias=True, qkv_bias=True,
            architecture="PhiForCausalLM", gated=False, activation="gelu_tanh", mlp_bias=True,
        ),
        "experts": replace(_expert_specs(64, 128, 4, 1, 32)["qwen2-moe"], vocab_size=161),
    }  # fmt: skip


def partial_sums(rank: int) -> tuple[Tensor, Tensor]:
    """A rank's partial sums, and the stream, `[T, H]` float16."""
    generator = torch.Generator().manual_seed(9)
    every = torch.randn(4, *SUMS, generator=generator).half()
    return every[rank], torch.randn(SUMS, generator=generator).half()


class File:
    """See `ranks.arena.Arena`. index: of the case, each of which has memory of its own."""

    def __init__(self, path: str, rank: int, ranks: int, index: int) -> None:
        self._all = [np.memmap(path, np.uint8, "r+", (index * ranks + r) * ARENA, (ARENA,)) for r in range(ranks)]
        MAPPED.extend(self._all)
        self.memory = torch.from_numpy(self._all[rank])
        self.addresses = torch.tensor([part.ctypes.data for part in self._all])


def collectives_of(memory: File, rank: int, ranks: int, shots: int) -> PeerCollectives:
    sizes = Sizes(models()["llama"].shard(rank, ranks), 64, 64, torch.float16)
    found = PeerCollectives(memory, rank, ranks, sizes)
    found.shots = lambda _: shots  # type: ignore[method-assign]
    return found


def sums(c: PeerCollectives) -> list[Tensor]:
    """x and the squares of its parts, twice over, by one graph that is launched three times; then what was gathered."""
    partial, stream = partial_sums(c.rank)
    places = [c.take(SUMS, torch.float16) for _ in range(2)]
    x, sumsq = c.take(SUMS, torch.float16), c.take((c.ranks, SUMS[0]), torch.float32)
    live = torch.tensor([SUMS[0] - 2], dtype=torch.int32)
    found = []
    for launch in range(3):
        x.copy_(stream)
        with c.inside(Graph.MODEL):
            for place in places:
                place.copy_(partial * (launch + 1))
                c.reduce(place, x, sumsq, live=live, add=True, num_sms=4)
        found += [x.clone(), sumsq.clone()]
    for _ in range(3):
        found.append(c.all_gather(partial.double()))
    with c.inside(Graph.SAMPLE):
        found.append(c.all_gather(torch.arange(6) + 100 * c.rank))
    return found


def logits(name: str, c: PeerCollectives | None, rank: int, ranks: int) -> list[Tensor]:
    """Of two iterations, each sampled: this rank's part of the logits, and the tokens."""
    spec = models()[name].shard(rank, ranks)
    machine = Machine(spec, LOAD, "cpu", bucket=TOKENS, collectives=c, whole=models()[name])
    here = gpu()
    assert here is not None
    found = []
    for _ in range(2):
        found.append(machine.logits(serial_period(spec, TOKENS, here.sms)))
        rows = len(found[-1])
        machine.executor.sample(rows)
        found.append(machine.executor.tokens[:rows].clone())
    return found


def main() -> None:
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    kernels.WAVES = 1  # each program costs time here
    found = {}
    with streams_in_order(pytest.MonkeyPatch()):
        for index, shots in enumerate((1, 2)):
            memory = File(sys.argv[3], rank, ranks, index)
            found[f"sums in {shots}"] = sums(collectives_of(memory, rank, ranks, shots))
        if ranks == 2:
            for index, name in enumerate(models(), 2):
                if name not in sys.argv[5:]:
                    continue
                c = collectives_of(File(sys.argv[3], rank, ranks, index), rank, ranks, 1 + index % 2)
                found[name] = logits(name, c, rank, ranks)
    torch.save(found, sys.argv[4])


if __name__ == "__main__":
    main()
