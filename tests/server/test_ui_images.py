"""Images in the chat of the page at `/`, in a real browser."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import image_model
import pytest
import pytest_asyncio
from browser import Page, in_browser
from PIL import Image
from stub import Script, Server, serving
from ui_page import SEND_SHOWN, ask, show

from weft.engine.wire.pixels import PixelShelf

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ANSWERED = f"{SEND_SHOWN} && document.querySelector('.assistant .note')?.textContent"
SETUP = """
window.bodies = [];
const before = window.fetch;
window.fetch = (path, options) => (options?.body && bodies.push(JSON.parse(options.body)), before(path, options));
window.transfer = async (width, height, type, name) => {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.fillStyle = "#f00";
  context.fillRect(0, 0, width, height);
  const data = type.startsWith("image/") ? await canvas.convertToBlob({ type }) : "text";
  const transfer = new DataTransfer();
  transfer.items.add(new File([data], name, { type }));
  return transfer;
};
window.give = {
  async paste(...file) {
    const event = { clipboardData: await transfer(...file), bubbles: true, cancelable: true };
    document.querySelector("#question").dispatchEvent(new ClipboardEvent("paste", event));
  },
  async drop(...file) {
    const event = { dataTransfer: await transfer(...file), bubbles: true, cancelable: true };
    document.querySelector("#log").dispatchEvent(new DragEvent("drop", event));
  },
  async pick(...file) {
    const field = document.querySelector("#files");
    field.files = (await transfer(...file)).files;
    field.dispatchEvent(new Event("change"));
  },
};
0
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _seeing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    shelf = PixelShelf.make()
    model = str(image_model.write(tmp_path_factory.mktemp("images") / "model"))
    tokenizer = image_model.tokenizer()
    try:
        async with serving(tokenizer=tokenizer, pixels=str(shelf.directory), model=model) as server:
            yield server
    finally:
        shelf.close()


@pytest.fixture
def seeing(_seeing: Server) -> Server:
    _seeing.engine.script = Script()
    _seeing.engine.added.clear()
    return _seeing


async def give(page: Page, way: str, width: int, height: int, kind: str = "image/png", name: str = "a.png") -> None:
    await page.run(f"give.{way}({width}, {height}, {json.dumps(kind)}, {json.dumps(name)})")


async def opened(page: Page, server: Server) -> None:
    await show(page, server)
    await page.run(SETUP)


def thumbnails(n: int) -> str:
    return f"document.querySelectorAll('#images img').length === {n}"


def image_of(part: dict[str, Any]) -> Image.Image:
    assert part["type"] == "image_url"
    return Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))


@in_browser
@pytest.mark.parametrize("way", ["paste", "drop", "pick"])
async def test_an_image_is_shown_sent_and_stored(seeing: Server, page: Page, way: str) -> None:
    await opened(page, seeing)
    assert await page.run("!document.querySelector('#attach').hidden")
    await give(page, way, 40, 20)
    await page.until(thumbnails(1))
    await ask(page, "What is this?")
    await page.until(ANSWERED)
    assert await page.run(thumbnails(0))
    text, part = (await page.run("bodies[0].messages"))[0]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    assert (image_of(part).size, image_of(part).convert("RGB").getpixel((5, 5))) == ((40, 20), (255, 0, 0))
    assert len(seeing.engine.added[0].images) == 1
    visible = "[...document.querySelectorAll('.user img')].map(i => [i.naturalWidth, i.naturalHeight])"
    assert await page.run(visible) == [[40, 20]]
    await opened(page, seeing)
    await page.until("document.querySelector('.user img')?.complete")
    assert await page.run(visible) == [[40, 20]]
    await ask(page, "And now?")
    await page.until("document.querySelectorAll('.assistant .note')[1]?.textContent")
    messages = await page.run("bodies[0].messages")
    assert messages[0]["content"] == [text, part]
    assert messages[2]["content"] == "And now?"
    assert page.errors == []


