"""The command line: precedence of flags, environment and file, and errors that name the change to make."""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, accepted_values
from weft.server.config import ServeConfig
from weft.server.daemon.cli import main
from weft.server.options import add_flags, load, options_of, unknown_variables


def test_flag_wins_over_environment_wins_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("port: 1111\nmax-num-seqs: 11\nseed: 3\nserved-model-name: [a, b]\n")
    monkeypatch.setenv("WEFT_PORT", "2222")
    monkeypatch.setenv("WEFT_MAX_NUM_SEQS", "22")
    config = load(ServeConfig, {"port": "3333"}, file)
    assert (config.port, config.max_num_seqs, config.seed) == (3333, 22, 3)
    assert config.served_model_name == ["a", "b"]


@pytest.mark.parametrize(
    "words", [["--api-key", "a", "b", "--api-key", "c"], ["--api-key", "a", "--api-key", "b", "--api-key", "c"]]
)
def test_a_list_given_in_parts_is_one_list(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, ServeConfig)
    assert load(ServeConfig, vars(parser.parse_args(words)), None).api_key == ["a", "b", "c"]


def test_lists_in_the_environment_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SERVED_MODEL_NAME", "a, b")
    assert load(ServeConfig, {}, None).served_model_name == ["a", "b"]


@pytest.mark.parametrize("name", ["api_key", "served_model_name", "cors_origin", "slo", "models"])
@pytest.mark.parametrize("value", ["", " , "])
def test_an_empty_variable_is_not_an_empty_list(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """An unset variable that should have held a key must not open the server to all clients."""
    monkeypatch.setenv(f"WEFT_{name.upper()}", value)
    with pytest.raises(ConfigError, match=f"^WEFT_{name.upper()}: "):
        load(ServeConfig, {}, None)


@pytest.mark.parametrize(
    "origin", ["*", "null", "http://localhost:3000", "https://[::1]:8", "app://notes.md", "file://"]
)
def test_any_origin_that_a_browser_sends_is_valid(origin: str) -> None:
    assert load(ServeConfig, {"cors_origin": [origin]}, None).cors_origin == [origin]


def test_text_that_is_not_utf8_is_reported_for_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's name may be any bytes; Python marks those that are not text."""
    with pytest.raises(ConfigError, match=r"^--model: must be UTF-8$"):
        load(ServeConfig, {"model": "/gr\udcf6sse"}, None)
    monkeypatch.setenv("WEFT_SERVED_MODEL_NAME", "a, gr\udcf6sse")
    with pytest.raises(ConfigError, match=r"^WEFT_SERVED_MODEL_NAME: "):
        load(ServeConfig, {}, None)


def test_variables_that_kubernetes_sets_for_a_service_called_weft_are_not_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEFT_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("WEFT_SERVICE_HOST", "10.0.0.1")
    assert load(ServeConfig, {}, None).port == 8000
    assert unknown_variables(ServeConfig) == []


def test_an_unknown_variable_names_the_nearest_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PAGESIZE", "64")
    assert unknown_variables(ServeConfig) == [
        "environment variable WEFT_PAGESIZE is not an option; did you mean WEFT_PAGE_SIZE?"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown option prot; did you mean port?"),
        ("max-num-sequences: 1", "unknown option max-num-sequences; did you mean max-num-seqs?"),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "is not YAML: line 1, column 5"),
        ("port: 1\nseed: [1, 2\nui: true", "is not YAML: line 3, column 3"),
    ],
)
def test_unusable_config_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load(ServeConfig, {}, file)


def test_a_bad_value_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("max-num-seqs: many")
    with pytest.raises(ConfigError, match=r"^max-num-seqs in .*weft\.yaml: "):
        load(ServeConfig, {}, file)


def test_a_single_value_is_accepted_for_a_list_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("served-model-name: solo")
    assert load(ServeConfig, {}, file).served_model_name == ["solo"]


