"""The demo vision model reads generated pictures through the HTTP server: a wrong image path is a wrong answer."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from langchain_openai import ChatOpenAI
from live import Daemon, running
from test_batches import until
from test_conformance_npm import MODULES

from weft.tools.vision.evaluate import MODEL, parts, questions, wrong_answers
from weft.tools.vision.pictures import Question, png, question

GREEDY = {"temperature": 0}
pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    options = ("--files-dir", str(folder / "files"), "--api-workers", "2", "--admin-api-key", "secret")
    with running(folder, "--model", str(MODEL), "--served-model-name", "demo", *options) as daemon:
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


@pytest.mark.skipif(not MODULES.is_dir() or shutil.which("node") is None, reason="make clients installs them")
@pytest.mark.parametrize("one", asked(), ids=["one", "two"])
def test_npm_clients_send_pictures(daemon: Daemon, one: Question, tmp_path: Path) -> None:
    urls = [part["image_url"]["url"] for part in parts(one, 4) if part["type"] == "image_url"]
    (tmp_path / "asked.json").write_text(json.dumps({"text": one.text, "pictures": urls}))
    script = tmp_path / "pictures.mjs"  # next to its modules, where node looks for them
    script.write_text((Path(__file__).parent / "npm" / script.name).read_text())
    (tmp_path / "node_modules").symlink_to(MODULES)
    command = ["node", str(script), daemon.url, str(tmp_path / "asked.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads(done.stdout)
    assert len(answers) == 7
    assert set(answers.values()) == {one.answer}, answers


def test_an_uploaded_picture_is_read_by_every_api_process(daemon: Daemon) -> None:
    one = asked()[0]
    api = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none")
    file = api.files.create(file=("a.png", png(one.pictures[0].pixels, 4)), purpose="vision")
    image = {"type": "input_image", "file_id": file.id}
    content = [{"type": "input_text", "text": "1"}, image, {"type": "input_text", "text": one.text}]
    for _ in range(4):
        with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as other:  # a connection of its own
            given: Any = [{"role": "user", "content": content}]
            answer = other.responses.create(model="demo", input=given, temperature=0, max_output_tokens=12)
        assert answer.output_text == one.answer


def test_choices_and_batches_read_pictures(daemon: Daemon) -> None:
    one = asked()[1]
    body = {"model": "demo", "messages": [{"role": "user", "content": parts(one, 3)}], "max_tokens": 12, **GREEDY}
    api = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none")
    made = api.chat.completions.create(**body, n=3)  # type: ignore[call-overload]
    assert [choice.message.content for choice in made.choices] == [one.answer] * 3
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = api.files.create(file=("batch.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = api.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    output = until(api, batch.id, "completed").output_file_id
    assert output is not None
    (answer,) = (json.loads(line) for line in api.files.content(output).text.splitlines())
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == one.answer


def test_pictures_are_read_after_sleep(daemon: Daemon) -> None:
    few = questions(8, seed=3)
    before = wrong_answers(daemon.url, few)
    for path in ("/sleep", "/wake_up"):
        assert httpx.post(f"{daemon.url}{path}", headers={"Authorization": "Bearer secret"}, timeout=240).is_success
    assert wrong_answers(daemon.url, few) == before


def test_the_model_is_small() -> None:
    assert sum(file.stat().st_size for file in Path(MODEL).iterdir()) < 3 << 20
