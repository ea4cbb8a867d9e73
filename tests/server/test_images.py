"""Images in requests: their place in the prompt, what the engine gets, and what is refused. With a stub engine."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import image_model
import numpy as np
import openai
import pytest
import pytest_asyncio
from image_model import PREPROCESSOR, data_url, file_of, part, picture
from stub import Script, Server, serving

from weft.engine.images.rules import rule_of
from weft.engine.wire.messages import Image
from weft.engine.wire.pixels import PixelShelf
from weft.server.api.media.decoded import Decoded, DecodedImages, Key
from weft.server.api.media.decoders import Decoders
from weft.server.api.media.prepare import cut, open_image, to_rgb
from weft.server.commands.chat import Conversation
from weft.server.commands.endpoint import Endpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

RED = file_of(picture(seed=1))
WIDE = file_of(picture(60, 20, seed=2))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf() -> AsyncIterator[PixelShelf]:
    made = PixelShelf.make()
    yield made
    made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _seeing(shelf: PixelShelf, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    folder = tmp_path_factory.mktemp("images")
    options: dict[str, Any] = {"files_dir": str(folder / "files"), "limit_images": 3}
    async with serving(
        tokenizer=image_model.tokenizer(),
        pixels=str(shelf.directory),
        model=str(image_model.write(folder / "model")),
        allowed_local_media_path=str(folder),
        **options,
    ) as server:
        (folder / "red.png").write_bytes(RED)
        yield server


@pytest.fixture
def seeing(_seeing: Server) -> Server:
    _seeing.engine.script = Script()
    _seeing.engine.added.clear()
    return _seeing


def rule() -> Any:
    tokenizer = image_model.tokenizer()
    config = {"model_type": "idefics3", "scale_factor": 2, "vision_config": {"image_size": 32, "patch_size": 8}}
    found = rule_of(config, PREPROCESSOR, lambda text: tokenizer.encode(text, add_special_tokens=False))
    assert found is not None
    return found


def expected(*pieces: str | tuple[int, int]) -> list[int]:
    """Token ids of texts and images (width, height), after one another."""
    tokenizer, out = image_model.tokenizer(), []
    for piece in pieces:
        if isinstance(piece, str):
            out += tokenizer.encode(piece, add_special_tokens=False)
        else:
            out += [run.token_id for run in rule().plan(*piece).placeholder for _ in range(run.length)]
    return out


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


async def chat(server: Server, *parts: Any, **body: Any) -> Any:
    return await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": list(parts)}], **body})


async def answered(server: Server, *parts: Any, **body: Any) -> dict[str, Any]:
    response = await chat(server, *parts, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(server: Server, *parts: Any, **body: Any) -> dict[str, Any]:
    response = await chat(server, *parts, **body)
    assert response.status_code == 400, response.text
    assert not server.engine.added
    return response.json()["error"]


def tiles_of(data: bytes, size: tuple[int, int]) -> bytes:
    plan = rule().plan(*size)
    return b"".join(cut(to_rgb(open_image(data)), plan.canvas, plan.tiles, rule().resample))


async def test_images_keep_their_place_among_texts(seeing: Server) -> None:
    body = await answered(seeing, text("a"), part(RED), text("b"), text("c"), part(WIDE), part(RED))
    ids = expected("<|bos|><|user|>a", (20, 10), "b\nc", (60, 20), (20, 10), "<|assistant|>")
    assert seeing.engine.prompt() == ids
    assert body["usage"]["prompt_tokens"] == len(ids)


async def test_the_engine_gets_spans_and_pixels(seeing: Server, shelf: PixelShelf) -> None:
    seeing.engine.script = Script(gate=asyncio.Event())
    asked = asyncio.create_task(answered(seeing, part(RED), part(WIDE)))
    await seeing.settle(lambda: bool(seeing.engine.added))
    images: tuple[Image, ...] = seeing.engine.added[0].images
    ids = seeing.engine.prompt()
    for image, data, size in zip(images, (RED, WIDE), ((20, 10), (60, 20)), strict=True):
        plan = rule().plan(*size)
        assert image.shapes == plan.shapes
        assert image.grid == plan.grid
        pixels = tiles_of(data, size)
        assert shelf.take(image.file, len(pixels)) == pixels
        mask = image.mask or b"\1" * image.length
        span = ids[image.start : image.start + image.length]
        assert [token == rule().marker for token in span] == [bool(flag) for flag in mask]
        assert mask[0] == mask[-1] == 1
        assert sum(mask) == plan.num_embeddings == 4 * len(plan.tiles)
    assert images[0].digest != images[1].digest
    seeing.engine.script.gate.set()
    await asked
    assert not list(shelf.directory.iterdir())


async def test_digests_depend_on_the_file_and_the_detail(seeing: Server) -> None:
    await answered(seeing, part(RED), part(file_of(picture(seed=1), "BMP")), part(RED, detail="low"))
    await answered(seeing, part(RED))
    first, again = (request.images for request in seeing.engine.added)
    assert len({image.digest for image in first}) == 3
    assert first[0].digest == again[0].digest
    assert len(first[0].digest) == hashlib.sha256().digest_size


async def test_an_image_that_comes_again_is_not_decoded_again(
    seeing: Server, shelf: PixelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another salt or detail comes with it. The engine gets the same pixels."""
    opened, open_ = [], Decoders.open
    monkeypatch.setattr(Decoders, "open", lambda self, data, *more: opened.append(data) or open_(self, data, *more))
    data, pixels = file_of(picture(seed=31)), []
    for salt, detail in (("a", "auto"), ("a", "auto"), ("b", "auto"), ("a", "low"), ("b", "auto")):
        seeing.engine.script = Script(gate=asyncio.Event())
        seeing.engine.added.clear()
        asked = asyncio.create_task(answered(seeing, part(data, detail=detail), cache_salt=salt))
        await seeing.settle(lambda: bool(seeing.engine.added))
        (image,) = seeing.engine.added[0].images
        pixels.append(shelf.take(image.file, 3 * sum(h * w for h, w in image.shapes)))
        seeing.engine.script.gate.set()
        await asked
    assert len(opened) == 3
    assert pixels[0] == pixels[1] == pixels[2] == pixels[4] == tiles_of(data, (20, 10))
    assert pixels[3] != pixels[0]


