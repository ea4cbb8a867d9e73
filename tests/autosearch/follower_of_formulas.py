"""A follower whose bench computes times from formulas. It records its requests in a file and fails where rank 0
fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
from synthetic import SyntheticBench

from weft.autosearch.bench_follower import BenchConfig, MeasureRequest, follow, lines_of_stdin
from weft.autosearch.bench_protocol import Load, Timing
from weft.engine.errors import ConfigError
from weft.engine.model.directory import read_spec
from weft.engine.plans.plan import NanoOperation
from weft.engine.ranks.links import Descriptors


class Formulas(SyntheticBench):
    def alone(self, op: NanoOperation, load: Load) -> Timing:
        if op.sms > self.num_sms:
            raise ConfigError("more SMs than there are")
        return super().alone(op, load)


if __name__ == "__main__":
    rank = int(sys.argv[1])
    opening = msgspec.json.decode(sys.stdin.buffer.readline(), type=BenchConfig)
    ranks = Descriptors.load(opening.descriptors).ranks
    bench = Formulas(read_spec(Path(opening.model)).shard(rank, ranks))
    reported = Path(os.environ["TOLD"])
    for line in lines_of_stdin():
        follow(bench, [line])
        with reported.open("a") as file:
            file.write(f"{msgspec.json.decode(line, type=MeasureRequest).what} {bench.calls} {bench.seconds}\n")
