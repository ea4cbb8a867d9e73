"""The declared list of modules that plans depend on contains every kernel that such a plan launches."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import weft
from weft.engine.config import EngineConfig
from weft.engine.model.implementation import choose_spec
from weft.engine.plans import kernel_sources

KERNELS = Path(weft.__file__).parent / "kernels"


def device_code_imported_by(module: str) -> set[str]:
    """The modules of `kernels` with Triton or Gluon functions that `module` imports, directly or indirectly."""
    found: set[str] = set()
    wanted = [module]
    while wanted:
        for node in ast.walk(ast.parse((KERNELS / f"{wanted.pop()}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft.kernels."):
                base = (node.module or "").removeprefix("weft.kernels.").replace(".", "/")
                for name in [base, *(f"{base}/{alias.name}" for alias in node.names)]:
                    file = KERNELS / f"{name}.py"
                    if name not in found and file.is_file() and ".jit" in file.read_text(encoding="utf-8"):
                        found.add(name)
                        wanted.append(name)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process with a GPU has Triton's driver for it")
@pytest.mark.parametrize(
    ("preset", "options", "fp8"),
    [
        ("llama-3-8b", {}, False),
        ("llama-3-8b", {"quantization": "fp8", "kv_cache_dtype": "fp8"}, True),
        ("llama-3-8b", {"tensor_parallel_size": 2}, False),
        ("qwen3-30b-a3b", {}, False),
        ("qwen3-30b-a3b", {"quantization": "fp8", "kv_cache_dtype": "fp8"}, True),
    ],
    ids=["dense", "fp8", "ranks", "experts", "fp8-experts"],
)
def test_every_kernel_of_a_plan_is_in_its_digest(
    preset: str, options: dict[str, object], fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    from weft.engine.runner.start.kernel_set import kernel_set
    from weft.kernels.common.gpu import KNOWN

    monkeypatch.setattr(driver, "_active", None)
    config = EngineConfig.model_validate(
        {"device": "cuda", "model_preset": preset, "load_format": "dummy", "tuning_seconds": 0.0, **options}
    )
    spec = choose_spec(config)[0].shard(0, config.tensor_parallel_size)
    launched = {
        kernel.function.fn.__module__.removeprefix("weft.kernels.").replace(".", "/")
        for kernel in kernel_set(config, KNOWN["h200"])
    }
    assert len(launched) > 8
    listed = set(kernel_sources.sources(spec, fp8=fp8))
    assert launched <= listed
    assert set().union(*map(device_code_imported_by, launched)) <= listed


def test_listed_modules_exist() -> None:
    for name, value in vars(kernel_sources).items():
        if name.isupper():
            for source in value:
                assert (KERNELS / (source if source.endswith(".json") else f"{source}.py")).is_file(), source
