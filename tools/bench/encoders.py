"""`python -m weft.tools.bench.encoders MODEL --python PATH`: compares an embedder here and in sentence-transformers.

PATH is the interpreter of an environment with sentence-transformers. Both embed the same sentences of mixed length, in
alternating rounds, so that other load on the machine hits both. The table has wall time, processor time and the largest
difference between vectors. Figures of a busy machine are only good for comparing processor time.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from weft.engine.config.tokenizer import load_tokenizer
from weft.server.commands.own_server import own_server

Vectors = npt.NDArray[np.float32]
INPUTS = 256  # texts of a request
CLIENTS = 4  # requests at a time
TICKS = os.sysconf("SC_CLK_TCK")
OTHER = """
import json, sys, time, torch
import numpy as np
from sentence_transformers import SentenceTransformer
path, sentences, vectors, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = SentenceTransformer(path, device="cpu")
texts = json.load(open(sentences))
model.encode(texts[:64])
print("ready", flush=True)
for _ in sys.stdin:
    begin, cpu = time.perf_counter(), time.process_time()
    out = model.encode(texts, normalize_embeddings=True)
    print(time.perf_counter() - begin, time.process_time() - cpu, flush=True)
    np.save(vectors, out)
"""
"""sentence-transformers, which embeds everything for each line on stdin."""


def sentences(path: Path, count: int, most: int, seed: int = 0) -> list[str]:
    """Make texts of the tokenizer's words, with lengths as in a corpus: a median of 18 words, at most `most`."""
    words = sorted(word for word in load_tokenizer(path).get_vocab() if word.isascii() and word.isalpha())
    draw = random.Random(seed)
    lengths = (min(most, 2 + int(draw.lognormvariate(2.9, 0.8))) for _ in range(count))
    return [" ".join(draw.choices(words, k=length)) for length in lengths]


def embed(url: str, texts: Sequence[str]) -> Vectors:
    """Embed the texts with a server."""

    def send(at: int) -> Vectors:
        body = {"input": texts[at : at + INPUTS], "encoding_format": "base64", "truncate_prompt_tokens": -1}
        request = urllib.request.Request(
            f"{url}/v1/embeddings", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            data: list[dict[str, Any]] = json.load(response)["data"]
        return np.stack([np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data])

    with ThreadPoolExecutor(CLIENTS) as pool:
        return np.concatenate(list(pool.map(send, range(0, len(texts), INPUTS))))


def processor_seconds(parent: int) -> float:
    """Return the processor time of this process's descendants."""
    children = {int(pid): _status(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()}
    own, found = {parent}, 0.0
    while new := {pid for pid, (of, _) in children.items() if of in own and pid not in own}:
        own |= new
        found += sum(children[pid][1] for pid in new)
    return found


def _status(pid: int) -> tuple[int, float]:
    """Return a process's parent and its processor time in seconds."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, 0.0
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS


def main() -> int:
    parser = argparse.ArgumentParser(prog="weft.tools.bench.encoders", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="directory of an embedder")
    parser.add_argument("--python", required=True, help="interpreter of an environment with sentence-transformers")
    parser.add_argument("--sentences", type=int, default=3000, help="number of sentences [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each [%(default)s]")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each [%(default)s]")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="folder of its files [%(default)s]")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    texts, vectors = sentences(given.model, given.sentences, 220), given.folder / "encoders.npy"
    (given.folder / "encoders.json").write_text(json.dumps(texts))
    command = [given.python, "-c", OTHER, str(given.model), str(given.folder / "encoders.json"), str(vectors)]
    seconds: dict[str, list[tuple[float, float]]] = {"sentence-transformers": [], "weft": []}
    options = ["--device", "cpu", "--cpu-threads", str(given.threads)]
    with (
        own_server(str(given.model), None, Console(stderr=True), options=options) as url,
        subprocess.Popen(
            [*command, str(given.threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        if other.stdout.readline() != "ready\n":
            return 1
        embed(url, texts[:64])
        difference = 0.0
        for _ in range(given.rounds):
            other.stdin.write("\n")
            other.stdin.flush()
            wall, cpu = map(float, other.stdout.readline().split())
            seconds["sentence-transformers"].append((wall, cpu))
            before, begin = processor_seconds(os.getpid()), time.perf_counter()
            own = embed(url, texts)
            wall = time.perf_counter() - begin
            seconds["weft"].append((wall, processor_seconds(os.getpid()) - before))
            difference = max(difference, float(np.abs(own - np.load(vectors)).max()))
        other.stdin.close()
    print(f"{len(texts)} sentences, {given.threads} threads, vectors differ by {difference:.1e} at most")
    best = {}
    for name, runs in seconds.items():
        wall, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
        best[name] = wall, cpu
        print(f"{name:22} {len(texts) / wall:8.0f} sentences/s  {wall:7.1f} s  {cpu:7.1f} processor seconds")
    ratios = [a / b for a, b in zip(best["sentence-transformers"], best["weft"], strict=True)]
    print(f"weft is {ratios[0]:.2f} times as fast and takes {1 / ratios[1]:.2f} times the processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
