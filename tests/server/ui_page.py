"""The page at `/` in a real browser: helpers of all its tests."""

from __future__ import annotations

from pathlib import Path

from browser import Page
from stub import Server

from weft.server.api import ui

FOLDER = Path(ui.__file__).with_name("ui_files")
SEND_SHOWN = "!document.querySelector('#send').hidden"


async def show(page: Page, server: Server) -> None:
    """Open the page and wait until it is connected to the server."""
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
