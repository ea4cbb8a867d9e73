"""`weft bench offline --baseline llama.cpp`: batches and sequences, with a library of predictable tokens."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest
from real_models import SMOLLM2, SmolLM2, model_file

from weft.engine.errors import ConfigError
from weft.tools.bench import llama_cpp

SOURCE = Path(__file__).with_name("fake_llama.c")
VOCAB = 97


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("library")
    subprocess.run((compiler, "-shared", "-fPIC", "-O1", "-o", folder / "libllama.so", SOURCE), check=True)
    return folder


@pytest.fixture
def library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(llama_cpp.FOLDER, str(folder))


def expected(prompt: list[int], count: int) -> list[int]:
    """What the library answers to a prompt on its own."""
    state, made = 0, []
    for token in prompt:
        state = (state * 31 + token + 1) % 1000003
    for _ in range(count):
        made.append(state % VOCAB)
        state = (state * 31 + made[-1] + 1) % 1000003
    return made


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("sequences", [1, 3, 8])
def test_each_request_gets_the_answer_to_its_own_prompt(sequences: int) -> None:
    rng = random.Random(sequences)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice((1, 7, 200)))] for _ in range(13)]
    outputs = [rng.choice((1, 2, 17)) for _ in prompts]
    llama = llama_cpp.LlamaCpp(Path("model.gguf"), context=240, sequences=sequences, threads=2)
    try:
        assert llama_cpp.generate(llama, prompts, outputs, sequences) == list(map(expected, prompts, outputs))
    finally:
        llama.close()


@pytest.mark.usefixtures("library")
def test_a_prompt_longer_than_a_batch_is_computed_in_parts() -> None:
    prompts = [list(range(90)) * 12, [5]]
    llama = llama_cpp.LlamaCpp(Path("model.gguf"), context=1100, sequences=2, threads=1)
    assert llama_cpp.generate(llama, prompts, [3, 4], 2) == [expected(prompts[0], 3), expected(prompts[1], 4)]
    llama.close()


@pytest.mark.usefixtures("library")
def test_what_the_library_refuses_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot load .*corrupt\.gguf"):
        llama_cpp.LlamaCpp(Path("corrupt.gguf"), context=8, sequences=1, threads=1)
    with pytest.raises(ConfigError, match="no memory for 8 sequences of 4096 tokens"):
        llama_cpp.LlamaCpp(Path("model.gguf"), context=4096, sequences=8, threads=1)
    llama = llama_cpp.LlamaCpp(Path("model.gguf"), context=4, sequences=1, threads=1)
    with pytest.raises(ConfigError, match=r"failed to decode \(1\)"):
        llama_cpp.generate(llama, [[1, 2, 3, 4, 5]], [1], 1)


def test_the_library_of_node_is_found_and_its_plain_build_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(llama_cpp.FOLDER, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    with pytest.raises(ConfigError, match="found no library: pip install llama-cpp-python"):
        llama_cpp.find_library()
    for build in ("linux-x64-cuda", "linux-x64"):
        folder = tmp_path / "node_modules" / "@node-llama-cpp" / build / "bins" / build
        folder.mkdir(parents=True)
        (folder / "libllama.v0.5.0.so").touch()
    assert llama_cpp.find_library() == folder / "libllama.v0.5.0.so"


def test_a_model_that_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a model from a GGUF file"):
        llama_cpp.model_file(tmp_path)


@pytest.mark.nightly
def test_the_real_library_answers_as_transformers_do(tmp_path: Path) -> None:
    """llama.cpp rounds activations to 8 bits, so it may choose another token only where float32 hardly prefers one."""
    try:
        llama_cpp.find_library()
    except ConfigError as error:
        pytest.skip(str(error))
    model = SmolLM2(model_file(SMOLLM2, tmp_path))
    questions = ("What is the capital of France?", "Name three fruits.", "Who wrote Hamlet?")
    prompts = [model.chat_ids({"role": "user", "content": question}) for question in questions]
    llama = llama_cpp.LlamaCpp(model.file, context=128, sequences=2, threads=2)
    answers = llama_cpp.generate(llama, prompts, [12, 12, 12], 2)
    llama.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        rows = model.logits(prompt + answer)[len(prompt) - 1 : -1]
        assert all(row.max() - row[token] < 1 for row, token in zip(rows, answer, strict=True))
