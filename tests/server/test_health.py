"""`weft health`: a daemon is found wherever it serves, and asked as its health check would."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from live import running
from stub import serving

from weft.server.commands import health
from weft.server.observe import whereabouts

DOCKERFILE = Path(__file__).parents[2] / "Dockerfile"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other daemons of this machine are not seen."""
    monkeypatch.setattr(whereabouts, "NAME", f"weft-url-{uuid.uuid4().hex}")


def certificate(folder: Path) -> dict[str, str]:
    """Options of a server. Nobody vouches for it, and it is for another name."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=x")
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return {"tls_cert": cert, "tls_key": key}


def checked(*, ready: bool = False) -> int:
    return health.run(argparse.Namespace(ready=ready))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tls", [False, True])
async def test_the_state_of_a_server_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tls: bool
) -> None:
    if tls and shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    files = certificate(tmp_path) if tls else {}
    async with serving(engines=2, **files) as server:
        url = f"{'https' if tls else 'http'}://{server.url.partition('://')[2]}"
        fd = whereabouts.publish(url)
        try:
            assert await asyncio.to_thread(checked) == 0
            assert capsys.readouterr().out == f"{url} ok\n"
            assert await asyncio.to_thread(checked, ready=True) == 0
            for engine in range(2):
                server.service.engine_died(engine, restarting=True)
            assert await asyncio.to_thread(checked) == 0, "it will be back"
            assert await asyncio.to_thread(checked, ready=True) == 1
            capsys.readouterr()
            for engine in range(2):
                server.service.engine_died(engine)
            assert await asyncio.to_thread(checked) == 1
            assert capsys.readouterr().out == f"{url} 503: The engine has ended.\n"
        finally:
            os.close(fd)


@pytest.mark.usefixtures("alone")
def test_a_server_that_does_not_answer_or_is_not_there_is_not_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert checked() == 1
    assert "no server" in capsys.readouterr().err
    fd = whereabouts.publish("http://127.0.0.1:1")
    assert checked() == 1
    assert "does not answer" in capsys.readouterr().out
    os.close(fd)
    assert whereabouts.published() == []


@pytest.mark.slow
def test_the_check_of_the_image_finds_a_daemon_whose_port_it_was_not_told(tmp_path: Path) -> None:
    words = DOCKERFILE.read_text().partition("HEALTHCHECK")[2].partition("CMD ")[2].splitlines()[0]
    python, *check = json.loads(words)
    assert python == "python"
    (tmp_path / "weft.yaml").write_text("host: 0.0.0.0\nmax-num-seqs: 8\nnum-pages: 100\n")
    with running(tmp_path, "--config", str(tmp_path / "weft.yaml")) as daemon:
        done = subprocess.run([sys.executable, *check], capture_output=True, text=True, timeout=240, check=False)
        assert f"{daemon.url} ok" in done.stdout.splitlines(), done
