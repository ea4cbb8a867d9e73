"""TLS by flags, CORS off by default, loopback by default, and one line for an operator's mistake."""

from __future__ import annotations

import contextlib
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from stub import serving

from weft.engine.wire.messages import EngineReady, MemoryBudget
from weft.server.config import ServeConfig
from weft.server.daemon.announce import announce
from weft.server.daemon.cli import main
from weft.server.daemon.listen import listen

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


async def test_https(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    async with serving(tls_cert=str(cert), tls_key=str(key)) as server:
        url = server.url.replace("http:", "https:")
        context = ssl.create_default_context(cafile=str(cert))
        async with httpx.AsyncClient(base_url=url, verify=context, timeout=240) as http:
            body = {"prompt": "hi", "stream": True}
            assert (await http.post("/v1/completions", json=body)).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            await server.http.get("/health")  # no plain HTTP on that port


GREETED = EngineReady(
    **{**dict.fromkeys(EngineReady.__struct_fields__, 0), "memory": MemoryBudget(), "tasks": ("generate",)}
)  # type: ignore[arg-type]


async def test_the_greeting_has_the_curl_option_for_a_self_signed_certificate(
    certificate: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = certificate
    config = ServeConfig.model_validate({"tls_cert": str(cert), "tls_key": str(key)})
    announce(config, ("127.0.0.1", 1), [GREETED], 1.0, chat=True, key=False)
    assert "curl -k https://" in capsys.readouterr().out
    announce(ServeConfig.model_validate({}), ("127.0.0.1", 1), [GREETED], 1.0, chat=True, key=False)
    assert "curl http://" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_an_unwritable_greeting_is_no_reason_to_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        announce(ServeConfig.model_validate({}), ("127.0.0.1", 1), [GREETED], 1.0, chat=True, key=False)
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


async def test_no_page_of_another_origin_may_call_unless_allowed() -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with serving() as server:
        assert (await server.http.options("/v1/completions", headers=preflight)).status_code == 405
        response = await server.http.get("/v1/models", headers=preflight)
        assert not any(name.startswith("access-control") for name in response.headers)
    async with serving(cors_origin=["https://a.example"], api_key=["k"]) as server:
        response = await server.http.options("/v1/completions", headers=preflight)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "https://a.example")
        other = {**preflight, "Origin": "https://b.example"}
        assert (await server.http.options("/v1/completions", headers=other)).status_code == 400
        response = await server.http.get("/v1/models", headers=preflight)  # a page can read the reason for the refusal
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, "https://a.example")


async def test_loopback_is_the_default() -> None:
    assert ServeConfig().host == "127.0.0.1"


@pytest.mark.parametrize("count", [1, 3])
async def test_a_port_is_taken_once_by_any_number_of_processes(count: int) -> None:
    listeners = listen("127.0.0.1", 0, count)
    ports = {listener.getsockname()[1] for listener in listeners}
    assert (len(listeners), len(ports)) == (count, 1)
    for others in (1, 2):
        with pytest.raises(Exception, match="in use"):
            listen("127.0.0.1", ports.copy().pop(), others)
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-cert", "/nowhere.pem"], "--tls-cert, --tls-key: cannot be read"),
        (["--tls-key", "/nowhere.pem"], "--tls-key needs --tls-cert"),
        (["--api-key-file", "/nowhere"], "cannot read --api-key-file"),
        (["--api-workers", "0"], "--api-workers"),
        (["--rate-limit", "-1"], "--rate-limit"),
        (["--cors-origin", " "], "--cors-origin"),
        (
            ["--cors-origin", "https://a.example", "b.example"],
            "'b.example' is not an origin such as https://example.org",
        ),
        (["--cors-origin", "https://a.example/"], "no trailing slash"),
        (["--cors-origin", "https://*.example"], "'*' alone allows all"),
        (["--log-format", "xml"], "--log-format"),
    ],
)
async def test_impossible_flags_are_one_line_errors(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import asyncio

    assert await asyncio.to_thread(main, ["serve", "--port", "0", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
