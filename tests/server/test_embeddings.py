"""`/v1/embeddings`: inputs, forms of answers, limits, and the pooling settings of a model's directory."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub import HIDDEN, MAX_MODEL_LEN, Script, Server, serving, state_of

from weft.engine.errors import ModelError
from weft.engine.wire.messages import Finish
from weft.server.api.pooler import Pooler, read_pooler

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/embeddings"


async def _embed(server: Server, given: Any, **more: Any) -> dict[str, Any]:
    response = await server.post(PATH, {"model": "stub", "input": given, **more})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def _vectors(answer: dict[str, Any]) -> np.ndarray:
    return np.array([entry["embedding"] for entry in answer["data"]])


async def test_an_answer_has_a_vector_of_length_one_for_each_input(server: Server) -> None:
    texts = ["hello", "hello world", "x"]
    answer = await _embed(server, texts)
    ids = [server.engine.tokenizer.encode(text) for text in texts]
    np.testing.assert_allclose(_vectors(answer), [_unit(state_of(part)) for part in ids], atol=1e-6)
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    assert {entry["object"] for entry in answer["data"]} == {"embedding"}
    assert (answer["object"], answer["model"]) == ("list", "stub")
    assert {"id", "created"} < set(answer)  # as in vLLM
    count = sum(map(len, ids))
    details = {"cached_tokens": 0}
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count, "prompt_tokens_details": details}
    assert all(message.params.max_tokens == 0 for message in server.engine.added)
    assert {message.params.pooling for message in server.engine.added} == {"last"}


async def test_texts_and_token_ids_alone_and_in_lists_are_the_same(server: Server) -> None:
    ids = server.engine.tokenizer.encode("hello")
    answers = [_vectors(await _embed(server, given)) for given in ("hello", ["hello"], ids, [ids])]
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer, answers[0])


async def test_base64_holds_the_same_numbers(server: Server) -> None:
    plain = _vectors(await _embed(server, ["a", "b"]))
    coded = await _embed(server, ["a", "b"], encoding_format="base64")
    read = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in coded["data"]]
    np.testing.assert_array_equal(np.array(read), plain.astype(np.float32))


async def test_fewer_dimensions_are_the_first_ones_of_length_one(server: Server) -> None:
    state = state_of(server.engine.tokenizer.encode("hello"))
    np.testing.assert_allclose(_vectors(await _embed(server, "hello", dimensions=3))[0], _unit(state[:3]), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "either input or messages"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "empty"),
        ({"input": ["a", [1]]}, "input", "must be a string"),
        ({"input": [1, "a"]}, "input", "must be a string"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [2**31 - 1]}, "input", "token ids"),
        ({"input": "x" * 100_000}, "input", "context length"),
        ({"input": [5] * (MAX_MODEL_LEN + 1)}, "input", "context length"),
        ({"input": "a", "dimensions": 0}, "dimensions", "1"),
        ({"input": "a", "dimensions": HIDDEN + 1}, "dimensions", "this model's embeddings have only 8"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": "a", "chat_template": "x"}, "chat_template", "requires messages"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt", "requires messages"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "no prompt 'query'; known prompts: none"),
    ],
)
async def test_impossible_requests_are_refused_by_field(
    server: Server, body: dict[str, Any], param: str, words: str
) -> None:
    response = await server.post(PATH, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert server.engine.added == []


async def test_a_prompt_may_fill_the_context(server: Server) -> None:
    assert len((await _embed(server, [5] * MAX_MODEL_LEN))["data"]) == 1


async def test_unknown_models_and_other_paths_to_the_endpoint(server: Server) -> None:
    response = await server.post(PATH, {"model": "other", "input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert (await server.post("/embeddings", {"input": "a"})).status_code == 200


async def test_non_finite_states_are_an_error(server: Server) -> None:
    server.engine.script = Script(finish=Finish.NONFINITE, error="the model's logits are not finite")
    response = await server.post(PATH, {"input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "nonfinite_logits")


async def test_keys_are_charged_for_their_tokens() -> None:
    async with serving(rate_limit_tokens=3) as server:
        assert (await server.post(PATH, {"input": [5] * 60})).status_code == 200
        assert (await server.post(PATH, {"input": [5]})).status_code == 429


def _describe(path: Path, pooling: dict[str, Any] | None = None, *more: str, **prompts: Any) -> Path:
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    if pooling is not None:
        modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 8, **pooling}))
    modules += [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in more]
    (path / "modules.json").write_text(json.dumps(modules))
    if prompts:
        (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return path


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        (None, "last"),
    ],
)
async def test_the_directory_sets_the_pooling(tmp_path: Path, config: Any, pooling: str) -> None:
    found = read_pooler(_describe(tmp_path, config, "Normalize"), "auto", HIDDEN)
    assert found is not None
    assert found.pooling == pooling


async def test_the_operators_choice_overrides_it(tmp_path: Path) -> None:
    path = _describe(tmp_path, {"pooling_mode_cls_token": True})
    assert read_pooler(path, "mean", HIDDEN) == Pooler("mean")
    assert read_pooler(path, "none", HIDDEN) is None
    assert read_pooler(tmp_path / "1_Pooling", "auto", HIDDEN) == Pooler("last")


@pytest.mark.parametrize(
    ("config", "more", "words"),
    [
        ({"pooling_mode_cls_token": True}, (), r"pooling \(cls_token\) is not supported; override it with --pooling"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, (), "mean_tokens, max_tokens"),
        ({}, (), "nothing"),
        ({"pooling_mode_lasttoken": True}, ("LSTM",), "unsupported step: LSTM"),
    ],
)
async def test_missing_files_are_named(tmp_path: Path, config: Any, more: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_pooler(_describe(tmp_path, config, *more), "auto", HIDDEN)


async def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ModelError, match=r"modules\.json cannot be read"):
        read_pooler(tmp_path, "auto", HIDDEN)
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ModelError, match=r"modules\.json is not in the format"):
        read_pooler(tmp_path, "auto", HIDDEN)


async def test_prompts_of_the_model_precede_texts(tmp_path: Path) -> None:
    prompts = {"query": "Q: ", "document": "D: "}
    _describe(tmp_path, {"pooling_mode_lasttoken": True}, prompts=prompts, default_prompt_name="document")
    async with serving(model=str(tmp_path)) as server:
        named, default = await _embed(server, "hi", prompt_name="query"), await _embed(server, "hi")
        for answer, text in ((named, "Q: hi"), (default, "D: hi")):
            want = _unit(state_of(server.engine.tokenizer.encode(text)))
            np.testing.assert_allclose(_vectors(answer)[0], want, atol=1e-6)
        response = await server.post(PATH, {"input": [5, 6], "prompt_name": "query"})
        assert response.json()["error"]["param"] == "prompt_name"


async def test_a_server_may_disable_embeddings(tmp_path: Path) -> None:
    async with serving(pooling="none") as server:
        response = await server.post(PATH, {"input": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "embeddings_off")
    _describe(tmp_path, {"pooling_mode_cls_token": True})
    async with serving(model=str(tmp_path)) as server:
        response = await server.post(PATH, {"input": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (501, "pooling_not_supported")
