"""The page at `/`: its headers, the displayed state of the daemon, its fit and its readability."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from browser import Page, in_browser
from page_policy import policy_of
from stub import Script, Server, serving
from ui_page import FOLDER, SEND_SHOWN, ask, show

from weft.server.api import ui
from weft.server.observe.shared_state import SleepState

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def test_it_is_one_document_that_loads_nothing_else(server: Server) -> None:
    response = await server.http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"<(script|img|iframe|object|embed)[^>]*\ssrc=", response.text)
    links = re.findall(r"""(?:href|src|action)=["']([^"']*)|url\(([^)]*)\)|@import""", response.text)
    assert [link for link, _ in links if not link.startswith(("#", "data:"))] == ["metrics", "metrics", "docs"]
    assert "https://" not in response.text


async def test_the_policy_allows_only_the_pages_own_script_and_style(server: Server) -> None:
    response = await server.http.get("/")
    policy = policy_of(response)
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert not re.search(r"\s(style|on\w+)=", response.text.partition("<script")[0])


async def test_every_source_file_is_in_the_page() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {"index.html", "style.css", *ui.SCRIPTS}


async def test_it_answers_head_and_refuses_post(server: Server) -> None:
    head = await server.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert (await server.http.post("/")).status_code == 405


async def test_it_can_be_disabled() -> None:
    async with serving(ui=False) as server:
        response = await server.http.get("/")
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found_error"


async def test_it_is_shown_without_a_key_and_contains_no_secret() -> None:
    async with serving(api_key=["s3cret"]) as server:
        response = await server.http.get("/")
        assert response.status_code == 200
        assert "s3cret" not in response.text
        assert (await server.http.get("/v1/models")).status_code == 401


@in_browser
async def test_it_shows_model_state_and_figures(server: Server, page: Page) -> None:
    await show(page, server)
    assert await page.text("#model") == "stub"
    assert "512 tokens of context" in await page.text("#facts")
    server.engine.script = Script(ids=[5] * 40)
    await server.complete(max_tokens=40)
    await page.until("document.querySelector('#overview').innerText.includes('25')")  # of 100 pages
    tiles = await page.run("[...document.querySelectorAll('.tile')].filter(t => !t.hidden).map(t => t.innerText)")
    kv = next(tile for tile in tiles if tile.startswith("KV cache"))
    assert re.search(r"held\s*25\s*%", kv)
    assert "length" in await page.text("#totals")
    assert page.errors == []
    assert {url.removeprefix(server.url) for url in page.requests} == {"/", "/metrics", "/ready", "/v1/models"}


@in_browser
async def test_several_models_are_shown_with_their_states_and_can_be_chosen(page: Page) -> None:
    async with serving(models=["demo served_model_name=a", "demo served_model_name=b"]) as server:
        server.engines[1].script = Script("I am b")
        server.service.shared_state.sleep_states[0] = SleepState.ASLEEP
        await show(page, server)
        await page.until("document.querySelector('#totals').innerText.includes('asleep')")
        assert await page.text("#model") == "a, b"
        assert re.search(r"a asleep\s*b awake", await page.text("#totals"))
        assert await page.run("[...document.querySelectorAll('#name option')].map(o => o.value)") == ["a", "b"]
        assert await page.run("!document.querySelector('#models').hidden")
        assert page.errors == []


@in_browser
async def test_a_hidden_page_does_not_poll(server: Server, page: Page) -> None:
    await show(page, server)

    async def hide(hidden: bool) -> None:
        await page.run(
            f"Object.defineProperty(document, 'hidden', {{value: {json.dumps(hidden)}, configurable: true}});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )

    await hide(True)
    await asyncio.sleep(0.5)  # the running requests
    before = len(page.requests)
    await asyncio.sleep(2.5)  # two periods and more
    assert len(page.requests) == before
    await hide(False)
    await server.settle(lambda: len(page.requests) > before)


@in_browser
async def test_it_shows_that_the_engine_has_ended(page: Page) -> None:
    async with serving() as server:
        await show(page, server)
        server.service.engine_died()
        await page.until("document.querySelector('#status').textContent === 'Engine ended'")
        assert await page.run("document.querySelector('#status').dataset.state") == "bad"
    await page.until("document.querySelector('#status').textContent === 'No connection'")


@in_browser
async def test_it_fits_a_phone_in_both_schemes(server: Server, page: Page) -> None:
    colours = set()
    for scheme in ("light", "dark"):
        await page.size(360, 740, scheme=scheme)
        await show(page, server)
        await page.until("document.querySelectorAll('.tile:not([hidden])').length > 4")
        await ask(page, "x" * 200)
        await page.until(SEND_SHOWN)
        assert await page.run("document.documentElement.scrollWidth") == 360
        colours.add(await page.run("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2


@in_browser
async def test_on_a_phone_the_message_box_is_in_view_and_tiles_follow(server: Server, page: Page) -> None:
    for width, height in ((390, 844), (360, 640)):
        await page.size(width, height)
        await show(page, server)
        await page.until("document.querySelectorAll('.tile:not([hidden])').length > 4")
        box = await page.run("document.querySelector('#question').getBoundingClientRect().toJSON()")
        assert 0 <= box["top"] < box["bottom"] <= height
        tiles = await page.run("document.querySelector('#overview').getBoundingClientRect().top")
        assert tiles > box["bottom"]
        assert await page.run("document.documentElement.scrollWidth") == width
