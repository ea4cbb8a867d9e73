"""`weft chat`, `doctor` and `completion`: against a server, a machine and real shells."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import pty
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants
from stub import Script, Server, serving

from weft.engine.config import EngineConfig
from weft.engine.demo import MODEL_PATH
from weft.engine.errors import ConfigError, WeftError
from weft.engine.runner.device.compile_job import use_cache
from weft.server.commands.chat import _piped, shown
from weft.server.commands.completion import script, walk
from weft.server.commands.doctor import caches, images, port
from weft.server.commands.endpoint import Endpoint
from weft.server.commands.models import find
from weft.server.config import ServeConfig
from weft.server.daemon import cli
from weft.server.daemon.cli import _parser, all_commands, main
from weft.server.options import Parser, options_of


class Terminal:
    """`weft chat` on a separate terminal."""

    def __init__(self, *words: str) -> None:
        self._end, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "weft.server", "chat", *words],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "WEFT_API_KEY": ""},
        )
        os.close(inner)
        os.set_blocking(self._end, False)
        self.text = ""

    def type(self, line: str) -> None:
        os.write(self._end, line.encode())

    async def until(self, part: str) -> None:
        """Wait until the next output contains this. Earlier output is dropped."""
        async with asyncio.timeout(240):
            while part not in self.text:
                try:
                    self.text += os.read(self._end, 65536).decode(errors="replace")
                except BlockingIOError:
                    await asyncio.sleep(0.02)
        self.text = self.text.partition(part)[2]

    async def ended(self) -> int:
        async with asyncio.timeout(240):
            while self.process.poll() is None:
                await asyncio.sleep(0.02)
        return int(self.process.returncode)


@asynccontextmanager
async def chatting(*words: str) -> AsyncIterator[Terminal]:
    terminal = Terminal(*words)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()


async def ask(server: Server, question: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    """One question through a pipe."""
    command = [sys.executable, "-P", "-m", "weft.server", "chat", "--url", server.url, *words]
    return await asyncio.to_thread(
        subprocess.run, command, input=question.encode(), capture_output=True, timeout=240, check=False
    )


# -- chat


@pytest.mark.slow
async def test_a_conversation_remembers_forgets_and_has_a_system_message() -> None:
    async with serving() as server, chatting("--url", server.url) as terminal:
        server.engine.script = Script("hello world")
        await terminal.until("> ")
        terminal.type("first\n")
        await terminal.until("hello world")
        await terminal.until("> ")
        terminal.type("second \\\n")
        await terminal.until(". ")
        terminal.type("line\n")
        await terminal.until("hello world")
        await terminal.until("> ")
        prompt = server.engine.tokenizer.decode(server.engine.prompt())
        for part in ("first", "hello world", "second \nline"):
            assert part in prompt
        terminal.type("/clear\n")
        await terminal.until("> ")
        terminal.type("/system Be brief.\n")
        await terminal.until("> ")
        terminal.type("third\n")
        await terminal.until("hello world")
        await terminal.until("> ")
        prompt = server.engine.tokenizer.decode(server.engine.prompt())
        assert "Be brief." in prompt
        assert "first" not in prompt
        terminal.type("\x04")
        assert await terminal.ended() == 0


@pytest.mark.slow
async def test_ctrl_c_ends_the_answer_and_the_conversation_continues() -> None:
    async with serving() as server, chatting("--url", server.url) as terminal:
        server.engine.script = Script(ids=[70] * 400, stop_after=3)
        await terminal.until("> ")
        terminal.type("go on\n")
        await server.settle(lambda: len(server.engine.added) == 1)
        await asyncio.sleep(0.2)
        terminal.process.send_signal(signal.SIGINT)
        await terminal.until("stopped")
        await server.settle(lambda: len(server.engine.aborted) == 1)
        server.engine.script = Script("again")
        await terminal.until("> ")
        terminal.type("and now\n")
        await terminal.until("again")
        await terminal.until("> ")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.until("> ")
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.ended() == 0


@pytest.mark.slow
async def test_a_question_from_a_pipe_gets_only_its_answer_on_stdout() -> None:
    async with serving() as server:
        server.engine.script = Script("42")
        result = await ask(server, "6 * 7?", "--max-tokens", "2")
        assert (result.returncode, result.stdout) == (0, b"42\n")
        refused = await ask(server, "6 * 7?", "another-model")
        assert refused.returncode == 1
        assert b"does not serve another-model, only stub" in refused.stderr
    async with serving(api_key=["k"]) as server:
        assert b"--api-key" in (await ask(server, "hi")).stderr
        assert (await ask(server, "hi", "--api-key", "k")).returncode == 0


@pytest.mark.parametrize("words", [["models"], ["completion", "bash"]])
def test_unwritable_output_is_a_one_line_error(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-P", "-m", "weft.server", *words],
            stdout=full, stderr=subprocess.PIPE, timeout=240, check=False,
        )  # fmt: skip
    assert result.returncode == 1
    assert b"weft: cannot write to standard output: No space left on device" in result.stderr
    assert b"Traceback" not in result.stderr


def test_a_question_that_is_not_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What is \xff?")))
    with pytest.raises(ConfigError, match="not UTF-8 at byte 8"):
        _piped()


@pytest.mark.slow
async def test_an_error_of_the_server_is_one_line_and_status_1() -> None:
    async with serving() as server:
        result = await ask(server, "hi", "--max-tokens", "100000")
        assert result.returncode == 1
        assert b"maximum context length" in result.stderr
        assert b"Traceback" not in result.stderr


@pytest.mark.slow
def test_its_own_server_ends_with_the_chat() -> None:
    mark = f"WHOSE_DAEMON_IS_THIS={uuid.uuid4()}"
    result = subprocess.run(
        [sys.executable, "-P", "-m", "weft.server", "chat", "demo"],
        input=b"What is 12 + 30?",
        env={**os.environ, **dict([mark.split("=")])},
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, b"42\n")
    end = time.monotonic() + 240
    while left := marked(mark):
        assert time.monotonic() < end, left
        time.sleep(0.1)


def marked(mark: str) -> list[int]:
    """Processes with this in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def test_a_model_cannot_command_the_terminal() -> None:
    assert shown("a\x1b[2Jb\x07\r\n\tc\u202e é 漢 👩\u200d🚀") == "a\ufffd[2Jb\ufffd\ufffd\n\tc\ufffd é 漢 👩\u200d🚀"


