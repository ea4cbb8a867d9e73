"""The page at `/`: its headers, and what it does in a real browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import random
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from browser import CHROMIUM, Page, browsing
from stub import Script, Server, serving

from weft.engine.wire.messages import Finish
from weft.server.api import ui
from weft.server.observe.board import Rest

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

FOLDER = Path(ui.__file__).with_name("ui_files")
SEND_SHOWN = "!document.querySelector('#send').hidden"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    async with browsing(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def page(_browser: Page) -> Page:
    await _browser.open()
    return _browser


async def show(page: Page, server: Server) -> None:
    """Open the page and wait until it knows the server."""
    await page.go(server.url)
    await page.until("document.querySelector('#status').textContent === 'Serving'")
    await page.until("document.querySelector('#limit').value")


async def ask(page: Page, question: str) -> None:
    await page.run("document.querySelector('#question').focus()")
    await page.type(question)
    await page.press("Enter")


async def last_answer(page: Page) -> str:
    return str(await page.run("[...document.querySelectorAll('.assistant .text')].at(-1)?.textContent ?? ''"))


def metrics_polls(page: Page) -> int:
    return sum(url.endswith("/metrics") for url in page.requests)


# -- without a browser


async def test_is_one_document_that_loads_nothing_else(server: Server) -> None:
    response = await server.http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"<(script|img|iframe|object|embed)[^>]*\ssrc=", response.text)
    links = re.findall(r"""(?:href|src|action)=["']([^"']*)|url\(([^)]*)\)|@import""", response.text)
    assert [link for link, _ in links if not link.startswith(("#", "data:"))] == ["metrics", "metrics", "docs"]
    assert "https://" not in response.text


async def test_policy_lets_nothing_run_but_the_pages_own_script_and_style(server: Server) -> None:
    response = await server.http.get("/")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    for element, directive in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert not re.search(r"\s(style|on\w+)=", response.text.partition("<script")[0])


async def test_every_source_file_is_in_the_page() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {"index.html", "style.css", *ui.SCRIPTS}


async def test_answers_head_and_refuses_post(server: Server) -> None:
    head = await server.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert (await server.http.post("/")).status_code == 405


async def test_is_off_when_told() -> None:
    async with serving(ui=False) as server:
        response = await server.http.get("/")
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found_error"


async def test_is_shown_without_a_key_and_tells_no_secret() -> None:
    async with serving(api_key=["s3cret"]) as server:
        response = await server.http.get("/")
        assert response.status_code == 200
        assert "s3cret" not in response.text
        assert (await server.http.get("/v1/models")).status_code == 401


# -- figures


@in_browser
async def test_shows_model_state_and_figures(server: Server, page: Page) -> None:
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
        server.service.board.rest[0] = Rest.ASLEEP
        await show(page, server)
        await page.until("document.querySelector('#totals').innerText.includes('asleep')")
        assert await page.text("#model") == "a, b"
        assert re.search(r"a asleep\s*b awake", await page.text("#totals"))
        assert await page.run("[...document.querySelectorAll('#name option')].map(o => o.value)") == ["a", "b"]
        assert await page.run("!document.querySelector('#models').hidden")
        assert page.errors == []


@in_browser
async def test_what_has_no_series_is_not_shown(server: Server, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    render = server.service.metrics.render

    def without_computed_tokens() -> bytes:
        return b"\n".join(line for line in render().split(b"\n") if b"weft_device_idle" not in line)

    shown = "[...document.querySelectorAll('.tile')].filter(t => !t.hidden).map(t => t.querySelector('h3').textContent)"
    monkeypatch.setattr(server.service.metrics, "render", without_computed_tokens)
    await page.go(server.url)
    titles = await page.until(f"({shown}).length && {shown}")
    assert "Device idle" not in titles
    assert "Iteration time" in titles
    monkeypatch.undo()
    await page.until(f"({shown}).includes('Device idle')")
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
    await asyncio.sleep(0.5)  # what was under way
    before = len(page.requests)
    await asyncio.sleep(2.5)  # two periods and more
    assert len(page.requests) == before
    await hide(False)
    await server.settle(lambda: len(page.requests) > before)


@in_browser
async def test_tells_that_the_engine_has_ended(page: Page) -> None:
    async with serving() as server:
        await show(page, server)
        server.service.engine_died()
        await page.until("document.querySelector('#status').textContent === 'Engine ended'")
        assert await page.run("document.querySelector('#status').dataset.state") == "bad"
    await page.until("document.querySelector('#status').textContent === 'No connection'")


@in_browser
async def test_fits_a_phone_in_both_schemes(server: Server, page: Page) -> None:
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


# -- chat


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
async def test_errors_are_shown_and_the_question_is_given_back(server: Server, page: Page) -> None:
    await show(page, server)
    await page.run("document.querySelector('#limit').value = 100000")
    await ask(page, "too much")
    await page.until("document.querySelector('[role=alert]') !== null")
    assert "maximum context length" in await page.text("[role=alert]")
    assert await page.run("document.querySelector('#question').value") == "too much"
    assert server.engine.added == []


@in_browser
async def test_an_error_in_a_stream_is_shown_below_what_came(server: Server, page: Page) -> None:
    server.engine.script = Script("partial", finish=Finish.ERROR, error="broke", delay=0.01)
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
async def test_asks_for_the_key_and_keeps_it_in_the_tab_only(page: Page) -> None:
    async with serving(api_key=["schlüssel"]) as server:
        await page.go(server.url)
        await page.until("!document.querySelector('#key-form').hidden")
        await page.until("document.querySelectorAll('.tile:not([hidden])').length > 4")  # figures need none
        for key in ("wrong", "schlüssel"):
            await page.run("document.querySelector('#key').focus()")
            await page.type(key)
            await page.press("Enter")
            if key == "wrong":
                await page.until("document.querySelector('#key-note').textContent.includes('refused')")
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
async def test_can_be_used_by_keyboard_alone(server: Server, page: Page) -> None:
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


# -- what answers look like


async def answer_html(page: Page, text: str) -> str:
    """The markup that an answer becomes."""
    sources = "\n".join((FOLDER / name).read_text() for name in ("chart.js", "markdown.js"))
    return str(
        await page.run(
            f"(() => {{{sources}; const place = document.createElement('div');"
            f"place.append(...markdown({json.dumps(text)})); return place.innerHTML;}})()"
        )
    )


@in_browser
@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("a **b** *c* `d*e*` ~~f~~", "<p>a <strong>b</strong> <em>c</em> <code>d*e*</code> <del>f</del></p>"),
        ("snake_case_name 2*3*4 a * b", "<p>snake_case_name 2<em>3</em>4 a * b</p>"),
        ("# T\n\ntext\nmore", "<h3>T</h3><p>text\nmore</p>"),
        ("1. a\n2. b\n   - c\n\n3) d", "<ol><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ol>"),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("|a|b|\n|-|-|\n|1|2|", "<td>2</td>"),
        ("[w](https://weft.example/a_b_c)", '<a href="https://weft.example/a_b_c" target="_blank"'),
        ("see https://weft.example/x.", ">https://weft.example/x</a>.</p>"),
        (r"\*not\* em", "<p>*not* em</p>"),
        ("---", "<hr>"),
    ],
)
async def test_markdown_becomes_nodes(page: Page, text: str, markup: str) -> None:
    assert markup in await answer_html(page, text)


