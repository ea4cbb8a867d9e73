"""The chat box of the page at `/`, in a real browser."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from browser import Page, in_browser
from stub import Script, Server, serving
from ui_page import SEND_SHOWN, ask, last_answer, show

from weft.engine.wire.messages import Finish

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@in_browser
async def test_chat_streams_and_remembers(server: Server, page: Page) -> None:
    gate = asyncio.Event()
    server.engine.script = Script("hello <b>world</b>", gate=gate)
    await show(page, server)
    await ask(page, "first")
    await page.until("!document.querySelector('#stop').hidden")
    assert await last_answer(page) == ""
    gate.set()
    await page.until(SEND_SHOWN)
    assert await last_answer(page) == "hello <b>world</b>"
    assert re.search(r"first token after .* tokens", await page.text(".assistant .note"))
    await ask(page, "second")
    await server.settle(lambda: len(server.engine.added) == 2)
    sent = server.engine.tokenizer.decode(server.engine.prompt())
    assert [sent.find(part) for part in ("first", "hello <b>world</b>", "second")] == sorted(
        sent.index(part) for part in ("first", "hello <b>world</b>", "second")
    )
    await page.until(SEND_SHOWN)
    assert page.errors == []


@in_browser
@pytest.mark.parametrize("way", ["button", "escape"])
async def test_stop_ends_the_answer_and_frees_the_engine(server: Server, page: Page, way: str) -> None:
    server.engine.script = Script(ids=[70] * 400, stop_after=3)
    await show(page, server)
    await ask(page, "go on")
    await page.until("document.querySelector('.assistant .text')?.textContent")
    if way == "button":
        await page.press("Tab")
        assert await page.run("document.activeElement.id") == "stop"
        await page.press(" ")
    else:
        await page.press("Escape")
    await server.settle(lambda: len(server.engine.aborted) == 1)
    await page.until(SEND_SHOWN)
    assert (await page.text(".assistant .note")).endswith("stopped")
    assert await page.run("document.activeElement.id") == "question"
    server.engine.script = Script("again")
    await ask(page, "and now")
    await page.until(SEND_SHOWN)
    assert await last_answer(page) == "again"


@in_browser
async def test_errors_are_shown_and_the_question_is_restored(server: Server, page: Page) -> None:
    await show(page, server)
    await page.run("document.querySelector('#limit').value = 100000")
    await ask(page, "too much")
    await page.until("document.querySelector('[role=alert]') !== null")
    assert "maximum context length" in await page.text("[role=alert]")
    assert await page.run("document.querySelector('#question').value") == "too much"
    assert server.engine.added == []


@in_browser
async def test_an_error_in_a_stream_is_shown_below_the_received_text(server: Server, page: Page) -> None:
    server.engine.script = Script("partial", finish=Finish.ABORT, error="broke", delay=0.01)
    await show(page, server)
    await ask(page, "hi")
    await page.until("document.querySelector('[role=alert]') !== null")
    assert await page.text("[role=alert]")
    assert "partial".startswith(await last_answer(page))
    await page.until(SEND_SHOWN)


@in_browser
async def test_completions_are_an_option(server: Server, page: Page) -> None:
    server.engine.script = Script("tail")
    await show(page, server)
    await page.run("document.querySelector('#mode').value = 'completion'")
    await ask(page, "head")
    await page.until("document.querySelector('.assistant .text')?.textContent === 'tail'")
    assert server.engine.tokenizer.decode(server.engine.prompt()) == "head"


@in_browser
async def test_it_asks_for_the_key_and_keeps_it_only_in_the_tab(page: Page) -> None:
    async with serving(api_key=["schlüssel"]) as server:
        await page.go(server.url)
        await page.until("!document.querySelector('#key-form').hidden")
        await page.until("document.querySelectorAll('.tile:not([hidden])').length > 4")  # figures need none
        for key in ("wrong", "schlüssel"):
            await page.run("document.querySelector('#key').focus()")
            await page.type(key)
            await page.press("Enter")
            if key == "wrong":
                await page.until("document.querySelector('#key-note').textContent.includes('rejected')")
        await page.until("document.querySelector('#key-form').hidden")
        await ask(page, "hi")
        await page.until(f"{SEND_SHOWN} && document.querySelector('.assistant .note').textContent")
        assert await last_answer(page) == "hello world"
        kept = "[Object.values(sessionStorage), Object.values(localStorage), document.cookie, location.search]"
        session, local, cookie, search = await page.run(kept)
        assert "schlüssel" in session
        assert not [value for value in local if "schlüssel" in value]
        assert (cookie, search) == ("", "")
        await page.run("document.querySelector('#forget').click()")
        assert "schlüssel" not in await page.run("Object.values(sessionStorage)")
        assert await page.run("!document.querySelector('#key-form').hidden")


@in_browser
async def test_it_can_be_used_by_keyboard_only(server: Server, page: Page) -> None:
    await show(page, server)
    await page.press("Tab")
    assert await page.text(":focus") == "Skip to the chat"
    await page.press("Enter")
    await page.until("document.activeElement.id === 'question'")
    await page.type("one")
    await page.press("Enter", shift=True)
    await page.type("two")
    assert await page.run("document.querySelector('#question').value") == "one\ntwo"
    await page.press("Enter")
    await page.until(f"{SEND_SHOWN} && document.querySelector('.assistant .note').textContent")
    unnamed = (
        "[...document.querySelectorAll('button, input, select, textarea')].filter("
        "e => !e.textContent.trim() && !e.labels?.length && !e.ariaLabel).length"
    )
    assert await page.run(unnamed) == 0


@in_browser
async def test_chats_and_options_outlive_a_reload_and_can_be_deleted(server: Server, page: Page) -> None:
    server.engine.script = Script("hello **world**")
    await show(page, server)
    await page.run(
        "(() => {const t = document.querySelector('#temperature'); t.value = '0.5';"
        "t.dispatchEvent(new Event('change', {bubbles: true}))})()"
    )
    await ask(page, "first chat")
    await page.until(f"{SEND_SHOWN} && document.querySelector('.assistant .note').textContent")
    await show(page, server)
    assert await page.text(".user .text") == "first chat"
    assert await page.run("document.querySelector('.assistant strong').textContent") == "world"
    assert await page.run("document.querySelector('#temperature').value") == "0.5"
    await page.run("document.querySelector('#clear').click()")
    assert await page.run("document.querySelector('.message')") is None
    await ask(page, "second chat")
    await page.until(f"{SEND_SHOWN} && document.querySelector('.assistant .note').textContent")
    assert "first chat" not in server.engine.tokenizer.decode(server.engine.prompt())
    await page.run("document.querySelector('#chats').click()")
    titles = "[...document.querySelectorAll('#history .title')].map(b => b.textContent)"
    assert await page.run(titles) == ["second chat", "first chat"]
    await page.run("document.querySelectorAll('#history .title')[1].click()")
    assert await page.text(".user .text") == "first chat"
    await ask(page, "go on")
    await page.until(f"{SEND_SHOWN} && document.querySelectorAll('.assistant .note')[1]?.textContent")
    prompt = server.engine.tokenizer.decode(server.engine.prompt())
    assert prompt.index("first chat") < prompt.index("hello **world**") < prompt.index("go on")
    await page.run("document.querySelector('#chats').click()")
    await page.run("document.querySelector('#history li .quiet').click()")
    assert await page.run(titles) == ["second chat"]
    assert await page.run("document.querySelector('.message')") is None
    stored = await page.run("Object.keys(localStorage).filter(k => k.includes('chat:')).length")
    assert stored == 1
    assert page.errors == []


@in_browser
async def test_invalid_storage_content_is_ignored(server: Server, page: Page) -> None:
    await page.go(server.url)
    await page.run(
        "localStorage.setItem('weft:/:chat:a', '{broken'); localStorage.setItem('weft:/:chat:b', '{\"turns\": 5}');"
        'localStorage.setItem(\'weft:/:options\', \'{"mode": "<b>", "send": "x", "temperature": "9"}\');'
        "sessionStorage.setItem('weft:/:current', 'b')"
    )
    await show(page, server)
    assert await page.run("document.querySelector('#mode').value") == "chat"
    assert await page.run("document.querySelector('.message')") is None
    assert page.errors == []


@in_browser
async def test_a_chat_can_be_exported(server: Server, page: Page) -> None:
    await show(page, server)
    await ask(page, "keep me")
    await page.until(f"{SEND_SHOWN} && document.querySelector('.assistant .note').textContent")
    exported = await page.run(
        "new Promise(resolve => {const made = URL.createObjectURL; URL.createObjectURL = blob => "
        "(blob.text().then(resolve), made.call(URL, blob)); document.querySelector('#export').click()})"
    )
    assert [m["content"] for m in json.loads(exported)["messages"]] == ["keep me", "hello world"]


@in_browser
async def test_an_option_that_cannot_be_sent_opens_the_options_with_an_error(server: Server, page: Page) -> None:
    await show(page, server)
    await page.run("document.querySelector('#temperature').value = 5")
    await ask(page, "hi")
    await page.until("document.querySelector('#invalid').textContent")
    assert (await page.text("#invalid")).startswith("Temperature:")
    assert await page.run("document.querySelector('#ask details').open")
    assert await page.run("document.activeElement.id") == "temperature"
    assert server.engine.added == []
    await page.run("document.querySelector('#temperature').value = ''")
    await page.run("document.querySelector('#question').focus()")
    await page.press("Enter")
    await page.until(f"{SEND_SHOWN} && document.querySelector('.assistant .note')?.textContent")
    assert await page.text("#invalid") == ""


@in_browser
async def test_errors_scroll_into_view_in_a_long_conversation(page: Page) -> None:
    in_view = (
        "(() => {const a = [...document.querySelectorAll('[role=alert]')].at(-1)?.getBoundingClientRect();"
        "const l = document.querySelector('#log').getBoundingClientRect();"
        "return a && a.height > 0 && a.top >= l.top - 1 && a.bottom <= l.bottom + 1})()"
    )
    await page.size(390, 844)
    async with serving() as server:
        server.engine.script = Script("line\n\n" * 30)
        await show(page, server)
        await ask(page, "long")
        await page.until(SEND_SHOWN)
        await page.run("document.querySelector('#log').scrollTop = 0")
        server.engine.script = Script("partial", finish=Finish.ABORT, error="broke", delay=0.01)
        await ask(page, "hi")
        await page.until("document.querySelector('#log [role=alert]') !== null")
        assert await page.run(in_view)
        await page.until(SEND_SHOWN)
    await page.run("document.querySelector('#log').scrollTop = 0")
    await ask(page, "")
    await page.until("document.querySelectorAll('#log [role=alert]').length === 2")
    assert "cannot be reached" in await page.run(
        "[...document.querySelectorAll('#log [role=alert]')].at(-1).textContent"
    )
    assert await page.run(in_view)