def test_an_invalid_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="--url"):
        Endpoint("ftp://x", None, None)


def test_no_server_at_a_url_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert issubclass(ConfigError, WeftError)


# -- completion


def test_every_command_and_option_is_in_the_scripts() -> None:
    parser = _parser()
    for shell in ("bash", "zsh", "fish"):
        text = script(parser, shell)
        for command in all_commands()[0]:
            assert command.name.split()[-1] in text
        for name in options_of(ServeConfig):
            assert name.replace("_", "-") in text
    assert {" ".join(word.words) for word in walk(parser)} >= {command.name for command in all_commands()[0]}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_accepts_its_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    result = subprocess.run([shell, "-n"], input=script(_parser(), shell), text=True, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["weft", "se"], {"serve", "search"}),
        (["weft", "bench", "ker"], {"kernels"}),
        (["weft", "serve", "--max-num"], {"--max-num-seqs", "--max-num-batched-tokens"}),
        (["weft", "serve", "--device", "c"], {"cpu", "cuda"}),
        (["weft", "completion", "z"], {"zsh"}),
    ],
)
def test_bash_completes(line: list[str], expected: set[str]) -> None:
    words = " ".join(line)
    requested = f"COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _weft; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    result = subprocess.run(
        ["bash", "--norc"], input=script(_parser(), "bash") + requested, text=True, capture_output=True, check=True
    )
    assert set(result.stdout.split()) == expected