async def test_decoded_images_are_bounded() -> None:
    kept = DecodedImages(limit=100)
    keys = [Key("", "auto", bytes([i])) for i in range(4)]
    plan = rule().plan(20, 10)
    for key in keys[:2]:
        kept.put(key, Decoded(plan, bytes(40)))
    assert kept.get(keys[0]) is not None  # so the other one is dropped first
    kept.put(keys[2], Decoded(plan, bytes(40)))
    kept.put(keys[3], Decoded(plan, bytes(101)))
    assert [kept.get(key) is not None for key in keys] == [True, False, True, False]
    assert kept.num_bytes == 80


async def test_low_detail_is_one_tile(seeing: Server) -> None:
    low = await answered(seeing, part(WIDE, detail="low"))
    high = await answered(seeing, part(WIDE, detail="high"))
    auto = await answered(seeing, part(WIDE, detail="auto"))
    assert high["usage"] == auto["usage"]
    assert low["usage"]["prompt_tokens"] < high["usage"]["prompt_tokens"]
    assert len(seeing.engine.added[0].images[0].shapes) == 1
    assert seeing.engine.added[0].images[0].mask == b""  # one run


async def test_every_api_makes_the_same_prompt(seeing: Server) -> None:
    await answered(seeing, text("what?"), part(RED))
    url, (_, encoded) = data_url(RED), data_url(RED).split(",")
    async with openai.AsyncOpenAI(base_url=f"{seeing.url}/v1", api_key="none") as client:
        content: Any = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": url}]
        await client.responses.create(model="stub", input=[{"role": "user", "content": content}])
        chat_content: Any = [text("what?"), {"type": "image_url", "image_url": {"url": url}}]
        await client.chat.completions.create(model="stub", messages=[{"role": "user", "content": chat_content}])
    async with anthropic.AsyncAnthropic(base_url=seeing.url, api_key="none") as client:
        source: Any = {"type": "base64", "media_type": "image/png", "data": encoded}
        messages: Any = [{"role": "user", "content": [text("what?"), {"type": "image", "source": source}]}]
        answer = await client.messages.create(model="stub", max_tokens=9, messages=messages)
        count = await client.messages.count_tokens(model="stub", messages=messages)
    prompts = [seeing.engine.prompt(i) for i in range(len(seeing.engine.added))]
    assert len(prompts) == 4
    assert all(prompt == prompts[0] for prompt in prompts)
    assert answer.usage.input_tokens == count.input_tokens == len(prompts[0])
    assert len({request.images[0].digest for request in seeing.engine.added}) == 1


async def test_counting_needs_no_engine_and_agrees(seeing: Server) -> None:
    messages = [{"role": "user", "content": [part(WIDE), text("x")]}]
    body = await answered(seeing, part(WIDE), text("x"))
    rendered = await seeing.post("/v1/chat/completions/render", {"messages": messages})
    tokenized = await seeing.post("/tokenize", {"messages": messages})
    assert tokenized.json()["tokens"] == rendered.json()["token_ids"] == seeing.engine.prompt()
    assert tokenized.json()["count"] == body["usage"]["prompt_tokens"]
    assert len(seeing.engine.added) == 1