@in_browser
@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script><img src=x onerror=alert(1)>",
        "[x](javascript:alert(1)) [y](data:text/html,<script>) [z](/admin/reset) [j](JaVaScRiPt:alert(1))",
        "```html\n<iframe src=x></iframe>\n```",
        '[a](https://x.example/"onmouseover="alert(1)) ![i](https://x.example/p.png)',
        "|<b>|\n|-|\n|<i>|",
        "`<b>` **<u>** # <style>",
    ],
)
async def test_nothing_of_an_answer_runs_or_loads(page: Page, text: str) -> None:
    kinds = await page.run(
        f"(() => {{const d = new DOMParser().parseFromString({json.dumps(await answer_html(page, text))}, 'text/html');"
        "return {tags: [...d.body.querySelectorAll('*')].map(e => e.localName),"
        "links: [...d.querySelectorAll('a')].map(a => a.protocol),"
        "handlers: [...d.body.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
        ".filter(n => n.startsWith('on'))}})()"
    )
    assert not {"script", "img", "iframe", "style", "b", "i", "u"} & set(kinds["tags"])
    assert set(kinds["links"]) <= {"https:"}
    assert kinds["handlers"] == []


@in_browser
async def test_text_without_an_end_is_quick(page: Page) -> None:
    for hostile in ("**a " * 4000, "[" * 8000, "`" * 8000, "- " * 4000, "> " * 4000, "|-" * 4000, "_a" * 8000):
        async with asyncio.timeout(240):
            await answer_html(page, hostile)


