"""LoRA adapters over HTTP: loaded, replaced and unloaded while two API processes serve, and after a killed engine."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from live import Daemon, running
from transformers import AutoModelForCausalLM

from weft.engine.config import EngineConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from lora_files import merged, save_adapter

pytestmark = pytest.mark.slow

ADMIN = {"Authorization": "Bearer operator"}
PROMPT = "Question: What is 12 + 30?\nAnswer:" * 3


class Served:
    """A daemon with the demo model, adapters in a folder, and the answers of the merged models."""

    def __init__(self, daemon: Daemon, folder: Path, base: Any) -> None:
        self.daemon, self.folder, self.base = daemon, folder, base
        self.ids = httpx.post(f"{daemon.url}/tokenize", json={"prompt": PROMPT}, timeout=240).json()["tokens"]

    def ask(self, model: str | None = None, **body: Any) -> httpx.Response:
        """Ask on a new connection, which any of the API processes may take."""
        fields = {"model": model, "prompt": self.ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return httpx.post(
            f"{self.daemon.url}/v1/completions", json={**fields, "return_token_ids": True, **body}, timeout=240
        )

    def tokens(self, model: str | None = None, **body: Any) -> list[int]:
        answer = self.ask(model, **body)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    def expected(self, adapter: Path | None) -> list[int]:
        model = self.base if adapter is None else merged(self.base, [adapter])[0]
        ids = list(self.ids)
        with torch.inference_mode():
            for _ in range(8):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(self.ids) :]

    def admin(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.daemon.url + path, json=body, headers=ADMIN, timeout=240)

    def everywhere(self, name: str, served: bool) -> None:
        """Wait until every API process knows that the name is served, or that it is not."""
        seen, end = 0, time.monotonic() + 240
        while seen < 20:
            models = httpx.get(f"{self.daemon.url}/v1/models", timeout=240).json()["data"]
            seen = seen + 1 if (name in [model["id"] for model in models]) == served else 0
            assert time.monotonic() < end


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, base = tmp_path_factory.mktemp("adapters"), None
    base = AutoModelForCausalLM.from_pretrained(EngineConfig(model="demo").model_path, dtype=torch.float32)
    for seed, name in enumerate(("configured", "found", "loaded", "spare")):
        save_adapter(folder / name, base, seed=seed, strength=0.2)
    options = ("--lora-modules", f"configured={folder / 'configured'}", "--lora-dir", str(folder), "--max-loras", "2",
               "--api-workers", "2", "--dtype", "float32", "--admin-api-key", "operator")  # fmt: skip
    with running(tmp_path_factory.mktemp("daemon"), *options) as daemon:
        yield Served(daemon, folder, base)


def test_requests_choose_an_adapter_by_name(served: Served) -> None:
    assert served.tokens() == served.expected(None)
    expected = served.expected(served.folder / "configured")
    assert expected != served.expected(None)
    assert served.tokens("configured") == expected
    assert served.tokens("demo:configured") == expected
    assert served.tokens(lora_path="configured") == expected


def test_an_adapter_in_the_folder_is_loaded_by_its_first_request(served: Served) -> None:
    for name in ("found", "spare", "configured", "found"):  # more than fit in memory at once
        assert served.tokens(name) == served.expected(served.folder / name), name


def test_models_list_adapters_with_their_base(served: Served) -> None:
    served.everywhere("configured", True)
    models = {model["id"]: model for model in httpx.get(f"{served.daemon.url}/v1/models", timeout=240).json()["data"]}
    assert models["demo"]["parent"] is None
    assert models["configured"]["parent"] == "demo"
    assert models["configured"]["root"] == str(served.folder / "configured")
    one = httpx.get(f"{served.daemon.url}/v1/models/configured", timeout=240).json()
    assert one["parent"] == "demo"


def test_operators_load_replace_and_unload(served: Served) -> None:
    first, second = served.folder / "loaded", served.folder / "replacement"
    save_adapter(second, served.base, seed=9, strength=0.2)
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    answer = served.admin(load, lora_name="mine", lora_path=str(first))
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    served.everywhere("mine", True)
    assert served.tokens("mine") == served.expected(first)
    absent = served.admin(load, lora_name="absent", lora_path=str(served.folder / "absent"))
    assert (absent.status_code, absent.json()["type"]) == (404, "NotFoundError")
    again = served.admin(load, lora_name="mine", lora_path=str(first))
    assert again.status_code == 400
    assert again.json()["type"] == "InvalidUserInput"
    assert "already been loaded" in again.json()["message"]
    assert served.admin(load, lora_name="mine", lora_path=str(second), load_inplace=True).status_code == 200
    expected, end = served.expected(second), time.monotonic() + 240
    while served.tokens("mine") != expected:  # the other process may still name the first content
        assert time.monotonic() < end
    assert served.admin(unload, lora_name="mine").text == "Success: LoRA adapter 'mine' removed successfully."
    served.everywhere("mine", False)
    assert served.ask("mine").status_code == 404
    assert served.admin(unload, lora_name="mine").json()["type"] == "NotFoundError"


def test_only_operators_load_and_only_from_the_folder(served: Served, tmp_path: Path) -> None:
    body = {"lora_name": "evil", "lora_path": str(served.folder / "spare")}
    for headers in ({}, {"Authorization": "Bearer other"}):
        assert (
            httpx.post(f"{served.daemon.url}/v1/load_lora_adapter", json=body, headers=headers, timeout=240).status_code
            == 401
        )
    outside = save_adapter(tmp_path / "outside", served.base)
    (served.folder / "link").symlink_to(outside)
    shutil.copytree(served.folder / "spare", served.folder / "inner")
    (served.folder / "inner" / "adapter_model.safetensors").unlink()
    (served.folder / "inner" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for path in (str(outside), str(served.folder / ".." / outside.name), str(served.folder / "link"), "/etc",
                 str(served.folder / "inner"), "y" * 300, "a\0b"):  # fmt: skip
        answer = served.admin("/v1/load_lora_adapter", lora_name="evil", lora_path=path)
        assert answer.status_code == (404 if path[0] == "y" else 400), path
        assert "is not inside" in answer.json()["message"] or path[0] in "ya", answer.text
    for name in ("link", "inner"):
        assert served.ask(name).status_code == 400
    for name in ("../outside", "a/../../outside", "..", "x" * 5000, "a,b", "a b"):
        assert served.ask(name).status_code in (400, 404), name
        assert served.admin("/v1/load_lora_adapter", lora_name=name, lora_path="spare").status_code in (400, 422), name
    assert served.tokens() == served.expected(None)


def test_a_broken_adapter_is_refused_with_its_reason_and_changes_nothing(served: Served) -> None:
    broken = shutil.copytree(served.folder / "spare", served.folder / "broken")
    os.truncate(broken / "adapter_model.safetensors", 100)
    answer = served.ask("broken")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"
    assert "not a complete safetensors file" in answer.json()["error"]["message"]
    assert served.tokens("configured") == served.expected(served.folder / "configured")


def test_the_gauge_names_running_adapters(served: Served) -> None:
    with httpx.stream(
        "POST", f"{served.daemon.url}/v1/completions", timeout=240,
        json={"model": "configured", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True},
    ) as answer, served.daemon.held():  # fmt: skip
        assert answer.status_code == 200
        text = httpx.get(f"{served.daemon.url}/metrics", timeout=240).text
        (line,) = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
        assert 'max_lora="2"' in line
        assert 'running_lora_adapters="configured"' in line


def test_a_killed_engine_has_its_adapters_again(served: Served) -> None:
    served.admin("/v1/load_lora_adapter", lora_name="kept", lora_path=str(served.folder / "loaded"))
    served.everywhere("kept", True)
    os.kill(served.daemon.engine_pid, signal.SIGKILL)
    end = time.monotonic() + 240
    while (answer := served.ask("kept")).status_code != 200:
        assert time.monotonic() < end, answer.text
        assert answer.status_code in (500, 503), answer.text
        time.sleep(0.1)
    assert answer.json()["choices"][0]["token_ids"] == served.expected(served.folder / "loaded")
    assert served.tokens("configured") == served.expected(served.folder / "configured")


@pytest.mark.nightly
def test_a_wrong_configured_adapter_ends_the_start_in_one_line(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "stderr", "--lora-modules", f"mine={tmp_path}")
    assert daemon.process.wait(240) == 1
    last = daemon.stderr().strip().splitlines()[-1]
    assert "has no adapter_config.json" in last