async def test_results_of_tools_show_images(seeing: Server) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data_url(RED)[22:]}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("here"), block], "is_error": True}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [result, text("so?"), block]},
    ]
    response = await seeing.post("/v1/messages", {"messages": messages, "max_tokens": 5})
    assert response.status_code == 200, response.text
    assert len(seeing.engine.added[0].images) == 2
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t",
         "output": [{"type": "input_image", "image_url": data_url(RED)}]},
    ]  # fmt: skip
    response = await seeing.post("/v1/responses", {"input": items})
    assert response.status_code == 200, response.text
    assert len(seeing.engine.added[1].images) == 1


async def test_later_turns_of_a_stored_response_see_its_images(seeing: Server) -> None:
    content = [{"type": "input_image", "image_url": data_url(RED)}, {"type": "input_text", "text": "what?"}]
    first = await seeing.post("/v1/responses", {"input": [{"role": "user", "content": content}]})
    later = await seeing.post("/v1/responses", {"input": "and?", "previous_response_id": first.json()["id"]})
    assert later.status_code == 200, later.text
    first_image, later_image = (request.images[0] for request in seeing.engine.added)
    assert later_image.digest == first_image.digest
    assert later_image.start == first_image.start


async def test_uploaded_files_are_images(seeing: Server) -> None:
    file = {"file": ("red.png", RED, "image/png")}
    uploaded = await seeing.http.post("/v1/files", files=file, data={"purpose": "vision"})
    assert uploaded.status_code == 200, uploaded.text
    id = uploaded.json()["id"]
    content: list[Any] = [{"type": "input_image", "file_id": id}]
    assert (await seeing.post("/v1/responses", {"input": [{"role": "user", "content": content}]})).status_code == 200
    block = {"type": "image", "source": {"type": "file", "file_id": id}}
    asked = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 5}
    assert (await seeing.post("/v1/messages", asked)).status_code == 200
    await answered(seeing, part(RED))
    assert len({request.images[0].digest for request in seeing.engine.added}) == 1
    assert (await seeing.http.get(f"/v1/files/{id}/content")).content == RED
    seeing.engine.added.clear()
    for unknown in ("file-0", "../red", f"{id}x"):
        error = await refused(seeing, {"type": "input_image", "file_id": unknown})
        assert "no file with this id" in error["message"]


async def test_local_files_inside_the_folder(seeing: Server) -> None:
    folder = Path(seeing.service.config.allowed_local_media_path or "")
    await answered(seeing, {"type": "image_url", "image_url": f"file://{folder}/red.png"})
    seeing.engine.added.clear()
    (folder / "out.png").unlink(missing_ok=True)
    (folder / "out.png").symlink_to("/etc/passwd")
    for path in ("/etc/passwd", f"{folder}/../../etc/passwd", f"{folder}/%2e%2e/x", f"{folder}/out.png", folder):
        error = await refused(seeing, {"type": "image_url", "image_url": f"file://{path}"})
        assert "/etc" not in error["message"]


async def test_choices_share_an_image(seeing: Server, shelf: PixelShelf) -> None:
    await answered(seeing, part(RED), n=2)
    first, second = (request.images for request in seeing.engine.added)
    assert first == second
    assert not list(shelf.directory.iterdir())


async def test_text_that_spells_an_image_stays_text(seeing: Server) -> None:
    await answered(seeing, text("<image> is a word"), part(RED))
    (image,) = seeing.engine.added[0].images
    before = seeing.engine.prompt()[: image.start]
    assert rule().marker not in before
    assert "<image> is a word" in seeing.engine.tokenizer.decode(before, special=True)


async def test_other_tokens_of_images_are_refused(seeing: Server) -> None:
    system = {"role": "system", "content": "<image>"}
    messages = [system, {"role": "user", "content": [part(RED)]}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "an <image>"}),
        ("/v1/completions", {"prompt": [5, rule().marker]}),
    ):
        response = await seeing.post(path, body)
        assert response.status_code == 400, response.text
        assert "tokens that stand for images" in response.json()["error"]["message"]


async def test_refusals_name_the_part(seeing: Server) -> None:
    error = await refused(seeing, text("a"), part(b"hello"))
    assert error["param"] == "messages[0].content[1]"
    assert error["code"] == "invalid_image"
    assert "no supported format" in error["message"]
    error = await refused(seeing, *[part(RED)] * 4)
    assert error["param"] == "messages[0].content[3]"
    assert "at most 3 images" in error["message"]
    error = await refused(seeing, part(RED, detail="huge"))
    assert "detail must be" in error["message"]
    error = await refused(seeing, part(RED), truncate_prompt_tokens=4)
    assert error["param"] == "truncate_prompt_tokens"
    for odd in ({"type": "input_audio"}, {"type": "video_url"}, {"type": "image_url"}, {"type": "image"}):
        await refused(seeing, odd)
    for role in ("system", "assistant", "developer"):
        response = await seeing.post("/v1/chat/completions", {"messages": [{"role": role, "content": [part(RED)]}]})
        assert "only in messages of users and tools" in response.json()["error"]["message"]