@in_browser
async def test_a_code_block_can_be_copied_while_the_answer_goes_on(server: Server, page: Page) -> None:
    gate = asyncio.Event()
    server.engine.script = Script("```py\nx = 1 < 2\n```\nand **more**", gate=gate)
    await show(page, server)
    await ask(page, "code")
    gate.set()
    await page.until(SEND_SHOWN)
    assert await page.text(".assistant pre") == "x = 1 < 2"
    assert await page.run("document.querySelector('.assistant strong').textContent") == "more"
    await page.run("document.querySelector('button.copy').click()")
    await page.until("document.querySelector('button.copy').textContent !== 'Copy'")
    assert page.errors == []


# -- what is kept


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
async def test_what_storage_holds_is_not_believed(server: Server, page: Page) -> None:
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


# -- what goes wrong is seen


@in_browser
async def test_an_option_that_cannot_be_sent_opens_the_options_and_says_so(server: Server, page: Page) -> None:
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
async def test_errors_come_into_view_also_in_a_long_conversation(page: Page) -> None:
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
        server.engine.script = Script("partial", finish=Finish.ERROR, error="broke", delay=0.01)
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


# -- where things are


@in_browser
async def test_on_a_phone_the_message_box_is_in_view_and_tiles_come_after(server: Server, page: Page) -> None:
    for width, height in ((390, 844), (360, 640)):
        await page.size(width, height)
        await show(page, server)
        await page.until("document.querySelectorAll('.tile:not([hidden])').length > 4")
        box = await page.run("document.querySelector('#question').getBoundingClientRect().toJSON()")
        assert 0 <= box["top"] < box["bottom"] <= height
        tiles = await page.run("document.querySelector('#overview').getBoundingClientRect().top")
        assert tiles > box["bottom"]
        assert await page.run("document.documentElement.scrollWidth") == width


@in_browser
@pytest.mark.parametrize("width", [390, 1000, 1400])
async def test_the_first_traffic_moves_nothing(server: Server, page: Page, width: int) -> None:
    places = (
        "[...document.querySelectorAll('.tile:not([hidden]), #chat, #engine h2')]"
        ".map(e => [e.querySelector('h3')?.textContent ?? e.id, Math.round(e.getBoundingClientRect().top + scrollY)])"
    )
    await page.size(width, 900)
    await show(page, server)
    await page.until("document.querySelectorAll('#internals .tile:not([hidden])').length > 4")
    before = dict(await page.run(places))
    server.engine.script = Script(ids=[5] * 200)
    for _ in range(4):
        await server.complete(max_tokens=200)
    await page.until("/mean\\s*[0-9]/.test(document.querySelectorAll('.tile .values')[1].innerText)")
    after = dict(await page.run(places))
    assert {name: after[name] for name in before if name in after} == before


