"""Why engines hang beside each other on one GPU: the same load in several ways, each bounded, with what a hang shows.

    python tests/gpu/jobs/hang_together.py OUT --seconds 200

A way is some processes that start together and then run until one makes no progress, or for so long: engines at a
full bound (`EngineBench`), or plain products of torch. Its outcome is a line of `OUT/ways.jsonl` as soon as it is
there. What the next way is follows from the outcomes. Of a hang there are in `OUT/WAY-PROCESS.*`: Python's stacks, what
was launched last and which events are done, the kernels that cuda-gdb finds on the device; and whether it goes on when
the others have ended.

The switches are of this script: what they change lies in files of which measured tiles and plans are made, and whose
digest an edit would change.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import json
import mmap
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

BEAT = struct.Struct("dddd")
"""iterations, when the last one ended, output tokens, requests that ran"""
SILENCE_SECONDS = 3.0
"""without an iteration: a hang. One takes 0.05 s, and four times as much beside three others"""
START_SECONDS = 90.0
MARKS = 64
DEBUGGED = {"base": 40.0, "base-8b": 40.0, "matmul": 25.0, "no-pdl": 25.0, "portable": 25.0}
"""ways whose hang cuda-gdb looks at, which is slow, and its seconds"""


class Way(NamedTuple):
    name: str
    asks: str
    engines: int = 2
    matmuls: int = 0
    """processes that multiply with torch alone"""
    pdl: bool = True
    graphs: bool = True
    shared: bool = True
    gemm: bool = True
    """warp-specialised products"""
    attention: bool = True
    """warp-specialised attention"""
    mps: bool = False
    turns: bool = False
    """an engine's iteration begins when no other's is under way: nothing of two is on the device at a time"""
    marked: bool = False
    """an event behind each launch: names the one that does not end. Takes graphs off, and dependent launch with them"""
    dump: bool = False
    """the driver may be asked for a core of the device"""
    bound: int = 0
    """requests of each engine; 0: as asked"""
    seconds: float = 0.0
    preset: str = ""

    @property
    def usual(self) -> bool:
        """The kernels that an engine compiles of its own."""
        return self.pdl and self.gemm and self.attention and not self.marked


class Memory:
    """Numbers of a child that its parent may read at any time."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(BEAT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), BEAT.size)

    def write(self, *values: float) -> None:
        self._map[:] = BEAT.pack(*values)

    def read(self) -> tuple[float, ...]:
        return BEAT.unpack(self._map[:])


# -- a child


def patched(way: Way, marks: deque[tuple[str, Any]]) -> None:
    """Before anything of the engine is imported."""
    if not way.pdl or way.marked:
        from weft.kernels import dependent_launch

        dependent_launch.pdl_options = lambda: {"PDL": False}
    if not way.gemm:
        from weft.kernels import gemm_launch
        from weft.kernels.gemm_config import GemmConfig

        launch_of, plain = gemm_launch.launch_of, GemmConfig(128, 256, 64, 3, 8)

        def portable(tokens: int, features: int, depth: int, config: GemmConfig | None, sms: int) -> Any:
            config = config or gemm_launch.choose(tokens, features, depth, sms)
            return launch_of(tokens, features, depth, plain if config.special else config, sms)

        gemm_launch.launch_of = portable
    import torch

    replay = torch.cuda.CUDAGraph.replay

    def told(graph: Any) -> None:
        """An event behind each graph, not within: which of the two does not end."""
        replay(graph)
        mark(marks, "graph")

    torch.cuda.CUDAGraph.replay = told  # type: ignore[method-assign]
    if not way.graphs or way.marked:
        from weft.engine.runner.cuda_runner import CudaRunner

        make = CudaRunner._make_executor

        def eager(runner: Any, num_sms: int) -> Any:
            made = make(runner, num_sms)
            runner._eager = "as this way asks"
            return made

        CudaRunner._make_executor = eager  # type: ignore[method-assign]
    if way.marked:
        from weft.engine.runner.cuda_layers import CudaLayers

        launch = CudaLayers.launch

        def marked(layers: Any, it: Any) -> None:
            launch(layers, it)
            mark(marks, f"{it.operation.name} of layer {it.layer}")

        CudaLayers.launch = marked  # type: ignore[method-assign]
    if not way.attention:
        from weft.kernels import attention_triton, decode_hopper, prefill_attention

        for module in (attention_triton, decode_hopper, prefill_attention):
            module.is_hopper = lambda: False