@in_browser
@pytest.mark.nightly
async def test_a_large_image_is_scaled_down(seeing: Server, page: Page) -> None:
    await opened(page, seeing)
    await give(page, "paste", 4096, 1024, "image/jpeg", "a.jpg")
    await page.until(thumbnails(1))
    await ask(page, "")
    await page.until(ANSWERED)
    (part,) = (await page.run("bodies[0].messages"))[0]["content"]
    assert (image_of(part).format, image_of(part).size) == ("JPEG", (2048, 512))


@in_browser
@pytest.mark.nightly
async def test_images_can_be_removed_and_return_after_an_error(seeing: Server, page: Page) -> None:
    await opened(page, seeing)
    await give(page, "paste", 10, 10)
    await give(page, "paste", 20, 10)
    await page.until(thumbnails(2))
    await page.run("document.querySelector('#images button').click()")
    assert await page.run("document.querySelector('#images img').naturalWidth") == 20
    await page.run("document.querySelector('#limit').value = 100000")
    await ask(page, "too much")
    await page.until("document.querySelector('[role=alert]') !== null")
    assert await page.run(thumbnails(1))
    assert await page.run("document.querySelector('#question').value") == "too much"
    assert seeing.engine.added == []


@in_browser
async def test_other_files_are_refused_in_one_line(seeing: Server, page: Page) -> None:
    await opened(page, seeing)
    await give(page, "drop", 1, 1, "text/plain", "notes.txt")
    await page.until("document.querySelector('#invalid').textContent")
    assert (await page.text("#invalid")).startswith("notes.txt is not a PNG")
    await page.run("document.querySelector('#mode').value = 'completion'")
    await give(page, "paste", 10, 10)
    await page.until("document.querySelector('#invalid').textContent.startsWith('Completions take text only')")
    assert await page.run(thumbnails(0))


@in_browser
async def test_a_text_only_model_shows_no_button_and_says_why(server: Server, page: Page) -> None:
    await opened(page, server)
    assert await page.run("document.querySelector('#attach').hidden")
    await give(page, "paste", 10, 10)
    await page.until("document.querySelector('#invalid').textContent")
    assert await page.text("#invalid") == "This model takes text only, so images cannot be sent."
    assert await page.run(thumbnails(0))


@in_browser
@pytest.mark.nightly
async def test_a_stored_chat_keeps_its_newest_images_within_a_bound(seeing: Server, page: Page) -> None:
    await opened(page, seeing)
    await page.run(
        # Random pixels do not compress: about 3 million characters.
        "(async () => {const canvas = new OffscreenCanvas(1500, 1500); const context = canvas.getContext('2d');"
        "const data = context.createImageData(1500, 1500);"
        "for (let i = 0; i < data.data.length; i++) data.data[i] = i % 4 === 3 ? 255 : Math.random() * 256;"
        "context.putImageData(data, 0, 0); const made = await canvas.convertToBlob({type: 'image/jpeg', quality: 1});"
        "const transfer = new DataTransfer(); transfer.items.add(new File([made], 'a.jpg', {type: 'image/jpeg'}));"
        "const field = document.querySelector('#files'); field.files = transfer.files;"
        "field.dispatchEvent(new Event('change'))})()"
    )
    await page.until(thumbnails(1))
    await ask(page, "large")
    await page.until(ANSWERED)
    await give(page, "paste", 40, 20)
    await page.until(thumbnails(1))
    await ask(page, "small")
    await page.until("document.querySelectorAll('.assistant .note')[1]?.textContent")
    assert await page.run("document.querySelectorAll('.user img').length") == 2
    assert max(await page.run("Object.values(localStorage).map(value => value.length)")) < 2**21 + 10_000
    await opened(page, seeing)
    await page.until("document.querySelector('.user img')?.complete")
    assert await page.run("[...document.querySelectorAll('.user img')].map(i => i.naturalWidth)") == [40]
    assert "1 image was too large to store." in await page.text(".user")
