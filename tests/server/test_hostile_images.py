"""Hostile images and URLs: each gets one clear answer, no process dies or grows, and no private address is reached."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import hostile_images
import image_model
import pytest
import pytest_asyncio
from image_model import file_of, part, picture
from PIL import Image
from stub import Server, serving

from weft.engine.wire.pixels import PixelShelf
from weft.server.api.media import addresses
from weft.server.api.media.addresses import FetchRefused, check_url, is_public
from weft.server.api.media.decoders import OpenImage
from weft.server.api.media.fetch import Fetcher

pytestmark = pytest.mark.asyncio(loop_scope="module")

ODD_WORDS = re.compile(r"0x[0-9a-f]{4}|Traceback|BytesIO|<_io|/etc|PIL\.|Error\b")
"""Signs of another library's message."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    shelf = PixelShelf.make()
    model = str(image_model.write(tmp_path_factory.mktemp("model")))
    options: dict[str, Any] = {"image_urls": True, "max_image_mib": 2.0}
    async with serving(
        tokenizer=image_model.tokenizer(), pixels=str(shelf.directory), model=model, **options
    ) as server:
        yield server
    shelf.close()


async def ask(server: Server, *parts: Any) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": list(parts)}]}
    response = await server.post("/v1/chat/completions", body)
    answer = response.json()
    return response.status_code, answer["error"]["message"] if "error" in answer else ""


def url_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


async def test_hostile_files_are_refused_one_by_one(seeing: Server) -> None:
    data = {name: make() for name, make in hostile_images.REFUSED.items()}
    before = memory_bytes()
    for name, file in data.items():
        status, message = await ask(seeing, part(file))
        assert status == 400, (name, message)
        assert message.startswith("messages[0].content[0]: the image cannot be used: "), name
        assert not ODD_WORDS.search(message), (name, message)
    assert memory_bytes() - before < 64 * 2**20
    assert not seeing.engine.added


async def test_odd_images_are_images(seeing: Server) -> None:
    for name, make in hostile_images.ACCEPTED.items():
        status, message = await ask(seeing, part(make()))
        assert status == 200, (name, message)


async def test_hostile_urls_are_refused_without_a_connection(seeing: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: Any, **__: Any) -> Any:
        raise AssertionError("a connection was made")

    async def resolve(host: str, port: int) -> list[str]:
        """As without a network: numbers are addresses, localhost is here, and nothing else is known."""
        numbers = socket.AI_NUMERICHOST if not host.rstrip(".").endswith("localhost") else 0
        return [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numbers)]

    monkeypatch.setattr(asyncio, "open_connection", connect)
    monkeypatch.setattr(addresses, "resolve", resolve)
    for url in hostile_images.URLS:
        with pytest.raises(FetchRefused):
            await addresses.public_addresses(check_url(url, ()))
    monkeypatch.undo()
    monkeypatch.setattr(addresses, "resolve", resolve)
    for url in hostile_images.URLS:
        status, message = await ask(seeing, url_part(url))
        assert status == 400, url
        assert "the image cannot be used" in message, url
        assert not ODD_WORDS.search(message), (url, message)


async def test_answers_to_text_go_on_while_images_are_decoded(seeing: Server) -> None:
    """The event loop never waits for a decoder."""
    bombs = [make() for name, make in hostile_images.REFUSED.items() if "bomb" in name]
    gaps, last, done = [], time.perf_counter(), asyncio.Event()

    async def tick() -> None:
        nonlocal last
        while not done.is_set():
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    big = file_of(picture(1500, 1500), "JPEG")
    answers = await asyncio.gather(*(ask(seeing, part(data)) for data in [*bombs, big, big]))
    done.set()
    await ticking
    assert [status for status, _ in answers] == [400] * len(bombs) + [200] * 2
    assert len(gaps) > 10  # no figure: machines differ


