"""The page at `/` renders an answer as nodes, never as markup."""

from __future__ import annotations

import asyncio
import json

import pytest
from browser import Page, in_browser
from stub import Script, Server
from ui_page import FOLDER, SEND_SHOWN, ask, show

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def answer_html(page: Page, text: str) -> str:
    """The rendered markup of an answer."""
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
async def test_nothing_in_an_answer_runs_or_loads(page: Page, text: str) -> None:
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
async def test_endless_text_is_quick(page: Page) -> None:
    for hostile in ("**a " * 4000, "[" * 8000, "`" * 8000, "- " * 4000, "> " * 4000, "|-" * 4000, "_a" * 8000):
        async with asyncio.timeout(240):
            await answer_html(page, hostile)


@in_browser
async def test_a_code_block_can_be_copied_while_the_answer_continues(server: Server, page: Page) -> None:
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
