"""Rerankers: cohere's clients, and LangChain's and LlamaIndex's, which go through them. The daemon serves one."""

from __future__ import annotations

import asyncio

import cohere
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank as Postprocessor
from trial import URL, run, tries

BASE = {"base_url": URL, "api_key": "none"}
QUERY, TEXTS = "what is the capital of france", ["a dog", "paris is the capital of france", "the stock market fell"]


def check(scores: list[float], count: int) -> None:
    assert len(scores) == count
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)


@tries("rerank", "cohere v2")
def _second() -> None:
    answer = cohere.ClientV2(**BASE).rerank(model="reranker", query=QUERY, documents=TEXTS, top_n=2)
    check([result.relevance_score for result in answer.results], 2)
    assert {result.index for result in answer.results} < {0, 1, 2}


@tries("rerank", "cohere v1")
def _first() -> None:
    answer = cohere.Client(**BASE).rerank(model="reranker", query=QUERY, documents=TEXTS, return_documents=True)
    check([result.relevance_score for result in answer.results], 3)
    assert [result.document.text for result in answer.results] == [TEXTS[r.index] for r in answer.results]


@tries("rerank", "cohere async")
def _async() -> None:
    async def ask() -> None:
        answer = await cohere.AsyncClientV2(**BASE).rerank(model="reranker", query=QUERY, documents=TEXTS)
        check([result.relevance_score for result in answer.results], 3)

    asyncio.run(ask())


@tries("rerank", "errors")
def _errors() -> None:
    body = None
    try:
        cohere.ClientV2(**BASE).rerank(model="reranker", query=QUERY, documents=[])
    except cohere.BadRequestError as error:
        body = str(error.body)
    assert body is not None
    assert "documents" in body


@tries("rerank", "langchain")
def _langchain() -> None:
    ranker = CohereRerank(client=cohere.ClientV2(**BASE), model="reranker", top_n=2)
    found = ranker.compress_documents([Document(page_content=text) for text in TEXTS], QUERY)
    check([document.metadata["relevance_score"] for document in found], 2)


@tries("rerank", "llama-index")
def _llama_index() -> None:
    ranker = Postprocessor(api_key="none", base_url=URL, model="reranker", top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in TEXTS]
    check([node.score or 0.0 for node in ranker.postprocess_nodes(nodes, query_str=QUERY)], 2)


run()