@pytest.mark.parametrize(
    "flags",
    [{"seed": "-1"}, {"kv_cache_gib": "inf"}, {"max_body_mib": "inf"}, {"num_pages": "9" * 24}, {"port": "70000"}],
)
def test_impossible_numbers_are_refused(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^--"):
        load(ServeConfig, flags, None)


def test_a_missing_config_file() -> None:
    with pytest.raises(ConfigError, match="cannot read --config"):
        load(ServeConfig, {}, Path("/nowhere/weft.yaml"))


def test_a_bad_value_names_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^--max-num-seqs: .*'many'"):
        load(ServeConfig, {"max_num_seqs": "many"}, None)
    monkeypatch.setenv("WEFT_PAGE_SIZE", "0")
    with pytest.raises(ConfigError, match=r"^WEFT_PAGE_SIZE: "):
        load(ServeConfig, {}, None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_num_seqs", "abc", "must be a whole number from 1 to 4096, auto or auto:N, not 'abc'"),
        ("port", "x", "must be a whole number from 0 to 65535, not 'x'"),
        ("num_pages", "1.5", "must be a whole number from 2 to 2147483647, not '1.5'"),
        ("kv_cache_gib", "-1", "must be a number above 0, not '-1'"),
        ("gpu_memory_utilization", "2", "must be a number above 0, 0.98 at most, not '2'"),
        ("drain_timeout", "nan", "must be a finite number of 0 or more, not 'nan'"),
        ("ui", "maybe", "must be true or false, not 'maybe'"),
        ("log_format", "xml", "must be 'text' or 'json', not 'xml'"),
        ("kv_events_endpoint", "here", "must be tcp://ADDRESS:PORT or ipc://PATH, not 'here'"),
        ("kv_events_topic", "x" * 256, f"must be a text of 255 characters at most, not '{'x' * 78}…"),
        ("files_dir", "", "must not be empty"),
    ],
)
def test_an_impossible_value_is_reported_with_the_accepted_ones(
    name: str, value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text(f"{name}: {value!r}")
    flag = name.replace("_", "-")
    with pytest.raises(ConfigError, match=re.escape(f"{flag} in {file}: {message}") + "$"):
        load(ServeConfig, {}, file)
    monkeypatch.setenv(f"WEFT_{name.upper()}", value)
    with pytest.raises(ConfigError, match=f"^WEFT_{name.upper()}: {re.escape(message)}$"):
        load(ServeConfig, {}, None)
    with pytest.raises(ConfigError, match=f"^--{flag}: {re.escape(message)}$"):
        load(ServeConfig, {name: value}, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: [1]", "port in FILE: must be a whole number from 0 to 65535, not [1]"),
        ("port:", "port in FILE: must be a whole number from 0 to 65535, not null"),
        ("cors-origin: [a, 1]", "cors-origin in FILE: must be a list of texts, but number 2 is 1"),
        ("api_key: {secret: 1}", "api-key in FILE: must be a list of texts"),
        (
            "models: [5]",
            "models in FILE: must be a list of models, each a text or a mapping with a model, but number 1 is 5",
        ),
        ("models: [demo port=1]", "models: port is not an option of a single model"),
        (
            "models: [demo max-model-len=x]",
            "models, number 1: --max-model-len: must be a whole number of 2 or more, not 'x'",
        ),
    ],
)
def test_a_value_of_a_wrong_type_in_a_file_is_quoted_as_written(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(ServeConfig, {}, file)
    assert str(error.value).replace(str(file), "FILE") == message


def test_no_error_uses_the_words_of_a_library() -> None:
    for name, field in options_of(ServeConfig).items():
        takes = accepted_values(field)
        assert takes.startswith(("a ", "'", "true", "tcp://")), f"{name}: {takes}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--prot", "1"], "weft serve: unknown option --prot; did you mean --port?"),
        (["serve", "--late-lanch"], "weft serve: unknown option --late-lanch; did you mean --late-launch?"),
        (["srve"], "weft: unknown command srve; did you mean serve?"),
        (["serve", "a", "b"], "weft serve: unexpected argument b"),
        (["demo", "evaluate", "--limt", "3"], "weft demo evaluate: unknown option --limt; did you mean --limit?"),
        (["demo", "train", "--out", "x", "--stps", "3"], "unknown option --stps; did you mean --steps?"),
        (["bench", "server", "--stream", "3"], "unknown option --stream; did you mean --streams?"),
        (["bench", "offline", "--wrkload", "1:1:1"], "unknown option --wrkload; did you mean --workload?"),
        (["serve", "--zebra-stripes", "x"], "weft serve: unknown option --zebra-stripes\n"),
        (["version", "--nope"], "weft version: unknown option --nope\n"),
        (["bench", "kernels", "--secnds", "1"], "weft bench kernels: unknown option --secnds; did you mean --seconds?"),
        (["bench", "attention", "--models", "x"], "weft bench attention: needs a Hopper GPU\n"),
    ],
)
def test_unknown_options_and_commands_name_the_nearest(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_impossible_values_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--workload", "many"]) == 2
    error = capsys.readouterr().err
    assert "--workload" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("triton", "needs a GPU; on a CPU use auto or torch"),
        ("flash-attn", "needs a GPU; on a CPU use auto or torch"),
        ("xformers", "'triton', 'flash-attn' or 'torch', not 'xformers'"),
    ],
)
def test_an_attention_back_end_that_cannot_serve_is_a_one_line_error(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offline", "--device", "cpu", "--attention-backend", name, "--workload", "1:1:1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("weft bench offline: --attention-backend")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/nowhere/at/all"], "no model directory at /nowhere/at/all: give a Hugging Face model directory, ORG/NAME"),
        (["model.gguf"], "no model directory at model.gguf"),
        ([__file__], "is a file: give the Hugging Face model directory"),
        (["--plan", "/nope.json"], "cannot read the plan /nope.json"),
        (["--ssd-kv-path", "x"], "--ssd-kv-path needs --host-kv-gib"),
        (["--kv-cache-gib", "1", "--num-pages", "5"], "--kv-cache-gib or --num-pages, not both"),
    ],
)
def test_errors_that_need_no_engine_are_found_without_one(words: list[str], message: str) -> None:
    code = (
        "import sys; from weft.server.daemon.cli import main; status = main(['serve', *sys.argv[1:]]);"
        "sys.exit(99 if {'torch', 'transformers', 'fastapi'} & set(sys.modules) else status)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code, *words], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def _help(capsys: pytest.CaptureFixture[str], option: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["serve", option])
    assert ended.value.code == 0
    return capsys.readouterr().out


def _listed(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w, )?--([a-z][a-z-]*)", text, re.MULTILINE))


def test_every_option_is_in_one_group() -> None:
    for model in (EngineConfig, ServeConfig):
        grouped = [name for group in model.GROUPS for name in (*group.common, *group.more)]
        assert sorted(grouped) == sorted(options_of(model))


@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_puts_options_in_groups(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _help(capsys, option).splitlines()
    groups = [group for group in ServeConfig.GROUPS if group.common or option == "--help-all"]
    titles = [lines.index(f"{group.title}:") for group in groups]
    assert titles == sorted(titles)
    assert "internals" in groups[-1].title or option == "--help"


def test_help_lists_only_the_common_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(capsys, "--help")
    common = {name.replace("_", "-") for group in ServeConfig.GROUPS for name in group.common}
    assert _listed(text) == common | {"help", "help-all", "config"}
    assert len(_listed(text)) <= 35
    assert "internals" not in text
    assert "--help-all" in text


@pytest.mark.parametrize("module", ["pydantic", "weft.server.daemon.cli", "weft.server.daemon.daemon"])
def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(module: str) -> None:
    code = f"""
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["weft", "serve", "--port", "0"]
runpy.run_module("weft.server", run_name="__main__")
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=240
    )
    assert result.returncode in (-signal.SIGINT, 130), result
    assert (result.stdout, result.stderr) == ("", "")


def test_ctrl_c_while_options_are_read_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.server.daemon.cli.add_flags", interrupted)
    assert main(["load", "--rate", "5"]) == 130
    assert capsys.readouterr() == ("", "")


def test_help_all_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(capsys, "--help-all")
    assert _listed(text) >= {name.replace("_", "-") for name in options_of(ServeConfig)}
    assert "--share" not in text  # the daemon passes these to its engines


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys; from weft.server.daemon.cli import main; main(['version']);"
        "sys.exit(bool({'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False).returncode == 0
