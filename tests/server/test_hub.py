"""`weft pull`, `serve ORG/NAME` and `models` against a test hub: fetched files, kept files and messages."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from broken_disk import FAULTS, READS, BrokenDisk
from fake_hub import Hub, Repository, hub
from gguf_files import Kind, write_gguf
from live import running

from weft.engine.config import EngineConfig
from weft.engine.demo import MODEL_PATH

pytestmark = pytest.mark.slow

NAME = "acme/tiny-model"
TEMPLATE, POOLING = "additional_chat_templates/rag.jinja", "1_Pooling/config.json"
DENSE = "2_Dense/model.safetensors"
NOWHERE = "http://127.0.0.1:1"
WEIGHTS = "model.safetensors"
OWN = {file.name for file in MODEL_PATH.iterdir() if file.suffix != ".md"}
PIECE = 10 * 2**20
"""bytes that the hub's library writes at once"""


@pytest.fixture
def there() -> Iterator[Hub]:
    """A hub with the demo model under another name, and extra files that weft does not read."""
    files = {file.name: file.read_bytes() for file in MODEL_PATH.iterdir() if file.suffix != ".md"}
    more = dict.fromkeys(("pytorch_model.bin", "tiny.gguf", "consolidated.safetensors", "picture.png"), b"x" * 5000)
    more |= {"onnx/model.json": b"{}", "README.md": b"a model", f"{TEMPLATE}.md": b"no"}
    files |= {TEMPLATE: b"{{ documents }}", POOLING: b"{}"}
    with hub() as fake:
        fake.repositories[NAME] = Repository(files | more)
        yield fake


def starting(home: Path, endpoint: str, *words: str, **more: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "WEFT_"))}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", **more}
    command = [sys.executable, "-P", "-m", "weft.server", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def weft(home: Path, endpoint: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    with starting(home, endpoint, *words, **more) as process:
        out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def waits_for_weights(home: Path) -> bool:
    """Whether all other files of the model have arrived, and the first piece of its weights has."""
    folder = home / "hub" / f"models--{NAME.replace('/', '--')}"
    come = {str(file.relative_to(folder)).split("/", 2)[-1] for file in folder.glob("snapshots/*/**/*")}
    sizes = []
    for file in folder.glob("blobs/*.incomplete"):
        with contextlib.suppress(FileNotFoundError):  # renamed between the listing and the read
            sizes.append(file.stat().st_size)
    return come >= (OWN | {TEMPLATE, POOLING}) - {WEIGHTS} and sizes == [PIECE]


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode in (1, 2), result
    line, *more = result.stderr.strip().splitlines()
    assert not more, result.stderr
    return line


def test_only_needed_files_are_downloaded_and_only_once(there: Hub, tmp_path: Path) -> None:
    there.repositories[NAME].files[DENSE] = b"layer"
    result = weft(tmp_path, there.url, "pull", NAME)
    assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip().rpartition(": ")[2])
    assert {str(f.relative_to(path)) for f in path.rglob("*") if not f.is_dir()} == OWN | {TEMPLATE, POOLING, DENSE}
    assert (path / "model.safetensors").read_bytes() == (MODEL_PATH / "model.safetensors").read_bytes()
    assert EngineConfig(model=str(path)).model_name == NAME
    assert "downloading acme/tiny-model:" in result.stderr
    before = len(there.fetched())
    again = weft(tmp_path, there.url, "pull", NAME)
    assert (again.returncode, again.stderr, again.stdout) == (0, "", result.stdout)
    assert len(there.fetched()) == before


def test_present_files_are_used_without_a_network(there: Hub, tmp_path: Path) -> None:
    assert weft(tmp_path, there.url, "pull", NAME).returncode == 0
    offline = weft(tmp_path, NOWHERE, "plan", "model", "--model", NAME, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr


def resumed(there: Hub) -> list[str]:
    """The positions from which the weights were requested."""
    return [r for m, p, r in there.requests if m == "GET" and p.endswith(f"/{WEIGHTS}")]


def test_a_broken_connection_resumes_where_it_was(there: Hub, tmp_path: Path) -> None:
    whole = (MODEL_PATH / WEIGHTS).read_bytes()
    there.break_after[WEIGHTS] = [len(whole) - 1000]
    result = weft(tmp_path, there.url, "pull", NAME)
    assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip().rpartition(": ")[2])
    assert (path / WEIGHTS).read_bytes() == whole
    assert resumed(there) == ["", f"bytes={PIECE}-"]


def test_ctrl_c_ends_a_download_at_once_and_keeps_complete_files(there: Hub, tmp_path: Path) -> None:
    whole = (MODEL_PATH / WEIGHTS).read_bytes()
    released = threading.Event()
    there.hold[WEIGHTS] = (len(whole) - 1000, released)
    blobs = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}" / "blobs"
    with starting(tmp_path, there.url, "pull", NAME) as process:
        until(lambda: waits_for_weights(tmp_path))
        (left,) = blobs.glob("*.incomplete")
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == 130
        assert process.stderr is not None
        message = process.stderr.read()
    assert "stopped; complete files are kept" in message
    assert "Traceback" not in message
    released.set()
    os.utime(left, (0, 0))
    before = len(there.fetched())
    assert weft(tmp_path, there.url, "pull", NAME).returncode == 0
    assert there.fetched()[before:] == [WEIGHTS]
    assert not left.exists()