async def test_a_decoder_that_takes_too_long_is_ended(seeing: Server) -> None:
    media = seeing.service.media
    assert media is not None
    seconds = media.decoders.cpu_seconds
    try:
        media.decoders.cpu_seconds = 0.01
        status, message = await ask(seeing, part(file_of(Image.new("RGB", (6000, 6000)), "JPEG")))
        assert status == 400
        assert "limits of time and memory" in message
    finally:
        media.decoders.cpu_seconds = seconds
    assert (await ask(seeing, part(file_of(picture()))))[0] == 200


async def test_a_decoder_without_memory_is_refused(seeing: Server) -> None:
    media = seeing.service.media
    assert media is not None
    before = media.decoders._memory_bytes
    media.decoders._memory_bytes = 2**20
    try:
        status, message = await ask(seeing, part(file_of(Image.new("RGB", (4000, 4000)), "JPEG")))
    finally:
        media.decoders._memory_bytes = before
    assert status == 400
    assert "memory" in message


async def test_the_decoders_start_again_after_they_were_killed(seeing: Server) -> None:
    assert (await ask(seeing, part(file_of(picture()))))[0] == 200
    media = seeing.service.media
    assert media is not None
    process = media.decoders._process
    assert process is not None
    process.kill()
    await process.wait()
    assert (await ask(seeing, part(file_of(picture()))))[0] == 200


async def test_an_image_is_not_to_blame_if_the_decoders_are_killed_or_late(seeing: Server) -> None:
    """Only a decoder's own answer, or its end alone, makes a 400."""
    new = (part(file_of(picture(seed=seed))) for seed in range(100, 200))  # each is decoded
    assert (await ask(seeing, next(new)))[0] == 200
    media = seeing.service.media
    assert media is not None
    decoders, tiles = media.decoders, OpenImage.tiles

    async def killed(image: OpenImage, *rest: Any) -> bytes:
        assert decoders._process is not None
        decoders._process.kill()
        await decoders._process.wait()
        return await tiles(image, *rest)

    async def none_left(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    for owner, name, value in (
        (OpenImage, "tiles", killed), (decoders, "wall_seconds", 0.0), (asyncio, "create_subprocess_exec", none_left),
    ):  # fmt: skip
        decoders._stop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            assert (await ask(seeing, next(new)))[0] == 503, name
        assert (await ask(seeing, next(new)))[0] == 200


async def test_files_larger_than_the_limit(seeing: Server) -> None:
    status, message = await ask(seeing, part(bytes(2**21 + 1)))
    assert status == 400
    assert "larger than 2 MiB" in message


# -- fetching, from a server of this test


class Host:
    """Answers every request with the same bytes."""

    def __init__(self, answer: bytes, *, hold: bool = False) -> None:
        self.answer, self.hold = answer, hold
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answer)
        try:
            await writer.drain()
            if self.hold:
                await reader.read()
        except ConnectionError:
            pass
        writer.close()


async def fetched(
    host: Host, *, url: str = "http://images.example/a.png", limit: int = 1000, seconds: float = 60
) -> Any:
    """Fetch from `host`, as if it were any public host."""
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def here(_: Any) -> list[str]:
        return ["127.0.0.1"]

    connect = asyncio.open_connection

    async def dial(address: str, _: int, **options: Any) -> Any:
        return await connect(address, port, **options)

    fetcher = Fetcher([], limit, addresses=here)
    fetcher.seconds = seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "open_connection", dial)
        try:
            return await fetcher.get(url)
        finally:
            server.close()


OK = b"HTTP/1.1 200 OK\r\n"