def mark(marks: deque[tuple[str, Any]], name: str) -> None:
    import torch

    if torch.cuda.is_current_stream_capturing():
        return
    event = torch.cuda.Event()
    event.record()
    marks.append((name, event))


def engine(way: Way, order: dict[str, Any]) -> None:
    marks: deque[tuple[str, Any]] = deque(maxlen=4096 if way.marked else MARKS)
    patched(way, marks)
    from weft.autosearch.advisor.engine_bench import EngineBench
    from weft.engine.config import EngineConfig
    from weft.engine.engine import Engine
    from weft.engine.wire.shelf import Shelf

    config = EngineConfig.model_validate(order["config"])
    if order["compiles"]:
        line = [sys.executable, "-P", __file__, "compile", json.dumps(order)]
        subprocess.run(line, stdout=2, check=False)  # what it lacks the first launch compiles
    ask("there")
    made = Engine(config, shelf=Shelf.of(order["shelf"]) if order["shelf"] else None)
    if way.turns:
        take_turns(made, order["lock"])
    bench = EngineBench(made, [tuple(order["lengths"])], 1.0, order["number"])
    memory, step = Memory(Path(order["beat"])), made.step

    def stepped() -> Any:
        outputs = step()
        if outputs is not None:
            stats = outputs.stats.scheduler
            memory.write(outputs.stats.iterations, time.monotonic(), stats.generation_tokens, stats.running)
        return outputs

    made.step = stepped  # type: ignore[method-assign]
    threading.Thread(target=watch, args=(memory, made, marks, Path(order["state"])), daemon=True).start()
    ask("ready")
    bench.ready(order["bound"])
    while True:
        bench.run(order["bound"])


