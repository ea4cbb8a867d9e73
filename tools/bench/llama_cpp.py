"""`run_llama_cpp`: the same requests through llama.cpp's library, several sequences at once.

The library is that of the Python package `llama-cpp-python` or of the npm package `node-llama-cpp`, or the one in the
folder `LLAMA_CPP_LIB_PATH`. Only the first fields of its parameters are set, which have been the same for years; the
rest stays as the library returned it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.engine.errors import ConfigError
from weft.engine.model.gguf.file import INDEX

FOLDER = "LLAMA_CPP_LIB_PATH"
BATCH = 512  # Tokens that it computes at once.
_ROOM = 1024  # Bytes for a structure of parameters, more than it has in any version.


class _Params(ctypes.Structure):
    """Parameters passed by value as the last argument, so bytes beyond the library's own structure are harmless."""

    _fields_ = (("bytes", ctypes.c_ubyte * _ROOM),)


class _ContextParams(ctypes.Structure):
    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("rest", ctypes.c_ubyte * _ROOM),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def _folders() -> Iterator[Path]:
    if (given := os.environ.get(FOLDER)) is not None:
        yield Path(given)
        return
    package = importlib.util.find_spec("llama_cpp")
    if package is not None and package.submodule_search_locations:
        yield Path(package.submodule_search_locations[0]) / "lib"
    for folder in (Path.cwd(), *Path.cwd().parents):
        # The plain build: others need a GPU's libraries.
        yield from sorted(folder.glob("node_modules/@node-llama-cpp/*/bins/*"), key=lambda path: len(path.name))


def find_library() -> Path:
    """Return llama.cpp's library. Raises `ConfigError`."""
    for folder in _folders():
        if found := sorted(folder.glob("libllama.so")) or sorted(folder.glob("libllama.*so*")):
            return found[0]
    raise ConfigError(
        "--baseline llama.cpp: found no library: pip install llama-cpp-python, or npm install node-llama-cpp in this "
        f"folder, or set {FOLDER} to the folder with libllama.so"
    )


def model_file(model: Path) -> Path:
    """Return the GGUF file behind a model directory. Raises `ConfigError`."""
    if not (model / INDEX).is_file():
        raise ConfigError("--baseline llama.cpp needs a model from a GGUF file")
    return sorted(model.glob("*.gguf"))[0].resolve()


