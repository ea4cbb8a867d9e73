"""The engine of encoders: batches, ends, fairness between tenants, sleep, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_encoders
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.config import EngineConfig
from weft.engine.encoders.engine import EncoderEngine
from weft.engine.encoders.runner import groups
from weft.engine.errors import ConfigError, ModelError, OutOfMemory, RequestError
from weft.engine.llm import LLM
from weft.engine.model.encoders import serves_encoder
from weft.engine.runner.options import footprint
from weft.engine.runner.start.inspect_command import inspect
from weft.engine.wire.messages import AddRequest, EngineReady, Finish, MemoryBudget, Outputs
from weft.engine.wire.sampling import SamplingParams
from weft.server.config import ServeConfig
from weft.server.daemon.announce import announce


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoders.save("bert", tmp_path_factory.mktemp("encoder") / "bert")


def _config(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": str(path), "device": "cpu", "cpu_threads": 1, **options})


def _request(handle: int, length: int = 4, pooling: Any = "mean", **more: Any) -> AddRequest:
    ids = np.full(length, 4 + handle % 8, np.int32)
    params = SamplingParams(max_tokens=0, pooling=pooling)
    return AddRequest(handle=handle, prompt_token_ids=ids.tobytes(), params=params, **more)


def _run(engine: EncoderEngine) -> dict[int, Outputs]:
    """The message with each handle's end, in the order of their ends."""
    found = {}
    while engine.has_work:
        if (outputs := engine.step()) is not None:
            found.update(dict.fromkeys(outputs.columns()[0].tolist(), outputs))
    return found


def _ends(found: dict[int, Outputs]) -> dict[int, Finish]:
    ends: dict[int, Finish] = {}
    for outputs in found.values():
        handles, _, finish = outputs.columns()
        ends.update(zip(handles.tolist(), map(Finish, finish.tolist()), strict=True))
    return ends


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(0, 200))
def test_groups_have_every_row_once_and_little_padding(lengths: list[int], padding: int) -> None:
    found = list(groups(lengths, padding))
    assert sorted(row for group in found for row in group) == list(range(len(lengths)))
    for group in found:
        own = [lengths[row] for row in group]
        assert len(own) * max(own) - sum(own) <= padding


def test_a_batch_is_bounded_by_tokens_and_sequences(path: Path) -> None:
    engine = EncoderEngine(_config(path, max_num_batched_tokens=64, max_num_seqs=8))
    for handle in range(20):
        engine.add(_request(handle, 4 if handle < 10 else 30))
    sizes = []
    while engine.has_work:
        if (outputs := engine.step()) is not None:
            sizes.append((outputs.stats.iteration.requests, outputs.stats.iteration.tokens))
    assert sum(requests for requests, _ in sizes) == 20
    assert all(requests <= 8 and tokens <= 64 for requests, tokens in sizes)
    assert engine.stats().scheduler.prompt_tokens == 10 * 4 + 10 * 30


def test_tenants_take_turns(path: Path) -> None:
    engine = EncoderEngine(_config(path, max_num_seqs=4))
    for handle in range(40):
        engine.add(_request(handle, tenant=1))
    engine.add(_request(100, tenant=2))
    order = list(_run(engine))
    assert order.index(100) < 8


def test_aborted_requests_end_once_and_others_are_computed(path: Path) -> None:
    engine = EncoderEngine(_config(path, max_num_seqs=2))
    for handle in range(5):
        engine.add(_request(handle))
    engine.step()
    engine.abort(3)
    engine.abort(3)
    engine.abort(77)
    ends = _ends(_run(engine))
    assert ends == {2: Finish.LENGTH, 3: Finish.ABORT, 4: Finish.LENGTH}
    assert not engine.has_work
    assert engine.stats().scheduler.waiting == 0


