"""`weft bench compare` starts servers in turn and puts each under the same load."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from weft.server.daemon.cli import main

LOAD = ["--rates", "40", "--requests", "4", "--input", "8", "--output", "3"]


@pytest.fixture
def stub(tmp_path: Path) -> str:
    """The command of a server that answers at once."""
    script = tmp_path / "stub.py"
    here = Path(__file__).parents[1] / "loadgen"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(here)!r})\n"
        "import asyncio\nfrom sse_server import Script, Stub\n"
        "async def serve():\n"
        "    server = await asyncio.start_server(Stub(Script()).handle, '127.0.0.1', int(sys.argv[1]))\n"
        "    await server.serve_forever()\n"
        "asyncio.run(serve())\n"
    )
    return f"{sys.executable} {script} {{port}}"


def test_two_servers_get_the_same_loads_in_alternating_order(
    stub: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["bench", "compare", f"a={stub}", f"b={stub}", *LOAD, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    measured = [line.split()[2] for line in printed.err.splitlines() if line.startswith("turn")]
    assert measured == ["a", "b", "b", "a"]
    data = json.loads((out / "compare.json").read_text())
    for name in ("a", "b"):
        server = data["servers"][name]
        assert len(server["starts"]) == 2
        assert {rate: [run["outcomes"] for run in runs] for rate, runs in server["runs"].items()} == {
            "40.0": [{"ok": 4}, {"ok": 4}]
        }
    rows = [line.split("|")[1:3] for line in printed.out.splitlines() if line.startswith("| 40")]
    assert [[cell.strip() for cell in row] for row in rows] == [["40", "a"], ["40", "b"]]
    assert (out / "compare.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("a=false {port}", "a ended with status 1: no output"),
        ("a=sh -c 'echo no such model >&2; exit 3' {port}", "a ended with status 3: no such model"),
        ("a=/no/such/program {port}", "a: cannot run /no/such/program: No such file or directory"),
    ],
    ids=["silent", "reason", "missing"],
)
def test_a_server_that_does_not_start_is_one_line(
    server: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", server, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [f"weft bench compare: {message}"]


@pytest.mark.parametrize(
    "flags", [["a=serve"], ["{port}"], ["a=x {port}", "--rates", "0"], ["a=x {port}"] * 2], ids=str
)
def test_a_wrong_command_line_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "compare", *flags])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