def compile_ahead(order: dict[str, Any]) -> None:
    """An engine's own job compiles in processes that know nothing of what is patched here. A process of its own:
    Triton remembers what it compiled for. Touches no device."""
    patched(Way(**order["way"]), deque())
    from weft.engine.config import EngineConfig
    from weft.engine.runner.compile_job import use_cache
    from weft.engine.runner.kernel_set import kernel_set
    from weft.kernels import early
    from weft.kernels.compilation import compile_all
    from weft.kernels.gpu import KNOWN

    config = EngineConfig.model_validate(order["config"])
    use_cache(config)
    begun, hashing = time.monotonic(), early.hash_triton()
    kernels = kernel_set(config, KNOWN["h200"])
    hashing.join()  # no thread may run beside a fork
    compiled, failed = compile_all(kernels, max(1, len(os.sched_getaffinity(0)) // 2))
    names = sorted({kernel.name for kernel in failed})
    print(f"{len(compiled)} kernels in {time.monotonic() - begun:.0f} s, failed: {names}", flush=True)


def take_turns(made: Any, path: str) -> None:
    """The system gives a lock back of whoever ends, and wakes who waits for it."""
    lock, launch = open(path, "w"), made.runner.launch  # noqa: SIM115
    made._depth = 0  # the next iteration is launched when this one has ended, and another's may come between

    def launched(batch: Any) -> Any:
        fcntl.flock(lock, fcntl.LOCK_EX)
        flying = launch(batch)
        wait = flying.wait

        def waited() -> Any:
            try:
                return wait()
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)

        flying.wait = waited
        return flying

    made.runner.launch = launched


def watch(memory: Memory, made: Any, marks: deque[tuple[str, Any]], path: Path) -> None:
    """Says what this process had launched, once it makes no progress."""
    while time.monotonic() - (memory.read()[1] or time.monotonic()) < SILENCE_SECONDS - 1:
        time.sleep(0.2)
    told: dict[str, Any] = {"in_flight": [], "graphs": []}
    for flying in list(made._in_flight):
        batch = flying.batch
        row = {"step": batch.step, "tokens": batch.num_tokens, "decodes": batch.num_decodes}
        if hasattr(flying, "begin"):
            row |= {"begun": flying.begin.query(), "ended": flying.end.query()}
        told["in_flight"].append(row)
    done = [(name, event.query()) for name, event in list(marks)]
    told["first_open"] = next((name for name, ended in done if not ended), None)
    told["last_ended"] = next((name for name, ended in reversed(done) if ended), None)
    told["open"] = [name for name, ended in done if not ended][:MARKS]
    path.write_text(json.dumps(told, indent=1) + "\n")


def matmul(order: dict[str, Any]) -> None:
    import torch

    ask("there")
    device = torch.device(order["config"]["device"])
    size = 4096 if device.type == "cuda" else 64
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    memory, done = Memory(Path(order["beat"])), 0
    ask("ready")
    while True:
        for _ in range(20):
            c = a @ b
        c[0, 0].item()
        done += 20
        memory.write(done, time.monotonic(), 0, 0)


def ask(word: str) -> None:
    """Tells the parent, and waits until it says so."""
    os.write(TOLD, f"{word}\n".encode())
    if not sys.stdin.readline():
        os._exit(0)


TOLD = 1


def child() -> None:
    global TOLD
    order = json.loads(sys.stdin.readline())
    TOLD = os.dup(1)
    os.dup2(2, 1)  # whatever else prints is no answer
    faulthandler.register(signal.SIGUSR1, open(order["stacks"], "w"), all_threads=True)  # noqa: SIM115
    if order["what"] == "engine":
        engine(Way(**order["way"]), order)
    else:
        matmul(order)


# -- the parent


class Child:
    """A process of a way; `number` counts from 0."""

    def __init__(self, out: Path, way: Way, number: int, options: argparse.Namespace, shelf: Any) -> None:
        self.what = "engine" if number < way.engines else "matmul"
        self.name = f"{way.name}-{number}"
        at = out / self.name
        self.stacks, self.state, self.log = (at.with_suffix(f".{kind}") for kind in ("stacks", "state", "log"))
        self.dump, self.pipe = at.with_suffix(".core"), at.with_suffix(".pipe")
        beat = at.with_suffix(".beat")
        beat.unlink(missing_ok=True)
        self.memory = Memory(beat)
        self.bound = way.bound or options.bound
        fds = shelf.fds if shelf is not None else ()
        config = {
            "model_preset": way.preset or options.preset, "load_format": "dummy", "device": options.device,
            "max_num_seqs": self.bound, "num_pages": 9 * self.bound + 64, "tuning_seconds": 0, "plan": "serial",
            "wait_for_plan": True, "prefix_caching": False,
        }  # fmt: skip
        if options.device == "cpu":
            config |= {"model_preset": None, "load_format": "auto", "cpu_threads": 1}
        environment = dict(os.environ)
        if way.mps:
            environment |= mps_places(out)
        if way.dump:
            environment |= {
                "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1", "CUDA_COREDUMP_PIPE": str(self.pipe),
                "CUDA_COREDUMP_FILE": str(self.dump),
                "CUDA_COREDUMP_GENERATION_FLAGS": "skip_global_memory,skip_local_memory,skip_constbank_memory",
            }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, "child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log.open("wb"), env=environment, pass_fds=fds, text=True,
        )  # fmt: skip
        self._tell(
            json.dumps(
                {
                    "what": self.what, "way": way._asdict(), "config": config, "shelf": list(fds), "number": number,
                    "bound": self.bound, "lengths": options.lengths, "beat": str(beat), "stacks": str(self.stacks),
                    "state": str(self.state), "lock": str(out / f"{way.name}.lock"),
                    "compiles": number == 0 and options.device != "cpu" and not way.usual,
                }
            )
        )  # fmt: skip

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"{self.name} ended: {self.last_words()}") from None

    def expect(self, word: str) -> None:
        """Raises `Failed`."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], START_SECONDS)[0]:
            raise Failed(f"{self.name} was not {word} after {START_SECONDS:.0f} s")
        if self.process.stdout.readline().strip() != word:
            raise Failed(f"{self.name} ended: {self.last_words()}")

    def go_on(self) -> None:
        self._tell("go on")

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    def silent(self) -> float:
        """Seconds since its last iteration."""
        return time.monotonic() - self.memory.read()[1]

    def end(self) -> None:
        self.process.kill()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            print(f"{self.name} does not end, 20 s after SIGKILL", flush=True)


class Failed(Exception):
    """A way that tells nothing of what was asked."""


class Hang:
    """What a hang shows."""

    def __init__(self, hung: Child, others: list[Child], way: Way, seconds: float) -> None:
        self.told: dict[str, Any] = {"who": hung.name, "after_s": round(seconds, 1)}
        self.told["others_go_on"] = [other.silent() < 1.0 for other in others]
        self._device("beside")
        os.kill(hung.process.pid, signal.SIGUSR1)
        time.sleep(1.5)  # its own watcher writes at about the same time
        if hung.state.exists():
            self.told["launched"] = json.loads(hung.state.read_text())
        for other in others:
            other.end()
        time.sleep(2.0)
        self.told["goes_on_alone"] = hung.silent() < 1.5
        self._device("alone")
        if not self.told["goes_on_alone"]:
            if way.dump:
                self._dump(hung)
            if way.name in DEBUGGED:
                self._debug(hung, way)

    def _device(self, when: str) -> None:
        asked = "utilization.gpu,power.draw,clocks.sm"
        self.told[f"device_{when}"] = said(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], 10)

    def _debug(self, hung: Child, way: Way) -> None:
        """The kernels on the device, where their warps stand, and the instructions there."""
        debugger = shutil.which("cuda-gdb") or "/usr/local/cuda/bin/cuda-gdb"
        if not Path(debugger).exists():
            self.told["kernels"] = "there is no cuda-gdb"
            return
        orders = ["set pagination off", "info cuda devices", "info cuda kernels", "info cuda blocks", "info cuda warps",
                  "x/12i $pc-96", "x/8i $pc", "info registers", "detach"]  # fmt: skip
        line = [debugger, "-nx", "-batch", "-p", str(hung.process.pid), *(f"-ex={order}" for order in orders)]
        found = hung.state.with_suffix(".gdb")
        with found.open("w") as file:  # what was said before the time was up stays
            try:
                subprocess.run(line, stdout=file, stderr=file, stdin=subprocess.DEVNULL, timeout=DEBUGGED[way.name])
            except subprocess.TimeoutExpired:
                file.write("\nthe time was up\n")
        lines = found.read_text(errors="replace").splitlines()
        self.told["kernels"] = [line[:300] for line in lines if "Invocation" in line or "kernel" in line][:12]

    def _dump(self, hung: Child) -> None:
        try:
            pipe = os.open(hung.pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"1")
            os.close(pipe)
        except OSError as error:
            self.told["core"] = str(error)
            return
        until = time.monotonic() + 15
        while time.monotonic() < until and not (hung.dump.exists() and hung.process.poll() is not None):
            time.sleep(0.5)
        self.told["core"] = hung.dump.stat().st_size if hung.dump.exists() else "none came"


def said(line: list[str], seconds: float) -> str:
    try:
        ended = subprocess.run(line, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
        return (ended.stdout + ended.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{line[0]}: {type(error).__name__} {error}"


def mps_places(out: Path) -> dict[str, str]:
    # A socket's path is short.
    return {"CUDA_MPS_PIPE_DIRECTORY": f"/tmp/weft-mps-{os.getpid()}", "CUDA_MPS_LOG_DIRECTORY": str(out / "mps")}


class Mps:
    """The driver's service that has processes share a GPU's SMs at the same time, while this is open."""

    def __init__(self, out: Path) -> None:
        self._environment = {**os.environ, **mps_places(out)}
        for place in mps_places(out).values():
            Path(place).mkdir(parents=True, exist_ok=True)
        begun = subprocess.run(
            ["nvidia-cuda-mps-control", "-d"], env=self._environment, capture_output=True, text=True, timeout=20
        )
        if begun.returncode:
            raise Failed(f"nvidia-cuda-mps-control: {(begun.stdout + begun.stderr).strip()}")

    def close(self) -> None:
        try:
            subprocess.run(
                ["nvidia-cuda-mps-control"], input="quit\n", env=self._environment, text=True, timeout=20,
                capture_output=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print("the MPS service did not end", flush=True)


class Running:
    """A way's processes, started ahead: they import while another way runs, and touch no device."""

    def __init__(self, out: Path, way: Way, options: argparse.Namespace) -> None:
        from weft.engine.wire.shelf import Shelf

        self.way, self._out, self._options = way, out, options
        self._shelf = Shelf() if way.shared and way.engines > 1 else None
        self.children = [Child(out, way, n, options, self._shelf) for n in range(way.engines + way.matmuls)]

    def outcome(self) -> dict[str, Any]:
        way, row = self.way, {"way": self.way.name, "asks": self.way.asks}
        mps = None
        try:
            if way.mps:
                mps = Mps(self._out)
            begun = time.monotonic()
            for child in self.children:
                child.expect("there")
                child.go_on()
            for child in self.children:
                child.expect("ready")
            row["start_s"] = round(time.monotonic() - begun, 1)
            row |= self._run()
        except Failed as error:
            row["failed"] = str(error)
        finally:
            self.drop()
            if mps is not None:
                mps.close()
        return row

    def drop(self) -> None:
        for child in self.children:
            child.end()
        if self._shelf is not None:
            self._shelf.clear()
            self._shelf.close()
            self._shelf = None

    def _run(self) -> dict[str, Any]:
        begun = time.monotonic()
        for child in self.children:
            child.memory.write(0, begun, 0, 0)
            child.go_on()
        seconds = self.way.seconds or self._options.way_seconds
        middle: list[tuple[float, ...]] = []
        while (elapsed := time.monotonic() - begun) < seconds:
            time.sleep(0.1)
            if not middle and elapsed > seconds / 2:
                middle = [child.memory.read() for child in self.children]
            for child in self.children:
                if child.process.poll() is not None:
                    raise Failed(f"{child.name} ended: {child.last_words()}")
                if child.silent() > SILENCE_SECONDS:
                    others = [other for other in self.children if other is not child]
                    return {"hung": Hang(child, others, self.way, elapsed - SILENCE_SECONDS).told}
        return {"hung": None, "seconds": seconds, "processes": [_rate(c, m) for c, m in zip(self.children, middle)]}  # noqa: B905


