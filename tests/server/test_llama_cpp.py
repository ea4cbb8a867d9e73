"""llama.cpp's own endpoints: `/completion`, `/tokenize` with `content`, `/detokenize`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from stub import MAX_MODEL_LEN, Script, Server, serving

from weft.server.api.llama_cpp import LlamaBody
from weft.server.api.other_fields import REFUSED, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCUMENTED = """prompt temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_cmpl
    stream stop typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty dry_multiplier dry_base
    dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau
    mirostat_eta grammar json_schema seed ignore_eos logit_bias n_probs min_keep t_max_predict_ms id_slot
    cache_prompt return_tokens samplers timings_per_token return_progress post_sampling_probs response_fields lora
    top_n_sigma n_discard backend_sampling"""
NAMES = frozenset(DOCUMENTED.split())
"""The fields that llama.cpp documents."""


async def complete(server: Server, **body: Any) -> httpx.Response:
    return await server.post("/completion", {"prompt": "hi", **body})


async def completed(server: Server, **body: Any) -> Any:
    response = await complete(server, **body)
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]


async def test_an_answer_has_llama_cpps_fields_and_defaults(server: Server) -> None:
    answer = await completed(server)
    prompt = len(server.engine.prompt())
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("hello world", True, "eos")
    assert (answer["prompt"], answer["model"], answer["index"], answer["tokens"]) == ("hi", "stub", 0, [])
    assert (answer["tokens_evaluated"], answer["truncated"], answer["has_new_line"]) == (prompt, False, False)
    assert answer["tokens_cached"] == prompt + answer["tokens_predicted"]
    assert answer["timings"]["prompt_n"] == prompt
    assert answer["timings"]["predicted_n"] == answer["tokens_predicted"]
    assert all(isinstance(value, int | float) for value in answer["timings"].values())
    params = server.engine.added[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert params.max_tokens == MAX_MODEL_LEN - prompt
    assert params.seed is None


async def test_rates_are_numbers_without_a_decode_step(server: Server) -> None:
    timings = (await completed(server, n_predict=1))["timings"]
    assert timings["predicted_n"] == 1
    assert timings["predicted_per_second"] == timings["predicted_per_token_ms"] == 0.0


async def test_a_stream_ends_with_an_event_that_stops_and_no_mark(server: Server) -> None:
    *parts, last = events(await complete(server, stream=True, timings_per_token=True))
    assert "".join(part["content"] for part in parts) == "hello world"
    assert all(part["stop"] is False and part["tokens"] and "timings" in part for part in parts)
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "eos")
    assert last["tokens_predicted"] >= len(parts)


async def test_fields_reach_the_engine(server: Server) -> None:
    fields = {"temperature": 0.3, "top_k": 5, "top_p": 0.7, "min_p": 0.2, "seed": 9, "repeat_penalty": 1.2}
    fields |= {"n_predict": 2, "ignore_eos": True, "presence_penalty": 0.1, "frequency_penalty": 0.2}
    answer = await completed(server, **fields, logit_bias=[[65, 2], ["hello", False]], return_tokens=True)
    params = server.engine.added[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.3, 5, 0.7, 0.2, 9)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.1, 0.2)
    assert (params.max_tokens, params.ignore_eos) == (2, True)
    (hello,) = server.engine.tokenizer.encode("hello", add_special_tokens=False)
    assert params.logit_bias == {65: 2.0, hello: -100.0}
    assert (answer["stop_type"], len(answer["tokens"])) == ("limit", 2)
    settings = answer["generation_settings"]
    assert settings["seed"] == 9
    assert {entry["token"]: entry["bias"] for entry in settings["logit_bias"]} == {
        65: 2.0, hello: -100.0, server.engine.eos: None,
    }  # fmt: skip
    await completed(server, seed=-1)
    assert server.engine.added[-1].params.seed is None


async def test_stop_words_are_named(server: Server) -> None:
    answer = await completed(server, stop=["o w"])
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == ("hell", "word", "o w")


async def test_grammars_and_schemas_constrain(server: Server) -> None:
    for fields in ({"grammar": 'root ::= "a" | "b"'}, {"json_schema": {"type": "integer"}}):
        await completed(server, **fields)
        assert server.engine.added[-1].params.grammar is not None
    both = await complete(server, grammar='root ::= "a"', json_schema={})
    assert both.status_code == 400
    assert both.json()["error"]["param"] == "grammar"
    assert (await complete(server, grammar="root ::= (")).json()["error"]["param"] == "grammar"


async def test_probabilities_have_ids(server: Server) -> None:
    answer = await completed(server, n_probs=2)
    entries = answer["completion_probabilities"]
    assert [entry["id"] for entry in entries][:1] == server.engine.tokenizer.encode("hello", add_special_tokens=False)
    for entry in entries:
        assert entry.keys() == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
        assert all(other.keys() == {"id", "token", "bytes", "logprob"} for other in entry["top_logprobs"])
    parts = events(await complete(server, n_probs=1, stream=True))
    assert sum(len(part.get("completion_probabilities", ())) for part in parts) == len(entries)


async def test_prompts_may_be_ids_texts_both_or_several(server: Server) -> None:
    ids = server.engine.tokenizer.encode("hello", add_special_tokens=False)
    await completed(server, prompt=[*ids, " world", 70])
    assert server.engine.prompt() == [*ids, *server.engine.tokenizer.encode(" world", add_special_tokens=False), 70]
    answers = await completed(server, prompt=["a", [66, "c"]])
    assert [answer["index"] for answer in answers] == [0, 1]
    assert [answer["tokens_evaluated"] for answer in answers] == [1, 2]
    answers = await completed(server, prompt=[{"prompt_string": "a"}, {"prompt_string": "a", "multimodal_data": []}])
    assert [answer["prompt"] for answer in answers] == ["a", "a"]
    image = {"prompt_string": "x", "multimodal_data": ["aGk="]}
    for bad in ([], [[]], [1.5], {"prompt": "x"}, image, [image], [-1], [10**6]):
        response = await complete(server, prompt=bad)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"


async def test_no_output_only_computes_the_prompt(server: Server) -> None:
    answer = await completed(server, n_predict=0)
    assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")


async def test_a_prompt_that_must_not_be_cached_shares_no_pages(server: Server) -> None:
    for cache, salted in ((True, False), (False, True)):
        await completed(server, cache_prompt=cache)
        assert bool(server.engine.added[-1].cache_salt) == salted


async def test_only_the_requested_fields_are_returned(server: Server) -> None:
    answer = await completed(server, response_fields=["content", "generation_settings/n_predict", "nothing"])
    assert answer == {"content": "hello world", "generation_settings/n_predict": -1}


@pytest.mark.parametrize("name", sorted(NAMES & REFUSED.keys() - LlamaBody.attributes.keys()))
async def test_a_field_without_effect_is_refused_by_name_unless_it_is_off(server: Server, name: str) -> None:
    for value in REFUSED[name].harmless:
        assert (await complete(server, **{name: value})).status_code == 200
    server.engine.added.clear()
    for value in (7.25, ["x"]):
        response = await complete(server, **{name: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
    assert not server.engine.added


async def test_the_documented_fields_are_known() -> None:
    own = {"n_cmpl", "backend_sampling"}  # `n`, and a field that changes no answer
    unknown = NAMES - LlamaBody.attributes.keys() - own
    assert all(refusal(LlamaBody, name, "a value") for name in unknown)


async def test_content_is_tokenized_in_llama_cpps_format(server: Server) -> None:
    async def tokens(content: Any, **fields: Any) -> Any:
        response = await server.post("/tokenize", {"content": content, **fields})
        assert response.status_code == 200, response.text
        assert response.json().keys() == {"tokens"}
        return response.json()["tokens"]

    encode = server.engine.tokenizer.encode
    assert await tokens("hello world") == encode("hello world", add_special_tokens=False)
    assert await tokens("") == []
    special = encode("<|user|>", add_special_tokens=False)
    assert await tokens("<|user|>") == special
    assert len(await tokens("<|user|>", parse_special=False)) > 1
    assert await tokens(["hello", 65, "x"]) == [*encode("hello", add_special_tokens=False), 65, *await tokens("x")]
    pieces = await tokens("hello é", with_pieces=True)
    assert pieces[0] == {"id": (await tokens("hello"))[0], "piece": "hello"}
    (byte,) = (await tokens([encode("é", add_special_tokens=False)[0]], with_pieces=True))[:1]
    assert byte["piece"] in ("é", list("é".encode()[:1]))
    text = (await server.post("/detokenize", {"tokens": await tokens("hello world")})).json()
    assert text["content"] == "hello world"
    assert (await server.post("/tokenize", {"content": "a", "prompt": "a"})).status_code == 200
    for param, body in {
        "prompt": {"content": "a", "prompt": "b"},
        "with_pieces": {"prompt": "a", "with_pieces": True},
        "parse_special": {"prompt": "a", "parse_special": False},
        "return_token_strs": {"content": "a", "return_token_strs": True},
        "add_special_tokens": {"content": "a", "add_special_tokens": False},
        "chat_template_kwargs": {"content": "a", "chat_template_kwargs": {"x": 1}},
    }.items():
        refused = await server.post("/tokenize", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await server.post("/tokenize", {"content": [10**6]})).json()["error"]["param"] == "content"


async def test_slots_count_open_requests(server: Server) -> None:
    async def used() -> int:
        slots = (await server.http.get("/slots")).json()
        assert len(slots) == server.engine.max_num_seqs
        return sum(slot["is_processing"] for slot in slots)

    assert await used() == 0
    server.engine.script = Script("hello " * 40, delay=0.01)
    async with server.http.stream("POST", "/completion", json={"prompt": "x", "stream": True}) as response:
        await anext(response.aiter_lines())
        assert await used() == 1
    await server.settle(lambda: bool(server.engine.aborted))
    assert await used() == 0


async def test_the_start_token_is_added_on_request() -> None:
    async with serving(adds_bos=True) as server:
        assert (await completed(server))["prompt"] == "<|bos|>hi"
        bos = server.engine.tokenizer.first_token_id
        for add in (False, True):
            tokens = (await server.post("/tokenize", {"content": "hello", "add_special": add})).json()["tokens"]
            assert (tokens[0] == bos) == add


async def test_errors_have_openais_form_and_keys_count(server: Server) -> None:
    error = (await complete(server, prompt=None)).json()["error"]
    assert error["param"] == "prompt"
    assert (await complete(server, model="other")).status_code == 404
    server.engine.script = Script("hello " * 40, delay=0.01)
    async with server.http.stream("POST", "/completion", json={"prompt": "x", "stream": True}) as response:
        await anext(response.aiter_lines())
    await server.settle(lambda: bool(server.engine.aborted))
    async with serving(api_key=["secret"], rate_limit=1) as keyed:
        assert (await complete(keyed)).status_code == 401
        key = {"authorization": "Bearer secret"}
        for status in (200, 429):
            assert (await keyed.post("/completion", {"prompt": "x"}, headers=key)).status_code == status
