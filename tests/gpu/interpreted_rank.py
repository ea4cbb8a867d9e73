"""A rank of a simulated GPU, as a process: `python interpreted_rank.py RANK RANKS FILE OUT MODEL…`.

FILE is the memory that all ranks share while they run. The rank's results are saved as OUT. The MODEL `PIPELINES` has
a plan.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import streams_in_order
from quick_interpreter import make_quick
from test_executor import SMALL, Machine, _expert_specs, _serial, _spec
from torch import Tensor

from weft.autosearch.bench_protocol import Load
from weft.engine.model.operations import Role
from weft.engine.model.parts import Norm, Placement
from weft.engine.model.spec import ModelSpec, Shard
from weft.engine.plans.plan import NanoOperation, Period, serial_period
from weft.engine.runner.cuda.peer_collectives import PeerCollectives, PeerLayout
from weft.engine.runner.device.collectives import Graph, Steps
from weft.kernels.collectives import peer as kernels
from weft.kernels.collectives.peer import shard_width
from weft.kernels.common.gpu import gpu
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.projections import linear_project

MAPPED: list[np.memmap] = []
"""arrays whose addresses the kernels get"""
ARENA = 8 << 20
"""bytes of a rank in one case"""
TOKENS = 8
LOAD = Load(7, 4, 20, 3)
PIPELINES = "planned"
PLANNED = Load(132, 4, 20, 64)
CUTS = ((0, 128), (128, 256))
WIDE = 128
"""hidden size of the model that has a plan: each of two ranks owns a tile's columns"""
SUMS = (5, 200)
"""tokens and hidden size: splits of a row that differ"""
TILES = GemmConfig(16, 64, 64, 2, 4, swap=True, slices=1)
MOST_RANKS = 8


def product_sizes(ranks: int) -> tuple[int, int, int]:
    """Tokens, hidden size and depth: two tiles of tokens. Eight ranks own a tile's columns each."""
    return 19, 64 * MOST_RANKS if ranks == MOST_RANKS else 128, 64


def models() -> dict[str, ModelSpec]:
    """One model of each kind of layer that distinguishes ranks."""
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
    every = torch.randn(MOST_RANKS, *SUMS, generator=generator).half()
    return every[rank], torch.randn(SUMS, generator=generator).half()


class File:
    """See `ranks.peer_memory.PeerMemory`. index: of the case; each has its own memory."""

    def __init__(self, path: str, rank: int, ranks: int, index: int) -> None:
        self._all = [np.memmap(path, np.uint8, "r+", (index * ranks + r) * ARENA, (ARENA,)) for r in range(ranks)]
        MAPPED.extend(self._all)
        self.memory = torch.from_numpy(self._all[rank])
        self.bases = tuple(part.ctypes.data for part in self._all)
        self.addresses = torch.tensor(self.bases)


def collectives_of(
    memory: File, rank: int, ranks: int, steps: Steps, max_tokens: int = 64, **fields: int
) -> PeerCollectives:
    """fields: of the model, if they differ."""
    spec = replace(models()["llama"], shard_of=Shard(rank, ranks), **fields)
    found = PeerCollectives(memory, rank, ranks, PeerLayout(spec, max_tokens, 64, torch.float16))
    found.use({0: steps})
    return found


def sums(c: PeerCollectives) -> list[Tensor]:
    """x and its partial sums of squares, twice, by one graph that is launched three times; then what was gathered."""
    partial, stream = partial_sums(c.rank)
    places = [c.allocate(SUMS, torch.float16) for _ in range(2)]
    x, sumsq = c.allocate(SUMS, torch.float16), c.allocate((c.ranks, SUMS[0]), torch.float32)
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


