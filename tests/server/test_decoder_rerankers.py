"""Decoders as rerankers: a head for classes, or the logits of two answers, computed from the last hidden state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import in_process
import numpy as np
import pytest
import tiny_encoders
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from weft.server.api.scorer import QWEN3, read_rows

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUERY, DOCUMENTS = "what is paris", ["a cat", "paris is the capital of france", "a dog <|im_end|>"]
SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "max_position_embeddings": 256, "initializer_range": 0.25,
}  # fmt: skip
CONTROL = ("<|im_start|>", "<|im_end|>", "<pad>", "<unk>")
ROLES = (
    "{% for m in messages %}{% if m['role'] == 'query' %}query {{ m['content'] }} {% endif %}"
    "{% if m['role'] == 'document' %}document {{ m['content'] }}{% endif %}{% endfor %}<|im_end|> yes ?"
)


def _save(path: Path, *, labels: int = 0, template: str | None = None, tied: bool = True) -> Path:
    """Write a tiny Qwen3 that generates text, or has classes if `labels`."""
    words = [*CONTROL, *tiny_encoders.WORDS, "yes", "no", "query", "document", "?", "judge", "the", "instruct", "find"]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"], chat_template=template,
    )  # fmt: skip
    tokenizer.save_pretrained(path)
    more: dict[str, Any] = {"num_labels": labels} if labels else {}
    config = transformers.Qwen3Config(
        **SHAPE, vocab_size=len(tokenizer), pad_token_id=2, eos_token_id=1, tie_word_embeddings=tied, **more
    )
    torch.manual_seed(3)
    kind = transformers.Qwen3ForSequenceClassification if labels else transformers.Qwen3ForCausalLM
    kind(config).save_pretrained(path)
    return path


def _tokens(path: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(path).backend_tokenizer


def _logits(path: Path, ids: list[int]) -> torch.Tensor:
    """`[V]` or `[labels]`: the logits after the last token."""
    config = transformers.AutoConfig.from_pretrained(path)
    headed = config.architectures[0].endswith("ForSequenceClassification")
    auto = transformers.AutoModelForSequenceClassification if headed else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits
    return logits[0] if headed else logits[0, -1]


def _as_text(document: str) -> list[str]:
    """A document's words; a control token that it spells is no control token."""
    return document.replace("<|im_end|>", "< |im_end| >").split()


async def _scores(path: Path, **options: Any) -> tuple[list[float], dict[str, Any]]:
    engine = in_process.start(path, max_num_batched_tokens=64, num_pages=64, page_size=16)
    async with in_process.serving({"judge": engine}, **options) as (http, _, _):
        body = {"query": QUERY, "documents": DOCUMENTS}
        response = await http.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False})
        assert response.status_code == 200, response.text
        ranked = (await http.post("/v1/rerank", json=body)).json()["results"]
        (model,) = (await http.get("/v1/models")).json()["data"]
    scores = [entry["score"] for entry in response.json()["data"]]
    assert [result["index"] for result in ranked] == sorted(range(len(scores)), key=lambda i: -scores[i])
    return scores, model


async def test_a_head_for_classes_scores_the_last_token(tmp_path: Path) -> None:
    path = _save(tmp_path / "head", labels=1)
    scores, model = await _scores(path)
    encode = _tokens(path).encode
    expected = [float(_logits(path, encode(QUERY, document).ids)[0]) for document in DOCUMENTS[:2]]
    np.testing.assert_allclose(scores[:2], expected, atol=1e-4)
    assert model["tasks"] == ["classify", "score"]


@pytest.mark.parametrize("tied", [True, False])
async def test_two_answers_score_a_pair_in_the_prompt_of_qwen3_reranker(tmp_path: Path, tied: bool) -> None:
    path = _save(tmp_path / "answers", tied=tied)
    scores, model = await _scores(path, classifier_from_token=["no", "yes"])
    tokens = _tokens(path)
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    for document, score in list(zip(DOCUMENTS, scores, strict=True))[:2]:
        ids = tokens.encode(QWEN3.format(instruction=instruction, query=QUERY, document=document)).ids
        logits = _logits(path, ids)
        expected = logits[tokens.token_to_id("yes")] - logits[tokens.token_to_id("no")]
        assert score == pytest.approx(float(expected), abs=1e-4)
    assert model["tasks"] == ["generate", "embed", "score"]


async def test_a_chat_template_may_have_the_roles_query_and_document(tmp_path: Path) -> None:
    path = _save(tmp_path / "roles", template=ROLES)
    scores, _ = await _scores(path, classifier_from_token=["no", "yes"])
    tokens = _tokens(path)
    for document, score in list(zip(DOCUMENTS, scores, strict=True))[:2]:
        logits = _logits(path, tokens.encode(f"query {QUERY} document {document}<|im_end|> yes ?").ids)
        expected = logits[tokens.token_to_id("yes")] - logits[tokens.token_to_id("no")]
        assert score == pytest.approx(float(expected), abs=1e-4)


async def test_truncation_keeps_the_end_of_the_prompt(tmp_path: Path) -> None:
    path = _save(tmp_path / "cut", template=ROLES)
    tokens = _tokens(path)
    engine = in_process.start(path, max_num_batched_tokens=64, num_pages=64, page_size=16)
    async with in_process.serving({"judge": engine}, classifier_from_token=["no", "yes"]) as (http, _, _):
        body = {"text_1": QUERY, "text_2": "cat " * 400, "use_activation": False}
        refused = await http.post("/v1/score", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
        cut = await http.post("/v1/score", json={**body, "max_tokens_per_doc": 9})
    logits = _logits(path, tokens.encode(f"query {QUERY} document {'cat ' * 9}<|im_end|> yes ?").ids)
    expected = logits[tokens.token_to_id("yes")] - logits[tokens.token_to_id("no")]
    assert cut.json()["data"][0]["score"] == pytest.approx(float(expected), abs=1e-4)


async def test_a_plain_chat_model_ranks_nothing(tmp_path: Path) -> None:
    engine = in_process.start(_save(tmp_path / "chat"), num_pages=16, page_size=16)
    async with in_process.serving({"chat": engine}) as (http, _, _):
        for path, body in (
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/classify", {"input": "a"}),
        ):
            response = await http.post(path, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (400, "model", "wrong_kind_of_model")
            assert "/v1/chat/completions" in error["message"]
        pooled = await http.post("/pooling", json={"input": "a cat"})
        embedded = await http.post("/v1/embeddings", json={"input": "a cat"})
        assert pooled.json()["data"][0]["data"] == embedded.json()["data"][0]["embedding"]


async def test_rows_are_read_in_every_dtype_and_from_shards(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        head = torch.randn(7, 5).to(dtype)
        save_file({"other": torch.zeros(3), "lm_head.weight": head}, tmp_path / "model.safetensors")
        found = read_rows(tmp_path, "lm_head.weight", [6, 2])
        assert found is not None
        np.testing.assert_array_equal(found, head[[6, 2]].float().numpy())
    assert read_rows(tmp_path, "score.weight") is None
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "part.safetensors"}}')
    whole = read_rows(tmp_path, "lm_head.weight")
    assert whole is not None
    np.testing.assert_array_equal(whole, head.float().numpy())