async def test_an_image_is_fetched_with_a_bare_request() -> None:
    host = Host(OK + b"Content-Length: 3\r\n\r\nabc")
    assert await fetched(host, url="http://images.example/a b?x=1".replace(" ", "%20")) == b"abc"
    (request,) = host.requests
    assert request.startswith(b"GET /a%20b?x=1 HTTP/1.1\r\nHost: images.example\r\n")
    assert b"Accept-Encoding: identity" in request
    assert b"Cookie" not in request
    assert b"Authorization" not in request
    chunked = Host(OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
    assert await fetched(chunked) == b"abc"
    assert await fetched(Host(OK + b"Connection: close\r\n\r\nabc")) == b"abc"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "ended the connection early"),
        (b"\x16\x03\x01 not http", "did not answer in HTTP"),
        (OK + b"Content-Length: 10\r\n\r\nabc", "ended the connection early"),
        (OK + b"Content-Length: 1001\r\n\r\n", "larger than"),
        (OK + b"Content-Length: -1\r\n\r\n", "did not answer in HTTP|larger than"),
        (OK + b"\r\n" + b"x" * 2000, "larger than"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n800\r\n" + b"x" * 2048, "larger than"),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", "compressed"),
        (OK + b"X: " + b"y" * 200_000, "too long headers|did not answer in HTTP"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "status 500"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "status 302"),
        (b"HTTP/1.1 302 Found\r\nLocation: /a.png\r\nContent-Length: 0\r\n\r\n", "redirects more than 3 times"),
        (b"HTTP/1.1 302 Found\r\nLocation: ftp://a/\r\nContent-Length: 0\r\n\r\n", "data: or https:"),
        (b"HTTP/1.1 302 Found\r\nLocation: //a:b@c/\r\nContent-Length: 0\r\n\r\n", "credentials"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://a:22/\r\nContent-Length: 0\r\n\r\n", "port 80 or 443"),
    ],
)
async def test_hostile_answers_are_refused(answer: bytes, reason: str) -> None:
    with pytest.raises(FetchRefused, match=reason):
        await fetched(Host(answer))


async def test_slow_answers_are_given_up() -> None:
    with pytest.raises(FetchRefused, match=r"longer than 0.2 s"):
        await fetched(Host(OK + b"Content-Length: 9\r\n\r\na", hold=True), seconds=0.2)


async def test_redirects_are_resolved_and_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def resolve(host: str, _: int) -> list[str]:
        asked.append(host)
        return ["203.0.114.7"] if host == "images.example" else ["10.0.0.1"]

    monkeypatch.setattr(addresses, "resolve", resolve)
    host = Host(b"HTTP/1.1 301 Moved\r\nLocation: http://inside.example/\r\nContent-Length: 0\r\n\r\n")
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0)
    connect, dialed = asyncio.open_connection, []

    async def dial(address: str, port: int, **options: Any) -> Any:
        dialed.append((address, port))
        return await connect("127.0.0.1", server.sockets[0].getsockname()[1], **options)

    monkeypatch.setattr(asyncio, "open_connection", dial)
    with pytest.raises(FetchRefused, match="not on the public internet"):
        await Fetcher([], 1000).get("http://images.example/")
    assert dialed == [("203.0.114.7", 80)]  # the address that was checked, and no other
    assert asked == ["images.example", "inside.example"]
    server.close()


async def test_one_private_address_among_several_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(*_: Any) -> list[str]:
        return ["203.0.114.7", "127.0.0.1"]

    monkeypatch.setattr(addresses, "resolve", resolve)
    with pytest.raises(FetchRefused, match="not on the public internet"):
        await Fetcher([], 1000).get("http://images.example/")


async def test_domains() -> None:
    allowed = ["images.example.org", "*.cdn.example"]
    for url in ("https://images.example.org/a", "https://a.cdn.example/", "https://A.B.cdn.example./x"):
        check_url(url, allowed)
    for url in (
        "https://example.org/",
        "https://cdn.example/",
        "https://ximages.example.org/",
        "https://acdn.example/",
    ):
        with pytest.raises(FetchRefused, match="not one from which"):
            check_url(url, allowed)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8"])
async def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "172.31.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::a00:1",
     "2002:a00:1::", "2001:0:a00:1::", "192.0.2.1", "198.18.0.1", "2001:db8::1"],
)  # fmt: skip
async def test_other_addresses(address: str) -> None:
    assert not is_public(address)