def test_a_model_of_several_shards_is_complete_when_all_are_there(there: Hub, tmp_path: Path) -> None:
    files = there.repositories[NAME].files
    weights = files.pop("model.safetensors")
    shards = {"model-1.safetensors": weights, "model-2.safetensors": b"\x02\0\0\0\0\0\0\0{}"}
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files |= shards | {"model.safetensors.index.json": json.dumps(index).encode()}
    path = Path(weft(tmp_path, there.url, "pull", NAME).stdout.strip().rpartition(": ")[2])
    assert {file.name for file in path.glob("*.safetensors")} == set(shards)
    (path / "model-2.safetensors").unlink()
    listed = weft(tmp_path, NOWHERE, "models").stdout
    assert "incomplete: missing model-2.safetensors" in " ".join(listed.split())
    assert "cannot be reached" in one_line(weft(tmp_path, NOWHERE, "serve", NAME))


def test_a_revision_is_a_separate_model(there: Hub, tmp_path: Path) -> None:
    there.repositories[NAME].branches["v2"] = "b" * 40
    path = weft(tmp_path, there.url, "pull", NAME, "--revision", "v2").stdout.strip()
    assert path.endswith("b" * 40)
    assert "no revision v3" in one_line(weft(tmp_path, there.url, "pull", NAME, "--revision", "v3"))


def test_a_token_is_sent(there: Hub, tmp_path: Path) -> None:
    there.repositories[NAME].token = "hf_secret"
    refused = one_line(weft(tmp_path, there.url, "serve", NAME))
    assert "no repository of that name" in refused
    assert "HF_TOKEN" in refused
    assert weft(tmp_path, there.url, "pull", NAME, HF_TOKEN="hf_secret").returncode == 0


@pytest.mark.parametrize(
    ("refuse", "message"),
    [((403, "GatedRepo"), "is gated: request access"), ((403, ""), "status 403"), ((503, ""), "status 503")],
)
def test_a_refusal_is_a_one_line_error(there: Hub, tmp_path: Path, refuse: tuple[int, str], message: str) -> None:
    there.repositories[NAME].refuse = refuse
    assert message in one_line(weft(tmp_path, there.url, "serve", NAME))


def test_a_gated_model_is_a_one_line_error_though_its_files_are_listed(there: Hub, tmp_path: Path) -> None:
    there.repositories[NAME].gated = True
    assert "is gated: request access at" in one_line(weft(tmp_path, there.url, "serve", NAME))


def test_a_script_gives_a_name_too(there: Hub, tmp_path: Path) -> None:
    code = f"from weft import LLM; llm = LLM({NAME!r}, device='cpu', num_pages=16); print(llm.engine.config.model_name)"
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": there.url}
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == NAME


def test_without_a_network_it_names_the_download_and_the_alternative(tmp_path: Path) -> None:
    line = one_line(weft(tmp_path, NOWHERE, "serve", NAME))
    for part in (
        NOWHERE,
        "cannot be reached",
        "config.json, the tokenizer and *.safetensors",
        str(tmp_path),
        "--local-dir",
    ):
        assert part in line
    assert "HF_HUB_OFFLINE is set" in one_line(weft(tmp_path, NOWHERE, "serve", NAME, HF_HUB_OFFLINE="1"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config.json": b'{"architectures": ["BertModel"]}'}, "BertModel is not supported"),
        ({"config.json": None, "tiny.gguf": None}, "no config.json: its weights are pickled"),
        ({"model.safetensors": None, "tiny.gguf": None}, "pickled"),
    ],
)
def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(
    there: Hub, tmp_path: Path, change: dict[str, bytes | None], message: str
) -> None:
    for name, content in change.items():
        there.repositories[NAME].files.pop(name)
        if content is not None:
            there.repositories[NAME].files[name] = content
    assert message in one_line(weft(tmp_path, there.url, "pull", NAME))
    assert set(there.fetched()) <= {"config.json"}