def test_no_folder_for_the_log_of_its_own_server_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 1 + 2?\n"))
    assert main(["chat", "demo"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "set TMPDIR" in line


def test_an_incomplete_model_is_reported_by_one_command_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(MODEL_PATH / "config.json", tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert main(["chat", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"weft chat: {tmp_path} lacks")


def test_models_misses_a_tokenizer_as_serve_does(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(MODEL_PATH / name)
    (found,) = [model for model in find([tmp_path]) if model.where == "directory"]
    assert found.why_not() == "incomplete: missing tokenizer.json"
    (tmp_path / "tokenizer.json").symlink_to(MODEL_PATH / "tokenizer.json")
    assert found.why_not() is None


def test_truncated_weights_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(MODEL_PATH / name)
    weights = (MODEL_PATH / "model.safetensors").read_bytes()
    for size in (0, 100, len(weights) - 1):
        (tmp_path / "model.safetensors").write_bytes(weights[:size])
        assert main(["models", str(tmp_path)]) == 0
        assert "no: truncated: model.safetensors" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(tmp_path)]) == 0
    assert re.search(r"^weights +cannot be read whole: model.safetensors$", capsys.readouterr().out, re.MULTILINE)


# -- folders of another user


@contextlib.contextmanager
def closed_folder() -> Iterator[Path]:
    """`open` holds a model, `closed` another one that this user may not read. Root becomes nobody meanwhile, who may
    not read root's own hub cache either."""
    path, was = Path(tempfile.mkdtemp()), os.geteuid()
    path.chmod(0o755)
    for name in ("open", "closed"):
        (path / name).mkdir()
        (path / name / "config.json").write_text("{}")
    closed = path / "closed"
    closed.chmod(0)
    try:
        if was == 0:
            os.seteuid(65534)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HUB_CACHE", str(path / "hub"))
            yield path
    finally:
        os.seteuid(was)
        closed.chmod(0o755)
        shutil.rmtree(path)


@pytest.mark.parametrize("command", [["inspect"], ["quantize"], ["batch", "IN"], ["models"]])
def test_an_unreadable_model_is_a_one_line_error(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    after = ["OUT"] if command == ["quantize"] else []

    def status(where: str) -> int | str | None:
        try:
            return main([*command, where, *after])
        except SystemExit as error:  # a flag's own check
            return error.code

    status("nowhere/at/all")  # imports what it needs, which nobody may not
    capsys.readouterr()
    with closed_folder() as path:
        where = path / "closed" if command == ["models"] else path / "closed" / "inside"
        assert status(str(where)) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"weft {command[0]}: ")


def test_models_lists_the_others_next_to_an_unreadable_one() -> None:
    with closed_folder() as path:
        assert [model.path for model in find([path]) if model.where == "directory"] == [path / "open"]


# -- doctor


def doctor(*words: str, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status, and findings by name."""
    result = subprocess.run(
        [sys.executable, "-P", "-m", "weft.server", "doctor", "--json", *words],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    answer = json.loads(result.stdout)
    assert answer["ok"] == (result.returncode == 0)
    return result.returncode, {finding["name"]: finding for finding in answer["findings"]}


@pytest.mark.slow
def test_doctor_reports_problems_and_fixes(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)  # sockets have no path there
    long.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        _, found = doctor(
            "--port", str(taken.getsockname()[1]), TMPDIR=str(long), XDG_CACHE_HOME="/proc/no", HF_HOME=str(tmp_path)
        )
    assert (found["port"]["state"], found["sockets"]["state"]) == ("warn", "ok")
    assert found["tuned kernels"]["state"] == found["hub"]["state"] == "warn"
    assert all(finding["do"] for finding in found.values() if finding["state"] != "ok")
    assert found["python"]["state"] == found["shared memory"]["state"] == "ok"


@pytest.mark.slow
def test_doctor_accepts_a_machine_that_serves(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    status, found = doctor("--port", port, HF_HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert status == 0
    assert not [finding for finding in found.values() if finding["state"] == "bad"]
    assert {"torch", "gpu", "open files", "disk", "machine"} <= set(found)


def test_doctor_checks_the_servers_kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path)})
    found = {finding.name: finding for finding in caches(argparse.Namespace())}
    use_cache(EngineConfig())
    assert found["compiled kernels"].what == os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "weft" / "triton")
    monkeypatch.setattr(os, "environ", {"WEFT_CACHE_DIR": str(tmp_path / "kept")})
    assert next(caches(argparse.Namespace())).what == str(tmp_path / "kept")


def test_doctor_finds_a_torchvision_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    broken, pillow = images(argparse.Namespace())
    assert (broken.name, broken.state, pillow.state) == ("torchvision", "bad", "ok")
    assert "operator nms does not exist" in broken.what


def test_doctor_names_a_variable_that_no_server_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"WEFT_PORT": "eighty", "HOME": "/"})
    (finding,) = caches(argparse.Namespace())
    assert finding.state == "bad"
    assert "WEFT_PORT" in finding.what


def test_doctor_finds_no_port_above_the_last() -> None:
    (finding,) = port(argparse.Namespace(host="127.0.0.1", port=65536 + 8000))
    assert (finding.state, finding.what) == ("bad", "73536 is not a port")


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"WEFT_CACHE_DIR": "/kept"}, "/kept"),
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/weft"),
        ({"HOME": "/home/me"}, "/home/me/.cache/weft"),
        ({}, "has no home directory: set HOME or XDG_CACHE_HOME\n"),
    ],
)
def test_kernel_benchmarks_use_the_servers_tile_cache(
    environ: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = pytest.importorskip("weft.tools.kernels.bench", exc_type=ImportError)
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.torch.cuda, "get_device_name", lambda: "a GPU")
    looked: list[Path] = []
    monkeypatch.setattr(bench.tuned, "machine", lambda: None)
    monkeypatch.setattr(bench.tuned, "read_cache", lambda folder, _of: looked.append(folder) or {})
    monkeypatch.setattr(bench.tuned, "use", lambda _known: None)
    monkeypatch.setattr(bench, "report", lambda *_: [])
    status = main(["bench", "kernels"])
    assert (status, looked) == ((0, [Path(folder)]) if environ else (2, []))
    assert environ or capsys.readouterr().err.endswith(folder)


def test_the_help_of_a_benchmark_needs_no_home(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("weft.tools.kernels.bench_attention", exc_type=ImportError)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "attention", "--help"])
    assert "--keep" in capsys.readouterr().out


def test_a_user_without_a_home_gets_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user of a container without an entry in /etc/passwd."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="set HOME or XDG_CACHE_HOME"):
        use_cache(EngineConfig())
    (finding,) = caches(argparse.Namespace())
    assert (finding.state, finding.do) == ("bad", "set HOME or XDG_CACHE_HOME to a folder")
    with pytest.raises(ConfigError, match="~/weft: unknown home directory"):
        _ = EngineConfig(cache_dir="~/weft").cache_path


def test_a_hub_cache_in_a_missing_home_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~/.cache/huggingface/hub")
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    for command in (["models"], ["inspect", "org/name"], ["pull", "org/name"]):
        assert main(command) == 2
        assert re.fullmatch(r"weft \w+: user \d+ has no home directory: set HOME or HF_HOME\n", capsys.readouterr().err)


@pytest.mark.parametrize("columns", ["", "abc", "0", "-5", "40", "100000"])
def test_help_is_printed_for_any_value_of_columns(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = Parser(prog="weft", description="word " * 60).format_help().splitlines()
    assert max(map(len, lines)) <= (40 if columns == "40" else 110)


def test_tables_are_complete_in_a_pipe(tmp_path: Path) -> None:
    folder = tmp_path / ("a-model-whose-name-is-as-long-as-names-of-the-hub-are-" * 3)
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["SomeArchitectureForCausalLM"], "model_type": "none"}')
    env = {**os.environ, "COLUMNS": "40", "HF_HOME": str(tmp_path)}
    for command, words in (
        (["plan", "model", "--model", "demo"], ["operation", "prefill", "gate_up", "compute ms", "memory"]),
        (["models", str(tmp_path)], [str(folder), "SomeArchitectureForCausalLM"]),
    ):
        made = subprocess.run(
            [sys.executable, "-m", "weft.server", *command], env=env, capture_output=True, text=True, timeout=240
        )
        assert not [word for word in words if word not in made.stdout], made.stdout + made.stderr
        assert "…" not in made.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [["version"], ["plan", "model", "--model", "demo"]])
def test_a_reader_that_closes_its_pipe_causes_no_traceback(command: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(
        [sys.executable, "-m", "weft.server", *command], env=env, stdout=writer, stderr=subprocess.PIPE, timeout=240
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.parametrize("redirect", [">&-", "<&-", ">&- 2>&- <&-"])
def test_commands_run_with_closed_streams(redirect: str) -> None:
    line = f'exec "{sys.executable}" -m weft.server plan model --model demo {redirect}'
    ended = subprocess.run(["sh", "-c", line], capture_output=True, timeout=240)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_character_missing_in_the_terminals_encoding_is_replaced() -> None:
    plan = Path(cli.__file__).parents[2] / "engine" / "plans" / "llama-3-8b-h200.json"
    shown = subprocess.run(
        [sys.executable, "-m", "weft.server", "plan", "show", str(plan)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=240,
    )  # fmt: skip
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"pipeline 1 of 4" in shown.stdout