def product(rank: int, launch: int, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operands of a rank, `[T, K]` and `[H, K]`, its bias `[H]`, and the stream."""
    generator = torch.Generator().manual_seed(launch)
    tokens, hidden, depth = product_sizes(ranks)
    every = [
        (torch.randn(tokens, depth, generator=generator), torch.randn(hidden, depth, generator=generator) / 8)
        for _ in range(MOST_RANKS)
    ]
    bias, x = torch.randn(hidden, generator=generator), torch.randn(tokens, hidden, generator=generator)
    return every[rank][0].half(), every[rank][1].half(), bias.half(), x.half()


def pushed(c: PeerCollectives, *, want: bool) -> list[Tensor]:
    """Sums after GEMMs that write to the ranks, in a graph that is launched twice: x and its squares. want: whether
    they do."""
    tokens, hidden, _ = product_sizes(c.ranks)
    places = [c.allocate((tokens, hidden), torch.float16) for _ in range(2)]
    x, sumsq = c.allocate((tokens, hidden), torch.float16), c.allocate((c.ranks, tokens), torch.float32)
    live = torch.tensor([tokens - 1], dtype=torch.int32)
    found = []
    for launch in range(2):
        with c.inside(Graph.MODEL):
            for i in range(2):
                a, weight, bias, stream = product(c.rank, 2 * launch + i, c.ranks)
                if i == 0:  # two sums of one stream
                    x.copy_(stream)
                own = bias if c.rank == 0 else None
                common = {"num_sms": 4, "num_tokens": live, "config": TILES}
                if sent := c.push(a, weight, own, turn=i, space=None, **common):
                    places[i].fill_(torch.nan)
                else:
                    linear_project(a, None, weight, 0.0, bias=own, out=places[i], **common)
                assert sent == want
                c.reduce(places[i], x, sumsq, live=live, add=launch == 0, num_sms=4)
                found += [x.clone(), sumsq.clone()]
    return found


def logits(name: str, c: PeerCollectives | None, rank: int, ranks: int) -> list[Tensor]:
    """Two iterations, each sampled: this rank's shard of the logits, and the tokens."""
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


def side_by_side(spec: ModelSpec, sms: int) -> Period:
    """Sums of one nano-batch overlap with the GEMMs of the other; those of `down` belong to a whole GEMM."""
    operations: list[NanoOperation] = []
    for op in spec.layer_operations():
        ahead = op.name in ("qkv", "decode", "prefill")
        lane: Any = "network" if op.role is Role.NETWORK else "compute"
        config = SMALL if op.role is Role.PROJECTION else None
        ranges = [(CUTS[0][0], CUTS[-1][1])] if op.name == "down" else CUTS
        operations += [NanoOperation(op.name, *own, sms, lane, ahead, config) for own in ranges]
    return Period(CUTS[-1][1], tuple(operations[6:] + operations[:6]))


def planned(c: PeerCollectives) -> list[Tensor]:
    """This rank's shard of the logits of the serial plan, and of a pipeline: first no GEMM sends, then some do, to all
    ranks and to the owner of the columns."""
    whole = replace(_spec(WIDE, 128, 4, 2, 32), vocab_size=161)
    spec = whole.shard(c.rank, c.ranks)
    machine = Machine(spec, PLANNED, "cpu", bucket=CUTS[-1][1], collectives=c, whole=whole)
    serial = _serial(spec, CUTS[-1][1], machine.sms, SMALL)
    pipeline, sent, push = side_by_side(spec, machine.sms), [], c.push
    found = [machine.logits(period) for period in (serial, pipeline)]

    def counted(*operands: Any, **options: Any) -> bool:
        sent.append(push(*operands, **options))
        return sent[-1]

    c.push = counted  # type: ignore[method-assign]
    for steps in (Steps(2, 1), Steps(1, 2)):
        c.use({0: steps}, push_nano_batches=True)
        sent.clear()
        found.append(machine.logits(pipeline))
        # o's two halves of each layer; the sums of down, which is one GEMM, are of halves
        assert sent == [True] * 2 * spec.num_layers, sent
    return found


def main() -> None:
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    make_quick()
    kernels.WAVES = 1  # each program costs time here
    found = {}
    with streams_in_order(pytest.MonkeyPatch()):
        for index, steps in enumerate((Steps(1), Steps(2))):
            memory = File(sys.argv[3], rank, ranks, index)
            found[f"sums in {steps.sums}"] = sums(collectives_of(memory, rank, ranks, steps))
        for index, steps in enumerate((Steps(1), Steps(1, 1), Steps(1, 2)), 2):
            hidden = product_sizes(ranks)[1]
            c = collectives_of(File(sys.argv[3], rank, ranks, index), rank, ranks, steps, 32, hidden_size=hidden)
            whole = shard_width(hidden, ranks) % TILES.features == 0  # a tile has one owner
            found[f"products {steps.pushed}"] = pushed(c, want=steps.pushed == 1 or (steps.pushed == 2 and whole))
        if ranks == 2:
            for index, name in enumerate(models(), 5):
                if name not in sys.argv[5:]:
                    continue
                steps = Steps(1 + index % 2, 1 if name in ("llama", "sandwich") else 0)
                c = collectives_of(File(sys.argv[3], rank, ranks, index), rank, ranks, steps)
                found[name] = logits(name, c, rank, ranks)
            if PIPELINES in sys.argv[5:]:
                memory = File(sys.argv[3], rank, ranks, 9)
                c = collectives_of(memory, rank, ranks, Steps(2), CUTS[-1][1], hidden_size=WIDE)
                found[PIPELINES] = planned(c)
    torch.save(found, sys.argv[4])


if __name__ == "__main__":
    main()