def test_a_request_aborted_while_its_batch_runs_gets_no_result(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EncoderEngine(_config(path))
    engine.add(_request(1))
    engine.add(_request(2, 9))
    launch = engine.runner.launch

    def launched(batch: Any) -> Any:
        engine.abort(1)
        return launch(batch)

    monkeypatch.setattr(engine.runner, "launch", launched)
    found = _run(engine)
    assert _ends(found) == {1: Finish.ABORT, 2: Finish.LENGTH}
    assert set(found[2].pooled) == {2}


def test_states_that_are_not_finite_are_an_error(path: Path) -> None:
    engine = EncoderEngine(_config(path))
    with torch.inference_mode():
        engine.runner._module.encoder.layer[0].output.dense.bias.fill_(float("nan"))
    engine.add(_request(1))
    found = _run(engine)
    assert _ends(found) == {1: Finish.NONFINITE}
    assert "not finite" in found[1].errors[1]
    assert engine.stats().scheduler.nonfinite_logits == 1


def test_sleep_frees_the_weights_and_waking_restores_them(path: Path, tmp_path: Path) -> None:
    share = {"sleeps": True, "memory": 0.5, "models": 2}
    engine = EncoderEngine(_config(path, cache_dir=str(tmp_path), share=share))
    engine.add(_request(1))
    before = _run(engine)[1].pooled[1]
    assert engine.sleep() >= sum(p.nbytes for p in engine.runner._module.parameters())
    engine.add_or_refuse(_request(2))
    assert _ends(_run(engine)) == {2: Finish.BUSY}
    engine.wake()
    engine.add(_request(1))
    assert _run(engine)[1].pooled[1] == before


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (AddRequest(handle=1, prompt_token_ids=b"\0\0\0\0", params=SamplingParams()), "generates no text"),
        (_request(1, 65), "65 tokens of at most 64"),
        (_request(1, 0), "0 tokens"),
        (_request(1, pooling="head"), "has no classes"),
        (AddRequest(handle=1, prompt_token_ids=np.array([999], np.int32).tobytes(),
                    params=SamplingParams(max_tokens=0, pooling="mean")), "outside"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_served_are_refused(path: Path, request_: AddRequest, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        EncoderEngine(_config(path)).add(request_)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("tensor_parallel_size", 2, "--tensor-parallel-size"),
        ("batch_invariant", True, "--batch-invariant"),
        ("model_impl", "native", "--model-impl native"),
    ],
)
def test_options_of_decoders_are_refused_by_name(path: Path, option: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        serves_encoder(_config(path, **{option: value}))


def test_contexts_are_those_of_the_model(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="64 positions"):
        EncoderEngine(_config(path, max_model_len=65))
    roberta = tiny_encoders.save("xlm-roberta", tmp_path / "roberta")
    assert EncoderEngine(_config(roberta)).max_model_len == 64 - 2  # positions begin after the padding id
    (roberta / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    assert EncoderEngine(_config(roberta)).max_model_len == 24
    assert EncoderEngine(_config(roberta, max_model_len=62)).max_model_len == 62


def test_weights_that_do_not_fit_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "machine_memory", lambda: 10_000)
    with pytest.raises(OutOfMemory, match="the weights need"):
        EncoderEngine(_config(path))


def test_quantized_checkpoints_are_refused(path: Path, tmp_path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ModelError, match="is quantized"):
        serves_encoder(_config(tmp_path))


def test_missing_weights_are_named(path: Path, tmp_path: Path) -> None:
    headed = tiny_encoders.save("bert", tmp_path / "head", labels=2)
    (headed / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="has no tensor"):
        EncoderEngine(_config(headed))


def test_the_offline_class_says_that_an_encoder_generates_nothing(path: Path) -> None:
    with pytest.raises(ModelError, match="is an encoder"):
        LLM(str(path), device="cpu", progress=False)


def test_inspect_describes_an_encoder(path: Path) -> None:
    facts = inspect(EngineConfig(model=str(path), load_format="dummy"))
    assert facts["implementation"] == "transformers' code, as an encoder"
    assert facts["parts"]["layers"] == "2 of width 32"
    assert facts["devices"]["cpu"]["max_model_len"] == 64


@pytest.mark.parametrize(
    ("tasks", "endpoint"), [(("embed",), "/v1/embeddings"), (("classify",), "/classify"),
                            (("classify", "score"), "/v1/rerank")],
)  # fmt: skip
def test_the_greeting_shows_a_request_that_the_model_serves(
    tasks: tuple[str, ...], endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = EngineReady(
        model_type="BertModel", num_parameters=1, dtype="float32", device="cpu", vocab_size=9, max_model_len=256,
        page_size=16, num_pages=0, max_num_seqs=1, max_num_batched_tokens=9, eos_token_ids=(), load_seconds=0.0,
        memory=MemoryBudget(), tasks=tasks,
    )  # fmt: skip
    announce(ServeConfig(port=0), ("127.0.0.1", 80), [ready], 1.0, chat=False, key=False)
    greeting = capsys.readouterr().out
    assert endpoint in greeting
    assert "inputs of up to 256 tokens" in greeting
