"""haystack's ranker, which goes through cohere's client. The daemon serves a reranker."""

from __future__ import annotations

import asyncio

from haystack import Document, Pipeline
from haystack.utils import Secret
from haystack_integrations.components.rankers.cohere import CohereRanker
from trial import URL, run, tries

QUERY, TEXTS = "what is the capital of france", ["a dog", "paris is the capital of france", "the stock market fell"]


def ranker(most: int) -> CohereRanker:
    return CohereRanker(model="reranker", api_base_url=URL, api_key=Secret.from_token("none"), top_k=most)


def check(found: list[Document], count: int) -> None:
    scores = [document.score or 0.0 for document in found]
    assert len(scores) == count
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert {document.content for document in found} <= {*TEXTS}


@tries("rerank", "plain")
def _plain() -> None:
    check(ranker(2).run(query=QUERY, documents=[Document(content=text) for text in TEXTS])["documents"], 2)


@tries("rerank", "async")
def _async() -> None:
    asked = ranker(3).run_async(query=QUERY, documents=[Document(content=text) for text in TEXTS])
    check(asyncio.run(asked)["documents"], 3)


@tries("rerank", "in a pipeline")
def _pipeline() -> None:
    pipeline = Pipeline()
    pipeline.add_component("ranker", ranker(1))
    asked = {"query": QUERY, "documents": [Document(content=text) for text in TEXTS]}
    check(pipeline.run({"ranker": asked})["ranker"]["documents"], 1)


run()
