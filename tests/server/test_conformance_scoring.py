"""lm-eval and its requests: batches of token ids with echo and logprobs. The oracle is transformers with the same
weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import lm_eval
import numpy as np
import pytest
import torch
from live import Daemon, running
from lm_eval.api.model import TemplateLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoModelForCausalLM, AutoTokenizer

import weft.engine

pytestmark = pytest.mark.slow

MODEL = Path(weft.engine.__file__).parent / "demo/model"
TASKS = Path(__file__).with_name("lm_eval_tasks")
LENGTHS = (1, 2, 5, 64, 65, 300, 1500)
WINDOW = 256
"""tokens that lm-eval sends at once: the longest passage needs several"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon"), "--dtype", "float32", "--max-num-batched-tokens", "256") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(6, 2048, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in prompts]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_log_probabilities_are_exact(
    daemon: Daemon, prompts: list[list[int]], expected: list[torch.Tensor], max_tokens: int
) -> None:
    body: dict[str, Any] = {
        "model": "demo", "prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": max_tokens,
        "temperature": 0, "seed": 1234,
    }  # fmt: skip
    answer = httpx.post(daemon.url + "/v1/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    for prompt, oracle, choice in zip(prompts, expected, choices, strict=True):
        scores = choice["logprobs"]
        assert len(scores["token_logprobs"]) == len(prompt) + max_tokens
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        rows = torch.arange(len(prompt) - 1)
        own = oracle[rows, torch.tensor(prompt[1:], dtype=torch.int64)]
        got = torch.tensor(scores["token_logprobs"][1 : len(prompt)])
        assert torch.allclose(got, own, atol=2e-4), (got - own).abs().max()
        for i, top in enumerate(scores["top_logprobs"][1 : len(prompt)]):
            assert max(top.values()) == pytest.approx(float(oracle[i].max()), abs=2e-4)
            assert scores["token_logprobs"][i + 1] in top.values(), "the token itself is among the best, identically"


def test_greedy_continuations_are_distinguished_from_others(daemon: Daemon, prompts: list[list[int]]) -> None:
    """lm-eval's `is_greedy`: every token of a continuation is the best at its position."""
    prompt = prompts[2]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True,
                            "ignore_eos": True}  # fmt: skip
    ids = httpx.post(daemon.url + "/v1/completions", json=body, timeout=240).json()["choices"][0]["token_ids"]
    scoring = {"prompt": [*prompt, *ids], "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    scores = httpx.post(daemon.url + "/v1/completions", json=scoring, timeout=240).json()["choices"][0]["logprobs"]
    at = slice(len(prompt), len(prompt) + len(ids))
    for value, top in zip(scores["token_logprobs"][at], scores["top_logprobs"][at], strict=True):
        assert value == max(top.values())


class InProcess(TemplateLM):
    """lm-eval's view of the same weights without a server: transformers, one sequence at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL)

    @property
    def eot_token_id(self) -> int:
        return int(self._tokenizer.eos_token_id)

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        ids: list[int] = self._tokenizer(string, add_special_tokens=False).input_ids
        return ids

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        return [self._score(context, continuation) for _, context, continuation in requests]

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        with torch.no_grad():
            logits = self._model(torch.tensor([context + continuation[:-1]])).logits[0, len(context) - 1 :]
        target = torch.tensor(continuation)
        scores = logits.log_softmax(-1)[torch.arange(len(target)), target]
        return float(scores.sum()), bool((logits.argmax(-1) == target).all())

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        sums = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.eot_token_id,
                max_seq_len=WINDOW - 2,  # the part of the client's `max_length` that remains
                context_len=1,
            )
            sums.append(sum(self._score(*make_disjoint_window(window))[0] for window in windows))
        return sums

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        texts = []
        for prompt, options in (request.args for request in requests):
            ids = torch.tensor([self.tok_encode(prompt)])
            out = self._model.generate(ids, max_new_tokens=options["max_gen_toks"], do_sample=False)
            text = self._tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            for end in options["until"]:
                text = text.partition(end)[0]
            texts.append(text)
        return texts


def evaluate(model: TemplateLM) -> Any:
    tasks = TaskManager(include_path=TASKS, include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, tasks=sorted(path.stem for path in TASKS.glob("*.yaml")), task_manager=tasks, bootstrap_iters=0,
        random_seed=None, numpy_random_seed=None, torch_random_seed=None, fewshot_random_seed=None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def judged_in_process() -> Any:
    return evaluate(InProcess())


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "num_concurrent": 2},  # it finds the server's own tokenizer
        {"tokenizer_backend": "huggingface", "tokenizer": str(MODEL), "custom_prefix_token_id": 1},
    ],
    ids=["remote tokenizer, batches", "local tokenizer, one by one"],
)
def test_lm_eval_scores_the_server_like_the_model(
    daemon: Daemon, judged_in_process: Any, options: dict[str, Any]
) -> None:
    client = LocalCompletionsAPI(model="demo", base_url=daemon.url + "/v1/completions", max_length=WINDOW, **options)
    judged = evaluate(client)
    assert set(judged["samples"]) == {"answers", "choices", "passages"}
    for task, samples in judged["samples"].items():
        for mine, other in zip(samples, judged_in_process["samples"][task], strict=True):
            assert mine["doc"] == other["doc"]
            for response, expected in zip(mine["filtered_resps"], other["filtered_resps"], strict=True):
                close = expected if isinstance(expected, str) else pytest.approx(expected, rel=1e-4, abs=2e-3)
                assert response == close
        for metric, value in judged_in_process["results"][task].items():
            close = pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
            assert judged["results"][task][metric] == close
    # Tasks that everything fails or passes would show nothing.
    assert 0.3 < judged["results"]["choices"]["acc,none"] < 1
    assert 0.3 < judged["results"]["answers"]["exact_match,none"] < 1