def _rate(child: Child, before: tuple[float, ...]) -> dict[str, Any]:
    """Of the second half."""
    now = child.memory.read()
    seconds = max(1e-9, now[1] - before[1])
    return {
        "name": child.name, "iterations": int(now[0]), "ran": int(now[3]),
        "iterations_per_s": round((now[0] - before[0]) / seconds, 1),
        "tokens_per_s": round((now[2] - before[2]) / seconds),
    }  # fmt: skip


BASE = Way("base", "two engines, one set of weights, graphs, dependent launch: does it hang as it did")
NO_PDL = Way("no-pdl", "no dependent launch", pdl=False)
FIRST = [
    BASE,
    NO_PDL,
    Way("turns", "iterations of one engine at a time", turns=True),
    Way("matmul", "one engine beside another program: then any neighbour hangs it", engines=1, matmuls=1),
    Way("portable", "no warp-specialised kernel, with dependent launch", gemm=False, attention=False),
    Way("eager", "no captured graphs, with dependent launch", graphs=False),
    Way("own-weights", "each its own weights", shared=False),
    Way("mps", "CUDA MPS: no change of context", mps=True),
]


HARDER = [
    Way("base-8b", "the hang as it was seen in serving: the 8B", preset="llama-3-8b"),
    Way("base-long", "three engines, for three times as long", engines=3, seconds=27.0),
]
"""where base goes on"""


