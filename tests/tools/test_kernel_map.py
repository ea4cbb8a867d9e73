"""docs/kernels.md says which kernel runs when, and stays true."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process with a GPU has Triton's driver for it")
def test_the_page_names_the_kernels_that_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    from weft.tools.kernels import kernel_map

    monkeypatch.setattr(driver, "_active", None)
    written = kernel_map.PAGE.read_text(encoding="utf-8")
    assert kernel_map.page(written) == written, "run `make kernelmap`"