def test_a_model_is_served_under_the_given_name(there: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", there.url)
    with running(tmp_path, NAME, "--max-num-seqs", "4") as daemon:
        assert httpx.get(f"{daemon.url}/v1/models", timeout=240).json()["data"][0]["id"] == NAME


def test_a_gguf_file_of_a_repository_is_pulled_alone(there: Hub, tmp_path: Path) -> None:
    file = write_gguf(MODEL_PATH, tmp_path / "It-Q8_0.gguf", "llama", kind=Kind.Q8_0)
    there.repositories["acme/files"] = Repository(
        {"It-Q8_0.gguf": file.read_bytes(), "It-F16.gguf": b"x" * 5000, "README.md": b"files"}
    )
    assert "It-F16.gguf, It-Q8_0.gguf: give acme/files:FILE" in one_line(
        weft(tmp_path, there.url, "pull", "acme/files")
    )
    reported = one_line(weft(tmp_path, there.url, "inspect", "acme/files:q8_0"))
    assert "weft pull acme/files:It-Q8_0.gguf first" in reported
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    assert there.fetched() == []
    pulled = weft(tmp_path, there.url, "pull", "acme/files:q8_0", **cache)
    assert pulled.returncode == 0, pulled.stderr
    assert set(there.fetched()) == {"It-Q8_0.gguf"}
    path = Path(pulled.stdout.strip().rpartition(": ")[2])
    assert path.name == "It-Q8_0"
    assert (path / "It-Q8_0.gguf").read_bytes() == file.read_bytes()
    seen = weft(tmp_path, NOWHERE, "inspect", "acme/files:Q8_0", **cache)
    assert "LlamaForCausalLM" in seen.stdout
    rows = json.loads(weft(tmp_path, NOWHERE, "models", "--json").stdout)
    assert [(row["name"], row["architecture"], row["served"]) for row in rows[1:]] == [
        ("acme/files:It-Q8_0.gguf", "llama", True)
    ]


def test_models_lists_present_models_and_reasons_against_others(there: Hub, tmp_path: Path) -> None:
    weft(tmp_path, there.url, "pull", NAME)
    odd = tmp_path / "local" / "odd"
    odd.mkdir(parents=True)
    (odd / "config.json").write_text('{"architectures": ["BertModel"]}')
    rows = json.loads(weft(tmp_path, NOWHERE, "models", "--json", str(odd.parent)).stdout)
    assert [(row["name"], row["where"], row["served"]) for row in rows] == [
        ("demo", "weft", True),
        (NAME, "hub", True),
        (str(odd), "directory", False),
    ]
    more = sum(len(there.repositories[NAME].files[name]) for name in (TEMPLATE, POOLING))
    assert rows[1]["bytes"] - more == rows[0]["bytes"] - (MODEL_PATH / "README.md").stat().st_size
    assert "BertModel is not supported" in rows[2]["why_not"]


@pytest.fixture
def disk(tmp_path: Path) -> BrokenDisk:
    """The disk of the hub's cache."""
    try:
        return BrokenDisk(tmp_path / "disk", tmp_path / "shim")
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_download_on_a_failing_disk_says_so_and_continues_later(there: Hub, disk: BrokenDisk, fault: str) -> None:
    whole = (MODEL_PATH / WEIGHTS).read_bytes()
    released = threading.Event()
    there.hold[WEIGHTS] = (len(whole) - 1000, released)
    with starting(disk.folder, there.url, "pull", NAME, **disk.env) as process:
        until(lambda: waits_for_weights(disk.folder))
        disk.fail(FAULTS[fault])
        released.set()
        _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    downloading, refused = err.strip().splitlines()
    assert "downloading acme/tiny-model: " in downloading
    cause = os.strerror(errno.EIO if FAULTS[fault] == READS else FAULTS[fault])
    assert re.fullmatch(rf"weft pull: cannot use {disk.folder}/hub.*: {cause}", refused)
    again = weft(disk.folder, there.url, "pull", NAME, **disk.env)
    assert re.fullmatch(rf"weft pull: cannot use {disk.folder}/.*: {cause}", again.stderr.splitlines()[-1])
    disk.work()
    there.requests.clear()
    assert weft(disk.folder, there.url, "pull", NAME, **disk.env).returncode == 0
    assert there.fetched() == [WEIGHTS]
    assert next(disk.folder.rglob(WEIGHTS)).read_bytes() == whole


@pytest.mark.parametrize("fault", ["read-only", "slow"])
def test_a_start_needs_no_write_to_a_complete_cache(there: Hub, disk: BrokenDisk, tmp_path: Path, fault: str) -> None:
    """A disk that is slow delays the download only."""
    if fault == "slow":
        disk.hang(50)
    assert weft(disk.folder, there.url, "pull", NAME, **disk.env).returncode == 0
    if fault == "slow":
        disk.hang()
    else:
        disk.fail(FAULTS[fault])
    hub = {"HF_HOME": str(disk.folder), "HF_ENDPOINT": NOWHERE}
    with running(tmp_path, NAME, env=disk.env | hub) as daemon:
        body = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=240).status_code == 200
