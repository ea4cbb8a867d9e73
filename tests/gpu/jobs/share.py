"""Do kernels of several processes on one GPU disturb each other: one kind of kernel at a time, the same bits asked for.

    python tests/gpu/jobs/share.py OUT [--processes 4] [--run-seconds 4] [--only NAME ...]

Each process of a way computes a result while no other runs, then all compute it again and again at once. A line of
`OUT/share.jsonl` a way: launches, how often the last of 24 had other bits, what ended processes, how many stood still.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

LAUNCHES = 24
"""whose results are compared before the next ones are asked for"""
AHEAD = 12
"""so many times that much is asked for before anybody waits: a GPU goes to the next process in the midst of it"""
SILENT_SECONDS = 4.0
BEGIN_SECONDS = 60.0
WAYS = {
    "cublas": "torch's own products: TMA and warp-specialised, on any Hopper",
    "cublas-few": "the same for 256 tokens",
    "tma": "a product of plain Triton whose operands come by TMA: no roles of warps",
    "tma-early": "the same, with dependent launch",
    "portable-early": "our portable product: dependent launch alone",
    "gemm-late": "our warp-specialised product, no dependent launch",
    "gemm-early": "the same, with dependent launch",
    "residual-early": "the same with an epilogue that waits for x",
    "counted-early": "as gemm-early, its live tokens read on the device, once kept where a barrier had been",
    "decode-late": "decode attention, no dependent launch",
    "decode-early": "the same, with dependent launch",
    "prefill-late": "prefill attention, no dependent launch",
    "prefill-early": "the same, with dependent launch",
    "pod-late": "both in one launch, no dependent launch",
    "pod-early": "the same, with dependent launch",
}


def made(name: str) -> tuple[Callable[[], Any], list[Any]]:
    """A launch, and the tensors that it writes."""
    import torch

    kind = name.split("-")[0]
    torch.manual_seed(0)
    if kind == "cublas":
        tokens = 256 if name.endswith("few") else 2048
        a = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) * 0.02
        out = torch.empty(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        return (lambda: torch.mm(a, w.t(), out=out)), [out]
    if kind == "tma":
        sys.path.insert(0, str(Path(__file__).parent))
        from tma_product import tma_product  # type: ignore[import-not-found]
        from triton.tools.tensor_descriptor import TensorDescriptor

        from weft.kernels.dependent_launch import pdl_options

        a = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) * 0.02
        out = torch.empty(2048, 4096, device="cuda", dtype=torch.bfloat16)
        described = [TensorDescriptor.from_tensor(t, [128, 64]) for t in (a, w)]
        described.append(TensorDescriptor.from_tensor(out, [128, 128]))
        grid = (2048 // 128 * 4096 // 128,)
        fixed = {"num_warps": 8, "num_stages": 3}
        return (lambda: tma_product[grid](*described, 4096, 4096 // 128, **fixed, **pdl_options())), [out]
    if kind in ("gemm", "portable", "residual", "counted"):
        from weft.kernels import gemm_launch, projections
        from weft.kernels.gemm_config import SPECIAL, GemmConfig

        a = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) * 0.02
        x = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(2048, 4096, device="cuda", dtype=torch.bfloat16)
        config = GemmConfig(128, 256, 64, 3, 8) if kind == "portable" else SPECIAL
        options: dict[str, Any] = {"num_sms": 132, "space": gemm_launch.workspace("cuda"), "config": config}
        if kind == "counted":
            options["num_tokens"] = torch.tensor([2048], dtype=torch.int32, device="cuda")
        if kind == "residual":
            sums = projections.sumsq_buffer(4096, 2048, "cuda")
            return (lambda: projections.residual_project(a, w, x, out=out, sumsq=sums, **options)), [out]
        return (lambda: projections.linear_project(a, None, w, 1e-5, out=out, **options)), [out]
    from weft.kernels.hybrid_batches import Hybrid
    from weft.kernels.hybrid_calls import HybridCalls

    calls = HybridCalls("llama-3-8b", pages=1500, largest=(64, 512, 6000))
    calls.load(Hybrid("llama-3-8b", chunk=512, context=4096, decodes=48, length=4000))
    calls.out.zero_()
    return (lambda: calls.ways[kind](0)), [calls.out]


def child(name: str) -> None:
    """Asks for its turns by a line each, and gets them by a line."""
    import torch

    from weft.kernels.dependent_launch import dependent_launch

    torch.zeros(1, device="cuda")
    ask("there")
    early = dependent_launch(not name.endswith("late")) if not name.startswith("cublas") else nullcontext()
    with early:
        launch, written = made(name)
        want: list[Any] = []
        for _ in range(3):  # alone: the same each time
            for _ in range(8):
                launch()
            torch.cuda.synchronize()
            if want and bool(other(written, want)):
                tell(wrong_alone=True)
            want = [t.clone() for t in written]
        ask("ready")
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        launches, begun = 0, time.monotonic()
        while time.monotonic() - begun < float(os.environ["RUN_SECONDS"]):
            for _ in range(AHEAD):
                for _ in range(LAUNCHES):
                    launch()
                wrong += other(written, want)
            torch.cuda.synchronize()
            launches += AHEAD * LAUNCHES
            tell(launches=launches, wrong=int(wrong))
    tell(ended=True)


def other(got: list[Any], want: list[Any]) -> Any:
    """Whether any bit differs, on the device; NaN is as good as any."""
    import torch

    pairs = [(g.view(torch.int16), w.view(torch.int16)) for g, w in zip(got, want, strict=True)]
    return torch.stack([(g != w).any() for g, w in pairs]).any()


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def ask(word: str) -> None:
    tell(asks=word)
    if not sys.stdin.readline():
        raise SystemExit(0)


class Child:
    def __init__(self, name: str, out: Path, number: int, seconds: float) -> None:
        self.said: dict[str, Any] = {}
        self._log = out / f"{name}-{number}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "child", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env={**os.environ, "RUN_SECONDS": str(seconds)}, bufsize=0,
            )  # fmt: skip
        self.last, self._rest = time.monotonic(), b""

    def read(self, seconds: float) -> bool:
        """What it says within a time. False once it has ended."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return True
        got = os.read(self.process.stdout.fileno(), 65536)
        if not got:
            return False
        self.last = time.monotonic()
        *lines, self._rest = (self._rest + got).split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                self.said |= json.loads(line)
        return True

    def until(self, word: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.said.get("asks") != word and time.monotonic() < end:
            if not self.read(0.5):
                return False
        return self.said.get("asks") == word

    def go(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"\n")
        except BrokenPipeError:
            return

    def error(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if "rror" in line]
        return lines[-1][:200] if lines else ""


def run(name: str, children: list[Child], seconds: float) -> dict[str, Any]:
    row: dict[str, Any] = {"way": name, "asks": WAYS[name], "processes": len(children)}
    for c in children:
        if not c.until("there", BEGIN_SECONDS):
            return row | {"failed": f"did not begin: {c.error()}"}
    for c in children:
        c.go()
        if not c.until("ready", BEGIN_SECONDS):
            return row | {"failed": f"alone: {c.error()}"}
    for c in children:
        c.go()
    end = time.monotonic() + seconds + SILENT_SECONDS + 2
    open_ones, hung = list(children), 0
    while open_ones and time.monotonic() < end:
        for c in list(open_ones):
            if not c.read(0.02):
                open_ones.remove(c)
            elif time.monotonic() - c.last > SILENT_SECONDS:
                hung += 1
                open_ones.remove(c)
    row["hung"] = hung + len(open_ones)
    row["launches"] = [c.said.get("launches", 0) for c in children]
    row["wrong"] = [c.said.get("wrong", 0) for c in children]
    row["wrong_alone"] = sum(bool(c.said.get("wrong_alone")) for c in children)
    row["errors"] = [c.error() for c in children if not c.said.get("ended")]
    return row


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--run-seconds", type=float, default=4.0)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = list(options.only or WAYS)
    ahead: list[Child] = []
    for at, name in enumerate(names):
        begun = time.monotonic()
        children = ahead or [Child(name, options.out, i, options.run_seconds) for i in range(options.processes)]
        follows = names[at + 1] if at + 1 < len(names) else ""
        ahead = (
            [Child(follows, options.out, i, options.run_seconds) for i in range(options.processes)] if follows else []
        )
        row = run(name, children, options.run_seconds)
        for c in children:
            c.process.kill()
            c.process.wait()
        row["seconds"] = round(time.monotonic() - begun, 1)
        print(json.dumps(row), flush=True)
        with (options.out / "share.jsonl").open("a") as lines:
            lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
