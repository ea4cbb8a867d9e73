"""The demo vision model reads generated pictures through the HTTP server: a wrong image path is a wrong answer."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from langchain_openai import ChatOpenAI
from live import Daemon, running

from weft.tools.vision.evaluate import MODEL, parts, questions, wrong_answers
from weft.tools.vision.pictures import Question, png, question

GREEDY = {"temperature": 0}
pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon"), "--model", str(MODEL), "--served-model-name", "demo") as daemon:
        yield daemon


def test_pictures_are_read(daemon: Daemon) -> None:
    wrong = wrong_answers(daemon.url, questions(200))
    assert len(wrong) <= 10, wrong


def test_the_questions_need_their_own_pictures(daemon: Daemon) -> None:
    """A control: with the pictures of the next question, most answers are wrong."""
    asked = questions(40, seed=1)
    pictures = [one.pictures for one, _ in asked]
    swapped = [
        (one._replace(pictures=other), factor) for (one, factor), other in zip(asked, pictures[1:], strict=False)
    ]
    assert len(wrong_answers(daemon.url, swapped)) > len(swapped) // 2


def asked() -> list[Question]:
    """Questions about one picture, and about two."""
    rng = np.random.default_rng(5)
    made = [question(rng) for _ in range(20)]
    return [next(one for one in made if len(one.pictures) == number) for number in (1, 2)]


def in_messages(one: Question) -> list[dict[str, Any]]:
    """Return the content for the messages API."""
    content: list[dict[str, Any]] = []
    for number, picture in enumerate(one.pictures, 1):
        data = base64.b64encode(png(picture.pixels, 4)).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        content += [{"type": "text", "text": str(number)}, {"type": "image", "source": source}]
    return [*content, {"type": "text", "text": one.text}]


def in_responses(one: Question) -> list[dict[str, Any]]:
    return [
        {"type": "input_image", "detail": "auto", "image_url": part["image_url"]["url"]}
        if part["type"] == "image_url"
        else {"type": "input_text", "text": part["text"]}
        for part in parts(one, 4)
    ]


@pytest.mark.parametrize("one", asked(), ids=["one", "two"])
def test_openai_and_anthropic_send_pictures(daemon: Daemon, one: Question) -> None:
    api = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none")
    chat: Any = [{"role": "user", "content": parts(one, 4)}]
    whole = api.chat.completions.create(model="demo", messages=chat, temperature=0, max_tokens=12)
    stream = api.chat.completions.create(model="demo", messages=chat, temperature=0, max_tokens=12, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    given: Any = [{"role": "user", "content": in_responses(one)}]
    response = api.responses.create(model="demo", input=given, temperature=0, max_output_tokens=12)
    other = anthropic.Anthropic(base_url=daemon.url, api_key="none")
    messages: Any = [{"role": "user", "content": in_messages(one)}]
    message: Any = other.messages.create(model="demo", messages=messages, max_tokens=12, extra_body=GREEDY)
    answers = [whole.choices[0].message.content, streamed, response.output_text, message.content[0].text]
    assert answers == [one.answer] * 4


@pytest.mark.parametrize("one", asked(), ids=["one", "two"])
def test_langchain_sends_pictures(daemon: Daemon, one: Question) -> None:
    options: Any = {"model": "demo", "base_url": f"{daemon.url}/v1", "api_key": "none", "temperature": 0}
    for responses in (False, True):
        model = ChatOpenAI(**options, max_tokens=12, use_responses_api=responses)
        assert model.invoke([{"role": "user", "content": parts(one, 4)}]).text == one.answer


def test_the_model_is_small() -> None:
    assert sum(file.stat().st_size for file in Path(MODEL).iterdir()) < 3 << 20