@in_browser
async def test_percentiles_say_no_more_than_is_known(page: Page) -> None:
    source = (FOLDER / "metrics.js").read_text()
    texts = (exposition([], [0.001, 0.05], {}), exposition([0.02, 0.03, 0.04], [0.001, 0.05], {}))
    figures = await page.run(
        f"(() => {{{source}; const [a, b] = {json.dumps(texts)};"
        "const span = new Span(new Scrape(a, 1), new Scrape(b, 2));"
        "return [span.mean('weft_h'), span.bound('weft_h', 0.99), span.bound('weft_none', 0.5) ?? 'none']})()"
    )
    assert figures == [pytest.approx(0.03), 0.05, "none"]


# -- arithmetic


def exposition(observed: list[float], bounds: list[float], counters: dict[str, float]) -> str:
    """/metrics of a histogram `weft_h` and of a counter `weft_c_total{a=…}`."""
    lines = ["# TYPE weft_h histogram"]
    for bound in (*bounds, math.inf):
        le = "+Inf" if bound == math.inf else repr(bound)
        lines.append(f'weft_h_bucket{{le="{le}"}} {float(sum(value <= bound for value in observed))}')
    lines += [f"weft_h_count {float(len(observed))}", f"weft_h_sum {sum(observed)!r}"]
    labels = {name: name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name in counters}
    lines += [f'weft_c_total{{a="{labels[name]}",b="x"}} {value}' for name, value in counters.items()]
    return "\n".join(lines) + "\n"


def quantile(observed: list[float], bounds: list[float], q: float) -> float:
    """Within the bucket of the observation of this rank, in proportion to its place there."""
    rank, low, below = q * len(observed), 0.0, 0
    for bound in bounds:
        upto = sum(value <= bound for value in observed)
        if upto >= rank:
            return low + (bound - low) * (rank - below) / (upto - below)
        low, below = bound, upto
    return low


def cases() -> Iterator[tuple[list[float], list[float]]]:
    random.seed(4)
    for n in (1, 2, 17, 200):
        yield [random.expovariate(8) for _ in range(30)], [random.expovariate(3) for _ in range(n)]


@in_browser
async def test_rates_means_and_quantiles_are_those_of_the_time_between(page: Page) -> None:
    bounds = [0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0]
    source = (FOLDER / "metrics.js").read_text()
    for before, new in cases():
        odd = 'a"b\\c\nd'
        texts = (
            exposition(before, bounds, {odd: 5, "e": 1}),
            exposition(before + new, bounds, {odd: 11, "e": 4}),
        )
        figures: dict[str, Any] = await page.run(
            f"(() => {{{source}; const [a, b] = {json.dumps(texts)};"
            "const span = new Span(new Scrape(a, 10), new Scrape(b, 12));"
            "return {q: [0.5, 0.9, 0.99].map(q => span.quantile('weft_h', q)), mean: span.mean('weft_h'),"
            f"rate: span.rate('weft_c_total'), one: span.grown('weft_c_total', {{a: {json.dumps(odd)}}}),"
            "missing: span.rate('weft_none') === undefined,"
            "idle: new Span(span.to, span.to).quantile('weft_h', 0.5) === null}})()"
        )
        assert figures["q"] == pytest.approx([quantile(new, bounds, q) for q in (0.5, 0.9, 0.99)])
        assert figures["mean"] == pytest.approx(sum(new) / len(new))
        assert (figures["rate"], figures["one"]) == (4.5, 6)
        assert figures["missing"] is True
        assert figures["idle"] is True


@in_browser
async def test_a_restart_of_the_server_or_a_pause_begins_anew(page: Page) -> None:
    source = (FOLDER / "metrics.js").read_text()
    spans = await page.run(
        f"(() => {{{source}; const recent = new Recent(); const out = [];"
        "for (const [time, ticks] of [[0, 9], [1, 10], [2, 11], [3, 4], [4, 5], [60, 70], [61, 71]]) {"
        "recent.add(new Scrape(`weft_event_loop_lag_seconds_count ${ticks}\\n`, time));"
        "out.push(recent.over(10).from.time);} return out;})()"
    )
    assert spans == [0, 0, 0, 3, 3, 60, 60]
