"""A headless Chromium, driven over the pipe of its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # the tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Page:
    """One tab. `errors` are exceptions, console errors and violations of the Content-Security-Policy; `requests` are
    URLs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._session: str | None = None
        self._context: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._pump = asyncio.create_task(self._read())

    async def open(self) -> None:
        """Start over in another tab, with empty storage."""
        self._session = None
        if self._context is not None:
            await self.send("Target.disposeBrowserContext", browserContextId=self._context)
        self._context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=self._context)
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self.errors.clear()
        self.requests.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")

    async def close(self) -> None:
        self._session = None
        with contextlib.suppress(ConnectionError, asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(self.send("Browser.close"), 60)
        self._pump.cancel()
        self._writer.close()

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        answer = self._waiting[self._count] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(message).encode() + b"\0")
        return await answer

    async def _read(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                future = self._waiting.pop(message["id"])
                if "error" in message:
                    future.set_exception(RuntimeError(message["error"]["message"]))
                elif not future.done():
                    future.set_result(message["result"])
            else:
                self._note(message["method"], message["params"])

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        match event:
            case "Runtime.exceptionThrown":
                self.errors.append(parameters["exceptionDetails"].get("exception", {}).get("description", "exception"))
            case "Runtime.consoleAPICalled" if parameters["type"] == "error":
                self.errors.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    async def go(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    async def until(self, script: str, timeout: float = 240.0) -> Any:
        """Wait until an expression is true; returns its value."""
        async with asyncio.timeout(timeout):
            while not (value := await self.run(script)):
                await asyncio.sleep(0.05)
        return value

    async def text(self, selector: str) -> str:
        """The rendered text; empty for hidden elements."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def type(self, text: str) -> None:
        """Type into the focused element."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), " ": (32, " ")}
        code, text = codes[key]
        event = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        await self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    async def size(self, width: int, height: int, *, scheme: str = "light", scale: float = 1.0) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


def _onto(reader: int, writer: int) -> Callable[[], None]:
    """Chromium reads from file descriptor 3 and writes to 4."""

    def place() -> None:
        os.dup2(reader, 3)
        os.dup2(writer, 4)

    return place


def _high_pipe() -> tuple[int, int]:
    """A pipe whose file descriptors are above 3 and 4."""
    import fcntl

    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


@contextlib.asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Page]:
    """A page of a separate browser, with its files below `profile`."""
    assert CHROMIUM is not None
    theirs_in, ours_out = _high_pipe()
    ours_in, theirs_out = _high_pipe()
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *_FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        env={**os.environ, "HOME": str(profile)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=_onto(theirs_in, theirs_out),
        pass_fds=(3, 4),
    )
    os.close(theirs_in)
    os.close(theirs_out)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb"))
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(ours_out, "wb"))
    page = Page(reader, asyncio.StreamWriter(transport, protocol, None, loop))
    try:
        async with asyncio.timeout(240):
            await page.open()
        yield page
    finally:
        await page.close()
        with contextlib.suppress(ProcessLookupError):
            try:
                await asyncio.wait_for(process.wait(), 60)
            except TimeoutError:
                process.kill()
                await process.wait()