def then(hung: Callable[[str], bool | None], seconds: float) -> list[Way]:
    """What else is asked, once these outcomes are known; the most valuable first. seconds: of a way."""
    ways, long = [], 3 * seconds
    if hung("no-pdl") is False:
        ways.append(Way("no-pdl-long", "the cure, for three times as long, three engines", 3, pdl=False, seconds=long))
    else:
        ways.append(Way("neither", "neither dependent launch nor warp specialisation", pdl=False, gemm=False,
                        attention=False))  # fmt: skip
        ways.append(Way("marked", "which launch does not end, one by one", marked=True))
    if hung("portable") is False:
        ways.append(Way("plain-gemm", "warp-specialised attention alone", gemm=False))
        ways.append(Way("plain-attention", "warp-specialised products alone", attention=False))
    if hung("turns") is False:
        ways.append(Way("turns-long", "turns for three times as long, three engines", 3, turns=True, seconds=long))
    if hung("mps") is False:
        ways.append(Way("mps-long", "MPS for three times as long, three engines", 3, mps=True, seconds=long))
    ways.append(Way("few", "91 requests each, which did not hang: no iteration of 257 tokens", bound=91))
    ways.append(Way("core", "as base, with a core of the device", dump=True))
    return ways


def followed(way: Way, outcomes: dict[str, bool | None], todo: list[Way], seconds: float) -> list[Way]:
    """What is still to be done, behind this way; `outcomes` has its own."""
    known = {each.name: each for each in HARDER}
    if way.name == "base" and outcomes["base"] is False:
        return list(HARDER)  # of what does not hang no cure can be seen
    if way.name in known and outcomes[way.name]:
        return [each._replace(preset=way.preset, engines=way.engines) for each in FIRST[1:] if each.matmuls == 0]
    if not todo and way.name not in known and not any(each.name in outcomes for each in (*LAST, *HARDER)):
        return then(outcomes.get, seconds)
    return todo