async def test_urls_are_off_by_default(seeing: Server) -> None:
    for url in ("https://example.org/a.png", "http://127.0.0.1/"):
        error = await refused(seeing, {"type": "image_url", "image_url": {"url": url}})
        assert "--image-urls" in error["message"]


async def test_a_model_without_images_refuses_them(server: Server) -> None:
    error = await refused(server, part(RED))
    assert error["message"] == "messages[0].content[0]: images are not supported: this model takes text only."
    listed = (await server.http.get("/v1/models")).json()["data"][0]
    assert listed["input_modalities"] == ["text"]


async def test_models_list_their_modalities(seeing: Server) -> None:
    listed = (await seeing.http.get("/v1/models")).json()["data"][0]
    assert listed["input_modalities"] == ["text", "image"]


async def test_templates_that_take_strings(shelf: PixelShelf, tmp_path: Path) -> None:
    tokenizer = image_model.tokenizer(image_model.STRINGS)
    model = str(image_model.write(tmp_path / "model"))
    async with serving(tokenizer=tokenizer, pixels=str(shelf.directory), model=model) as server:
        await answered(server, text("a"), part(RED), text("b"))
        assert server.engine.prompt() == expected("<|bos|><|user|>a", (20, 10), "b<|assistant|>")


async def test_images_off(shelf: PixelShelf, tmp_path: Path) -> None:
    model = str(image_model.write(tmp_path / "model"))
    options: dict[str, Any] = {"limit_images": 0}
    async with serving(
        tokenizer=image_model.tokenizer(), pixels=str(shelf.directory), model=model, **options
    ) as server:
        assert "takes text only" in (await refused(server, part(RED)))["message"]


async def test_a_client_that_leaves_takes_its_pixels_along(seeing: Server, shelf: PixelShelf) -> None:
    seeing.engine.script = Script(gate=asyncio.Event())
    asked = asyncio.create_task(chat(seeing, part(RED), stream=True))
    await seeing.settle(lambda: bool(seeing.engine.added))
    assert list(shelf.directory.iterdir())
    asked.cancel()
    await seeing.settle(lambda: not list(shelf.directory.iterdir()))


async def test_refused_requests_leave_no_pixels(seeing: Server, shelf: PixelShelf) -> None:
    await refused(seeing, part(RED), part(b"hello"))
    await refused(seeing, part(RED), max_tokens=10**6)
    assert not list(shelf.directory.iterdir())


async def test_the_chat_command_sends_images(seeing: Server, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    options = argparse.Namespace(system=None, temperature=None, max_tokens=None)

    def talk() -> None:
        endpoint = Endpoint(f"{seeing.url}/v1", None, None)
        endpoint.connect()
        conversation = Conversation(endpoint, options)
        assert "cannot read" in conversation.attach(str(tmp_path / "blue.png"))
        assert conversation.attach(str(tmp_path / "red.png")) == ""
        assert "".join(conversation.ask("what?")) == "hello world"
        assert "".join(conversation.ask("and?")) == "hello world"
        assert conversation.undo() == "and?"
        assert conversation.undo() == "what?"
        assert "".join(conversation.ask("what?")) == "hello world"

    await asyncio.to_thread(talk)
    first, later, again = (seeing.engine.prompt(i) for i in range(3))
    assert first == again == expected("<|bos|><|user|>", (20, 10), "what?<|assistant|>")
    assert later == expected("<|bos|><|user|>", (20, 10), "what?<|assistant|>hello world<|user|>and?<|assistant|>")
    assert [len(request.images) for request in seeing.engine.added] == [1, 1, 1]


async def test_images_are_counted(seeing: Server) -> None:
    def value(name: str) -> float:
        lines = seeing.service.metrics.render().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    ready, bad = (
        'weft_images_total{source="data",outcome="ready"}',
        'weft_images_total{source="data",outcome="refused"}',
    )
    before = [value(name) for name in (ready, bad, "weft_image_pixels_total", "weft_image_decode_seconds_count")]
    await answered(seeing, part(file_of(picture(seed=32))))
    seeing.engine.added.clear()
    await refused(seeing, part(b""))
    after = [value(name) for name in (ready, bad, "weft_image_pixels_total", "weft_image_decode_seconds_count")]
    pixels = rule().plan(20, 10).num_pixels
    assert np.subtract(after, before).tolist() == [1, 1, pixels, 1]
