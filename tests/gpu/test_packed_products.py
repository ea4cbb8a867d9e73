"""Products of packed weights, and an engine with them, against the widened matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import Kind, ggml_tensors, write_gguf
from harness import GREEDY, Harness
from integer_files import FORMS, Form, write_integers
from interpreted import interpreted_gpu
from tiny import save_tiny

from weft.engine.config.engine_config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.model.gguf import blocks, packing
from weft.engine.model.hub import find_model
from weft.engine.model.implementation import choose_spec
from weft.engine.runner.options import resolve
from weft.kernels.common.gpu import KNOWN
from weft.kernels.formats.packed_rows import PackedRows
from weft.kernels.formats.packed_weight import PackedWeight, pack_weight, unpack_weight
from weft.kernels.matmul import packed_projections, projections
from weft.kernels.matmul.gemm_launch import workspace
from weft.kernels.matmul.packed_projections import PackedProjections
from weft.kernels.matmul.packed_triton import widen

EPS = 1e-5
FORMATS = (
    (4, 128, 8, False),
    (4, 64, 8, True),
    (4, 32, 0, True),
    (4, 16, 4, False),
    (8, 32, 128, False),
    (8, 16, 32, True),
)
"""Bits, group, centre, low."""


def made(rows: int, columns: int, form: tuple[int, int, int, bool], device: str, *, norm: bool = False) -> PackedWeight:
    bits, group, centre, low = form
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    scale = (torch.rand(rows, columns // group) - 0.3) * 0.1
    scale[0] = 0.0
    lows = torch.randn(rows, columns // group) * 0.3 if low else None
    own = pack_weight(
        codes.to(device), scale.to(device), None if lows is None else lows.to(device),
        torch.rand(columns).to(device) if norm else None, bits=bits, group=group, centre=centre,
    )  # fmt: skip
    exact = (codes.float() - centre).unflatten(1, (-1, group)) * scale.half().float()[..., None]
    if lows is not None:
        exact += lows.half().float()[..., None]
    exact = exact.flatten(1)
    assert torch.equal(unpack_weight(own, torch.float32).cpu(), exact if own.norm is None else exact * own.norm.cpu())
    return own


def packed(device: str, weight: PackedWeight, dtype: torch.dtype) -> PackedProjections:
    normed = torch.full((256, weight.columns), float("nan"), dtype=dtype, device=device)
    return PackedProjections(torch.empty(weight.rows * weight.columns, dtype=dtype, device=device), normed)


def close(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    """Within rounding to 16 bits, relative to the largest value."""
    limit = (want if scale is None else scale).float().abs().max() * (2e-3 if got.dtype == torch.float16 else 1e-2)
    assert (got.float() - want.float()).abs().max() <= limit


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(1, 128, 256), (17, 72, 128), (130, 64, 128), pytest.param(5, 200, 640, marks=pytest.mark.nightly)],
)
def test_a_product_reads_the_codes(
    form: tuple[int, int, int, bool], tokens: int, rows: int, columns: int, device: str, num_sms: int
) -> None:
    dtype = torch.float16
    weight = made(rows, columns, form, device, norm=True)
    x = torch.randn(tokens, columns, dtype=dtype, device=device)
    squares = x.float().square().sum(-1)[None]
    out, bias = torch.zeros(tokens, rows, dtype=dtype, device=device), torch.randn(rows, dtype=dtype, device=device)
    packed(device, weight, dtype).linear_project(
        x, squares, weight, EPS, bias=bias, out=out, num_sms=num_sms, space=workspace(device, 1 << 20, 1 << 8)
    )
    rms = torch.rsqrt(squares[0] / columns + EPS)[:, None]
    close(out, (x.float() @ unpack_weight(weight, torch.float32).t()) * rms + bias.float())


@pytest.mark.parametrize("form", FORMATS)
def test_many_tokens_read_a_widened_copy(form: tuple[int, int, int, bool], device: str) -> None:
    for norm in (False, True):
        weight = made(72, 160 if form[1] < 64 else 384, form, device, norm=norm)
        out = torch.empty(weight.shape, dtype=torch.float16, device=device)
        assert torch.equal(widen(weight, out), unpack_weight(weight, torch.float16))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_a_file_multiply(kind: str, device: str, num_sms: int) -> None:
    _, size = blocks.block_of(kind)
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (64, 512 // blocks.block_of(kind)[0], size), dtype=np.uint8)
    places = {"Q2_K": (81, 83), "Q3_K": (109,), "Q6_K": (209,), "Q4_1": (1, 3), "Q5_1": (1, 3)}
    for place in places.get(kind, (1, 3) if kind in ("Q4_K", "Q5_K") else (1,)):
        raw[..., place] = rng.integers(0x20, 0x30, raw.shape[:2])
    raw = raw.reshape(64, -1)
    form = packing.form_of(kind)
    assert form is not None
    rows = packing.pack(torch.from_numpy(raw), kind, slice(0, 512)).to(device)
    weight = PackedWeight.of(PackedRows(rows, form, 512))
    want = torch.from_numpy(gguf.dequantize(raw, Kind[kind])).to(device)
    for tokens in (3, 40):
        x, out = torch.randn(tokens, 512, device=device).half(), torch.zeros(tokens, 64, device=device).half()
        packed(device, weight, torch.float16).linear_project(
            x * 0.01, None, weight, EPS, out=out, num_sms=num_sms, space=workspace(device, 1 << 20, 1 << 8)
        )
        close(out, (x * 0.01).float() @ want.t())


def test_epilogues_are_those_of_other_products(device: str, num_sms: int) -> None:
    dtype, tokens, hidden = torch.float16, 9, 128
    x = torch.randn(tokens, hidden, dtype=dtype, device=device)
    squares = x.float().square().sum(-1)[None]

    def both(rows: int, run: Callable[..., Any], *, norm: bool = True) -> None:
        weight = made(rows, hidden, FORMATS[1], device, norm=norm)
        options = {"num_sms": num_sms, "space": workspace(device, 1 << 20, 1 << 8)}
        wide = unpack_weight(weight, dtype)
        for got, want in zip(
            run(packed(device, weight, dtype), weight, options), run(projections, wide, options), strict=True
        ):
            close(got, want)

    def gate_up(of: Any, weight: Any, options: Any) -> Any:
        out = torch.zeros(tokens, 64, dtype=dtype, device=device)
        return (of.gate_up_project(x, squares, weight, EPS, out=out, **options),)

    def residual(of: Any, weight: Any, options: Any) -> Any:
        out, sums = torch.zeros_like(x), projections.sumsq_buffer(hidden, tokens, device)
        out, sums = of.residual_project(x, weight, x, out=out, sumsq=sums, **options)
        return out, sums.sum(0)

    def qkv(of: Any, weight: Any, options: Any) -> Any:
        kv = torch.zeros(2, 1, 2, 16, 1, 64, dtype=dtype, device=device)
        rotary = torch.randn(32, 32, 2, device=device, generator=torch.Generator(device).manual_seed(1))
        positions = torch.arange(tokens, device=device, dtype=torch.int32)
        out = torch.zeros(tokens, 2, 64, dtype=dtype, device=device)
        of.qkv_project(x, squares, weight, None, EPS, rotary, positions, positions + 16, kv, 0, 2, out=out, **options)
        return out, kv

    both(128, gate_up)
    both(hidden, residual, norm=False)
    both(256, qkv)


@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[2]])
def test_a_residual_writes_the_next_products_operand(
    form: tuple[int, int, int, bool], device: str, num_sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, tokens, hidden = torch.float16, 5, 256
    options = {"num_sms": num_sms, "space": workspace(device, 1 << 20, 1 << 8)}
    down, reader, other = (made(hidden, hidden, form, device, norm=norm) for norm in (False, True, True))
    x, a = torch.randn(2, tokens, hidden, dtype=dtype, device=device)
    passes: list[int] = []
    times_norm = packed_projections.times_norm
    monkeypatch.setattr(packed_projections, "times_norm", lambda *t: passes.append(1) or times_norm(*t))

    def run(of: PackedProjections, **how: Any) -> list[torch.Tensor]:
        stream, sums = x.clone(), projections.sumsq_buffer(hidden, tokens, device)
        _, sums = of.residual_project(a, down, stream, out=stream, sumsq=sums, **how, **options)
        outs = [torch.zeros(tokens, hidden, dtype=dtype, device=device) for _ in range(2)]
        for weight, out in zip((reader, other), outs, strict=True):
            of.linear_project(stream, sums, weight, EPS, out=out, **options)
        return [stream, *outs]

    of = packed(device, reader, dtype)
    fused = run(of, reader=reader)
    assert len(passes) == 1  # for the other norm
    again = run(of)
    assert len(passes) == 3
    assert all(torch.equal(one, two) for one, two in zip(fused, again, strict=True))
    wide = unpack_weight(reader, torch.float32)
    rms = torch.rsqrt(fused[0].float().square().mean(-1, keepdim=True) + EPS)
    close(fused[1], (fused[0].float() @ wide.t()) * rms)
    of.forget()
    run(of, reader=reader)
    assert len(passes) == 4


def test_bad_shapes_are_refused() -> None:
    codes, scale = torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 2)
    for bits, group, centre in ((4, 8, 8), (3, 48, 0), (4, 36, 8), (8, 48, 200)):
        with pytest.raises(ValueError, match="packed"):
            pack_weight(codes, scale, bits=bits, group=group, centre=centre)
    assert torch.equal(  # a group of 48 becomes three of 16
        unpack_weight(pack_weight(codes, scale, bits=4, group=48, centre=8), torch.float32), torch.full((4, 96), -8.0)
    )


FEW = {"gptq, groups of 64": Form("gptq", 4, 64, symmetric=True), "gptq, groups of 128": Form("gptq", 4, 128)}
FITTING = ("awq", "gptq")
SOURCES = (*FITTING, *FEW, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.mark.nightly
@pytest.mark.parametrize("source", SOURCES)
def test_an_engine_answers_as_with_the_widened_model(
    source: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain = save_tiny(
        "llama2", tmp_path / "source", hidden_size=256 if source in FEW else 128,
        intermediate_size=256 if source in FEW else 192, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, vocab_size=256,
    )  # fmt: skip
    if source.startswith("Q"):
        kinds = {
            name: Kind[source] for name, t in ggml_tensors(plain, "llama").items() if t.ndim == 2 and "blk" in name
        }
        path = find_model(str(write_gguf(plain, tmp_path / "it.gguf", "llama", kinds=kinds)))
    else:
        path, _ = write_integers(plain, tmp_path / "written", (FORMS | FEW)[source])
    prompts = [np.arange(3, 12), np.arange(40, 45)]

    def answers(**options: Any) -> tuple[list[list[int]], list[list[float]]]:
        harness = Harness(
            path, page_size=16, num_pages=12, max_num_seqs=2, max_num_batched_tokens=32, prefix_caching=False, **options
        )
        handles = [harness.add(p, max_tokens=2, ignore_eos=True, logprobs=1, **GREEDY) for p in prompts]
        harness.run()
        tokens = [harness.tokens[handle] for handle in handles]
        return tokens, [[float(entry.values[0]) for entry in harness.logprobs[handle]] for handle in handles]

    want, exact = answers(device="cpu", dtype="float32", quantization="none")
    calls = []
    launch = packed_projections.choose
    monkeypatch.setattr(packed_projections, "choose", lambda *a: calls.append(a) or launch(*a))
    with contextlib.nullcontext() if device == "cuda" else interpreted_gpu(monkeypatch):
        got, scores = answers(device="cuda", dtype="float16", quantization="packed")
    assert calls, "no product read codes"
    assert got == want
    for one, other in zip(scores, exact, strict=True):
        assert one == pytest.approx(other, abs=0.02)


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain = save_tiny("llama2", tmp_path / "source", hidden_size=128, intermediate_size=128, head_dim=64)
    fits, _ = write_integers(plain, tmp_path / "fits", FORMS["gptq"])
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (plain, {}, "no matrices in 4 or 8 bits"),
        (fits, {"tensor_parallel_size": 2}, "several ranks"),
        (fits, {"batch_invariant": True}, "batch-invariant"),
    ]
    for name in FORMS.keys() - {*FITTING}:
        path, _ = write_integers(plain, tmp_path / name, FORMS[name])
        cases.append((path, {}, "only 4 bits in groups of 32"))
    monkeypatch.setattr(resolve, "gpu", lambda: KNOWN["h200"])
    for path, options, why in cases:
        config = EngineConfig(model=str(path), device="cuda", quantization="packed", **options)
        with pytest.raises(ConfigError, match=f"--quantization packed: .*{why}"):
            resolve.served_as(choose_spec(config)[0], config)