LAST = then({}.get, 1.0)[-1:]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever was begun is ended
    if sys.argv[1:] == ["child"]:
        child()
        return
    if sys.argv[1:2] == ["compile"]:
        compile_ahead(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0, help="for all ways")
    parser.add_argument("--way-seconds", type=float, default=9.0, help="that a way runs without a hang")
    parser.add_argument("--bound", type=int, default=256, help="requests of each engine")
    parser.add_argument("--preset", default="opt-1.3b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs=2, default=[161, 338])
    parser.add_argument("--only", nargs="*", help="these ways alone")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    outcomes: dict[str, bool | None] = {}

    here = shutil.which("nvidia-cuda-mps-control") is not None
    if not here:
        print("no nvidia-cuda-mps-control here: nothing of MPS is asked", flush=True)
    todo = list(FIRST)
    if options.only:
        named = [
            *FIRST,
            *HARDER,
            *then(dict.fromkeys(("no-pdl", "turns", "portable", "mps"), False).get, options.way_seconds),
        ]
        named += then({}.get, options.way_seconds)
        todo = list({way.name: way for way in named if way.name in options.only}.values())

    def started() -> Running | None:
        while todo:
            if (way := todo.pop(0)).mps <= here:
                return Running(options.out, way, options)
        return None

    running = started()
    while running is not None:
        # The next one imports and compiles meanwhile.
        ahead = started() if running.way not in HARDER else None
        done(running, options.out, outcomes)
        if not options.only:
            if ahead is not None and running.way is BASE and outcomes["base"] is False:
                ahead.drop()
                ahead = None
            if ahead is None:
                todo[:] = followed(running.way, outcomes, todo, options.way_seconds)
        running = ahead or started()
        if time.monotonic() > end and running is not None:
            print(f"the time is up before {running.way.name}", flush=True)
            running.drop()
            break


def done(running: Running, out: Path, outcomes: dict[str, bool | None]) -> dict[str, Any]:
    begun = time.monotonic()
    row = running.outcome()
    outcomes[running.way.name] = None if "failed" in row else row["hung"] is not None
    row["took_s"] = round(time.monotonic() - begun, 1)
    line = json.dumps(row)
    print(line, flush=True)
    with (out / "ways.jsonl").open("a") as file:
        file.write(f"{line}\n")
    return row


if __name__ == "__main__":
    main()