class LlamaCpp:
    """A model in llama.cpp."""

    def __init__(self, file: Path, *, context: int, sequences: int, threads: int) -> None:
        """context: tokens of each sequence. Raises `ConfigError`."""
        path = find_library()
        names = ("libggml-base", "libggml.")  # In the order in which one needs the other.
        parts = [part for name in names for part in sorted(path.parent.glob(f"{name}*so*"))]
        self._backends = [ctypes.CDLL(str(part), ctypes.RTLD_GLOBAL) for part in parts]
        self._lib = lib = ctypes.CDLL(str(path))
        for name, restype in (
            ("llama_model_default_params", _Params), ("llama_context_default_params", _ContextParams),
            ("llama_model_load_from_file", ctypes.c_void_p), ("llama_init_from_model", ctypes.c_void_p),
            ("llama_model_get_vocab", ctypes.c_void_p), ("llama_batch_init", _Batch),
            ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float)),
        ):  # fmt: skip
            getattr(lib, name).restype = restype
        quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self._quiet = quiet  # The library keeps a pointer to it.
        lib.llama_log_set(quiet, None)
        self._load_backends(path.parent)
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
        if not self._model:
            raise ConfigError(f"llama.cpp ({path}) cannot load {file}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context * sequences, BATCH, BATCH
        params.n_seq_max = sequences
        self._context = lib.llama_init_from_model(ctypes.c_void_p(self._model), params)
        if not self._context:
            raise ConfigError(f"llama.cpp ({path}) has no memory for {sequences} sequences of {context} tokens")
        lib.llama_set_n_threads(ctypes.c_void_p(self._context), threads, threads)
        self._vocab = lib.llama_vocab_n_tokens(ctypes.c_void_p(lib.llama_model_get_vocab(ctypes.c_void_p(self._model))))
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        self._lengths: dict[int, int] = {}

    def _load_backends(self, folder: Path) -> None:
        for library in (self._lib, *self._backends):
            if hasattr(library, "ggml_backend_load_all_from_path"):
                library.ggml_backend_load_all_from_path(str(folder).encode())
                return

    def run(self, tokens: dict[int, Sequence[int]]) -> dict[int, int]:
        """Compute further tokens of sequences, and return the likeliest next token of each."""
        rows = [
            (sequence, token, i == len(some) - 1) for sequence, some in tokens.items() for i, token in enumerate(some)
        ]
        found: dict[int, int] = {}
        for first in range(0, len(rows), BATCH):
            part, batch = rows[first : first + BATCH], self._batch
            batch.n_tokens = len(part)
            for i, (sequence, token, last) in enumerate(part):
                batch.token[i], batch.pos[i] = token, self._lengths.get(sequence, 0)
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, last
                self._lengths[sequence] = batch.pos[i] + 1
            if status := self._lib.llama_decode(ctypes.c_void_p(self._context), batch):
                raise ConfigError(f"llama.cpp failed to decode ({status})")
            for i, (sequence, _, last) in enumerate(part):
                if last:
                    logits = self._lib.llama_get_logits_ith(ctypes.c_void_p(self._context), i)
                    found[sequence] = int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())
        return found

    def forget(self, sequence: int) -> None:
        """Clear a sequence, so that another request can use it."""
        self._lib.llama_get_memory.restype = ctypes.c_void_p
        memory = ctypes.c_void_p(self._lib.llama_get_memory(ctypes.c_void_p(self._context)))
        self._lib.llama_memory_seq_rm(memory, sequence, -1, -1)
        self._lengths.pop(sequence, None)

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(ctypes.c_void_p(self._context))
        self._lib.llama_model_free(ctypes.c_void_p(self._model))


def generate(
    llama: LlamaCpp, prompts: Sequence[Sequence[int]], outputs: Sequence[int], sequences: int
) -> list[list[int]]:
    """Complete prompts greedily to these lengths, up to `sequences` at once."""
    made: list[list[int]] = [[] for _ in prompts]
    waiting, free = list(range(len(prompts)))[::-1], list(range(sequences))
    running: dict[int, int] = {}
    step: dict[int, Sequence[int]] = {}
    while waiting or running:
        while waiting and free:
            sequence, request = free.pop(), waiting.pop()
            running[sequence], step[sequence] = request, prompts[request]
        found = llama.run(step)
        step = {}
        for sequence, token in found.items():
            request = running[sequence]
            made[request].append(token)
            if len(made[request]) < outputs[request]:
                step[sequence] = [token]
            else:
                del running[sequence]
                free.append(sequence)
                llama.forget(sequence)
    return made


def run_llama_cpp(
    model: Path, prompts: Sequence[Any], lengths: Sequence[tuple[int, int]], *, sequences: int, threads: int
) -> dict[str, float]:
    """Run a workload, and return its figures. Raises `ConfigError`."""
    sequences = min(sequences, len(prompts))
    llama = LlamaCpp(
        model_file(model), context=max(a + b for a, b in lengths), sequences=sequences, threads=threads
    )  # fmt: skip
    try:
        generate(llama, [[1, 2, 3]], [2], 1)  # the first pass maps the file
        begin, cpu = time.perf_counter(), time.process_time()
        generate(llama, [prompt.tolist() for prompt in prompts], [out for _, out in lengths], sequences)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    finally:
        llama.close()
    tokens = sum(a + b for a, b in lengths)
    return {
        "llama_cpp_seconds": seconds,
        "llama_cpp_cpu_seconds": cpu,
        "llama_cpp_total_tokens_per_second": tokens / seconds,
        "llama_cpp_total_tokens_per_cpu_second": tokens / cpu,
    }
