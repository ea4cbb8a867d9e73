"""The installer: the torch build it chooses, its summary of pip's output, the versions it requests."""

from __future__ import annotations

import http.server
import re
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import weft

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools/install"))
import package  # noqa: E402
import packages  # noqa: E402
import resolve  # noqa: E402
import torch_build  # noqa: E402

VERSION = "2.13.0"
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


class Index(NamedTuple):
    url: str
    requested: list[str]


@pytest.fixture
def index() -> Iterator[Index]:
    """A package index that contains only torch."""
    requested: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            self.send_response(200 if self.path == "/torch/" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Index(f"http://127.0.0.1:{server.server_port}", requested)
        server.shutdown()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without torch, GPU or local wheels. A folder for programs is first on the path."""
    monkeypatch.setattr(torch_build, "installed", lambda: "")
    monkeypatch.setattr(torch_build, "local_wheel", lambda _: None)
    monkeypatch.setattr(torch_build, "has_nvidia_gpu", lambda: False)
    return tmp_path


def _wheel(folder: Path, version: str) -> Path:
    """The smallest torch wheel that pip accepts."""
    path = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        info = f"torch-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def _choose(url: str, device: str = "auto") -> torch_build.Build:
    build = torch_build.choose(VERSION, device, ["--index", url])
    assert build is not None
    return build


@pytest.mark.usefixtures("machine")
def test_without_a_gpu_the_cpu_index_is_used_if_it_answers(index: Index) -> None:
    build = _choose(index.url)
    assert build.pip == ["--no-deps", "--index", index.url, f"torch=={VERSION}"]
    assert index.requested == ["/torch/"]
    assert "no NVIDIA GPU: the CPU build" in build.why


@pytest.mark.usefixtures("machine")
def test_an_index_without_torch_is_none(index: Index) -> None:
    assert "does not answer" in _choose(index.url + "/elsewhere").why


@pytest.mark.usefixtures("machine")
def test_without_the_cpu_index_the_default_is_used_and_its_size_reported() -> None:
    build = _choose("http://127.0.0.1:1")
    assert build.pip == [f"torch=={VERSION}"]
    assert re.search(r"does not answer: the registry's default build, .* GB to download, .* GB on disk", build.why)


def test_without_the_cpu_index_a_local_wheel_is_used_and_its_size_reported(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = torch_build.Wheel(f"{VERSION}+cpu", _wheel(machine, f"{VERSION}+cpu"))
    monkeypatch.setattr(torch_build, "local_wheel", lambda _: wheel)
    build = _choose("http://127.0.0.1:1")
    assert build.pip == ["--no-deps", "--no-index", f"torch=={VERSION}"]
    assert build.why.endswith(f"the local wheel {wheel.path.name}, 0 MB")


def test_with_a_gpu_the_cuda_build_is_used_and_no_index_queried(
    machine: Path, monkeypatch: pytest.MonkeyPatch, index: Index
) -> None:
    monkeypatch.setattr(torch_build, "has_nvidia_gpu", lambda: True)
    wheel = torch_build.Wheel(f"{VERSION}+cpu", _wheel(machine, f"{VERSION}+cpu"))
    monkeypatch.setattr(torch_build, "local_wheel", lambda _: wheel)
    build = _choose(index.url)
    assert build.pip == [f"torch=={VERSION},!={VERSION}+cpu"]  # a local CPU build would be the higher version
    assert "with CUDA" in build.why
    assert index.requested == []
    assert _choose(index.url, "cpu").pip[0] == "--no-deps"


@pytest.mark.usefixtures("machine")
def test_cuda_is_used_on_request(index: Index) -> None:
    assert "with CUDA" in _choose(index.url, "cuda").why


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("have", "device", "stays"),
    [
        (f"{VERSION}+cpu", "cpu", True),
        (VERSION, "cpu", True),
        (VERSION, "cuda", True),
        (f"{VERSION}+cpu", "cuda", False),
        ("2.12.0+cpu", "cpu", False),
    ],
)
def test_an_installed_torch_that_fits_is_kept(
    have: str, device: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_build, "installed", lambda: have)
    assert (torch_build.choose(VERSION, device, ["--index", "http://127.0.0.1:1"]) is None) is stays


@pytest.mark.parametrize(("script", "found"), [("echo 'GPU 0: NVIDIA H200'", True), ("exit 9", False), ("", False)])
def test_only_gpus_listed_by_nvidia_smi_count(
    script: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has an NVIDIA GPU")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not torch_build.has_nvidia_gpu()
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert torch_build.has_nvidia_gpu() is found


def test_an_index_that_does_not_answer_is_given_up_in_time() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as never_answers:
        begun = time.monotonic()
        assert not torch_build.answers(f"http://127.0.0.1:{never_answers.server_port}/", seconds=0.3)
        assert time.monotonic() - begun < 240


@pytest.mark.parametrize("local", ["", "+cpu"])
def test_pip_finds_the_wheels_of_its_configured_folders(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert torch_build.local_wheel(VERSION) is None
    path = _wheel(tmp_path, VERSION + local)
    assert torch_build.local_wheel(VERSION) == (VERSION + local, path)


def test_constraints_pin_torch_and_a_project_that_allows_it() -> None:
    assert torch_build.pinned(CONSTRAINTS) == VERSION
    with pytest.raises(ValueError, match="no version of torch"):
        torch_build.pinned("triton==3.7.1\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11,<2.14" in project["dependencies"]
    assert resolve.LOWEST_TORCH[0] == "torch==2.11.0"


def test_other_versions_replace_the_pinned_ones() -> None:
    changed = resolve.repin(CONSTRAINTS, resolve.LOWEST_TORCH)
    assert set(resolve.LOWEST_TORCH) == set(changed.splitlines()) - set(CONSTRAINTS.splitlines())
    assert len(changed.splitlines()) == len(CONSTRAINTS.splitlines())
    with pytest.raises(ValueError, match="tourch is not among"):
        resolve.repin(CONSTRAINTS, ["tourch==1"])


def test_resolving_uses_only_the_configured_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FIND_LINKS", "/wheels"), ("EXTRA_INDEX_URL", "file:///more"), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("UV_FIND_LINKS", "/wheels")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    environment = resolve.index_alone()
    assert environment["UV_DEFAULT_INDEX"] == environment["PIP_INDEX_URL"] == "http://127.0.0.1:1/simple"
    assert not environment.keys() & {"PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_FIND_LINKS"}


def test_pip_output_is_summarised_in_a_few_lines() -> None:
    tally = packages.Tally()
    lines = [
        "Collecting a",
        "  Downloading a-1-py3-none-any.whl.metadata (2 kB)",
        "  Downloading a-1-py3-none-any.whl (500 kB)",
        "Downloading b-2-py3-none-any.whl (12.5 MB)",
        "  Using cached c-3-py3-none-any.whl (90.0 MB)",
        "Installing collected packages: c, b, a",
    ]
    reported = [tally.take(line) for line in lines]
    assert [line for line in reported if line] == ["  b-2-py3-none-any.whl  12 MB", "  unpacking 3 packages"]
    assert tally.summary(3.2) == "  3 packages, 13 MB downloaded, 3 s"


def test_the_output_of_a_failing_pip_is_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    fake = [sys.executable, "-c", "print('ResolutionImpossible'); raise SystemExit(1)"]
    assert packages.install("weft", fake, []) == 1
    assert capsys.readouterr().out == "weft\nResolutionImpossible\n"


def test_incomplete_archives_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "weft-1.tar.gz", "w:gz") as source:
        for name in (*package.SOURCE, "engine/__pycache__/x.pyc"):
            if name != "Makefile":
                source.add(ROOT / "README.md", f"weft-1/{name}")
    with zipfile.ZipFile(tmp_path / "weft-1.whl", "w") as wheel:
        for name in package.WHEEL[1:]:
            wheel.writestr(f"weft/{name}", "")
    assert package.check(tmp_path) == [
        "weft-1.tar.gz lacks Makefile",
        "weft-1.tar.gz has engine/__pycache__/x.pyc",
        f"weft-1.whl lacks {package.WHEEL[0]}",
    ]
    assert package.check(tmp_path / "nothing") == [
        f"{tmp_path}/nothing has 0 files *.tar.gz",
        f"{tmp_path}/nothing has 0 files *.whl",
    ]


def test_required_files_of_the_source_distribution_are_in_the_checkout() -> None:
    assert [name for name in package.SOURCE if not (ROOT / name).is_file()] == []


def test_the_scripts_run_as_the_makefile_runs_them() -> None:
    command = [sys.executable, "-P", ROOT / "tools/install", "pins", "torch==2.11.0"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == CONSTRAINTS.replace(f"torch=={VERSION}", "torch==2.11.0")


def test_hints_in_a_checkout_name_the_checkout() -> None:
    assert weft.install_hint("loadgen") == "pip install -e '.[loadgen]'"


def test_hints_of_an_installed_weft_name_packages_of_the_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = ["fastapi>=0.115", 'triton<4,>=3.6; extra == "gpu"', "a>=1; extra == 'otel'", "b; extra == 'otel'"]
    monkeypatch.setattr(weft, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.metadata.requires", lambda _: listed)
    assert weft.install_hint("gpu") == "pip install 'triton<4,>=3.6'"
    assert weft.install_hint("otel") == "pip install 'a>=1' 'b'"
    assert weft.install_hint("none") == "install weft's extra none"


def test_every_hint_names_an_extra_that_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    folders = ("kernels", "engine", "autosearch", "loadgen", "server")
    sources = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    named = set(re.findall(r"install_hint\(['\"]([\w-]+)['\"]\)", sources))
    assert named == {"flash-attn", "gpu", "loadgen", "otel", "search", "vision"}
    assert named <= extras.keys()
    assert "weft-serve[" not in sources


def test_workflows_run_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        steps = [step for job in jobs.values() for step in job["steps"]]
        assert {run.split()[1] for step in steps if (run := step.get("run", "")).startswith("make ")} <= targets
        assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in steps if "uses" in step)


def test_workflows_test_what_the_project_supports() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [found[1] for line in classifiers if (found := re.search(r":: (3\.\d+)$", line))]
    assert jobs["test"]["strategy"]["matrix"]["python"] == versions == list(resolve.PYTHONS)
    (lowest,) = jobs["test"]["strategy"]["matrix"]["include"]
    assert tuple(lowest["pins"].split()) == resolve.LOWEST_TORCH
