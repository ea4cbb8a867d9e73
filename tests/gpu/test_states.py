"""Kernels on recurrent states in pages equal the reference, and touch nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import exact_dot
from states_in_pages import Row, Scene, close
from torch import Tensor
from triton.runtime import interpreter

from weft.engine.model.parts import Recurrence
from weft.kernels.reference import states as reference
from weft.tools.kernels import bench_states
from weft.tools.kernels.states import conv, delta_rule, mamba2
from weft.tools.kernels.states import gated_norm as norms

MIXED = (
    Row(1, 70), Row(1, 5, in_place=False), Row(1, 1),  # decodes
    Row(1, 64), Row(5, 62), Row(2, 0), Row(70, 0, (48, 64)), Row(50, 40, (40,), in_place=False), Row(1, 3, (1,)),
)  # fmt: skip
DECODES = 3
TOLERANCES = {torch.float32: 1e-4 if torch.cuda.is_available() else 2e-5, torch.bfloat16: 2e-2}
EPS = 1e-6


@pytest.fixture
def in_bfloat16(rounded: None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Interpreted GEMMs take tiles of bfloat16."""
    if device == "cpu":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", exact_dot)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """On the CPU, where the reference computes."""
    return torch.randn(shape).to(dtype)


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kernel", "gated", "bias"), [(4, False, True), (3, True, False)])
def test_convolutions(device: str, num_sms: int, dtype: torch.dtype, kernel: int, gated: bool, bias: bool) -> None:
    """One-token tails, prompts shorter than the convolution, and LFM2's gates."""
    channels = 70
    name = str(dtype).removeprefix("torch.")
    scene = Scene({"conv": (channels, kernel - 1)}, MIXED, DECODES, device, conv_dtype=name, padding=2)
    rows = values(scene.tokens, 3 * channels + 5, dtype=dtype)
    weight, offset = values(channels, kernel, dtype=dtype), values(channels, dtype=dtype) if bias else None
    before, x, after = rows[:, :channels], rows[:, channels : 2 * channels], rows[:, 2 * channels : 3 * channels]
    given = (x.float() * before.float()).to(dtype) if gated else x
    expected, states = reference.causal_conv(
        given, weight, offset, scene.before["conv"], scene.plan(), activation=None if gated else "silu"
    )
    if gated:
        expected = expected * after
    own = rows.to(device)
    x = own[:, channels : 2 * channels]
    gates = {"before": own[:, :channels], "after": own[:, 2 * channels : 3 * channels]} if gated else {}
    out = torch.full((scene.tokens, channels), float("nan"), dtype=dtype, device=device)
    options: dict[str, Any] = {"silu": not gated, "out": out, "num_sms": num_sms, **gates}
    arguments = (
        x,
        weight.to(device),
        None if offset is None else offset.to(device),
        scene.tensor("conv"),
        scene.tables(),
    )
    conv.conv_chunks(*arguments, scene.work(), **options)
    assert out[:DECODES].isnan().all()
    rows_of_steps = DECODES + scene.padding
    cut = {name: gate[:rows_of_steps] for name, gate in gates.items()}
    steps = torch.full((rows_of_steps, channels), float("nan"), dtype=dtype, device=device)
    conv.conv_step(
        x[:rows_of_steps], *arguments[1:], scene.positions(), **{**options, **cut, "out": steps}, count=scene.count()
    )
    assert steps[DECODES:].isnan().all()
    out[:DECODES] = steps[:DECODES]
    close(out, expected, 1e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(scene.after("conv"), states.float())
    scene.assert_others_untouched()


class Delta:
    """A mixer of Qwen3-Next: its input projection's rows, weights, and both ways to compute it."""

    def __init__(self, key_heads: int, heads: int, key: int, value: int, dtype: torch.dtype, tokens: int) -> None:
        self.key_heads, self.heads, self.key, self.value = key_heads, heads, key, value
        self.channels = 2 * key_heads * key + heads * value
        self.rows = values(tokens, self.channels + heads * value + 2 * heads, dtype=dtype)
        self.weight, self.bias = values(self.channels, 4, dtype=dtype) / 2, values(self.channels, dtype=dtype) / 4
        self.a_log, self.dt_bias = torch.rand(heads).log(), torch.rand(heads)
        self.norm = values(value, dtype=dtype)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"conv": (self.channels, 3), "recurrent": (self.heads, self.key, self.value)}

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, z, b, a = rows.split((self.channels, self.heads * self.value, self.heads, self.heads), -1)
        return x, z, b, a

    def expected(self, scene: Scene) -> tuple[Tensor, dict[str, Tensor]]:
        x, z, b, a = self.split(self.rows)
        work = scene.plan()
        y, conv_state = reference.causal_conv(x, self.weight, self.bias, scene.before["conv"], work)
        widths = (self.key_heads * self.key, self.key_heads * self.key, self.heads * self.value)
        q, k, v = (t.unflatten(-1, (-1, self.key if i < 2 else self.value)) for i, t in enumerate(y.split(widths, -1)))
        g, beta = reference.delta_gates(a, b, self.a_log, self.dt_bias)
        tokens = {"q": reference.l2_norm(q), "k": reference.l2_norm(k), "v": v, "g": g, "beta": beta}
        y, state = reference.delta_rule_scan(**tokens, state=scene.before["recurrent"], work=work)
        some = scene.decodes
        y[:some], state[:some] = reference.delta_rule_step(
            **{name: t[:some] for name, t in tokens.items()}, state=scene.before["recurrent"][:some]
        )
        y = y.flatten(-2).to(x.dtype) if x.dtype != torch.float32 else y.flatten(-2)
        y = reference.gated_norm(y, z, self.norm, EPS, groups=self.heads, norm_first=True)
        return y, {"conv": conv_state.float(), "recurrent": state}

    def computed(self, scene: Scene, num_sms: int) -> Tensor:
        device = scene.device
        x, z, b, a = self.split(self.rows.to(device))
        weight, bias, a_log, dt_bias, norm = (
            t.to(device) for t in (self.weight, self.bias, self.a_log, self.dt_bias, self.norm)
        )
        shape = {"tables": scene.tables(), "state": scene.tensor("recurrent"), "num_sms": num_sms}
        shape["key_heads"] = self.key_heads
        made = torch.full_like(x, float("nan"))
        out = torch.full((len(x), self.heads * self.value), float("nan"), dtype=x.dtype, device=device)
        work = scene.work()
        conv.conv_chunks(x, weight, bias, scene.tensor("conv"), scene.tables(), work, out=made, num_sms=num_sms)
        space = delta_rule.delta_space(len(x), self.heads, self.key, self.value, x.dtype, device)
        for buffer in space:
            buffer.fill_(float("nan"))
        delta_rule.delta_rule_chunks(
            made, b, a, a_log, dt_bias, value_width=self.value, work=work, space=space, out=out, **shape
        )
        limits = torch.tensor([scene.decodes, len(x)], dtype=torch.int32, device=device)
        norms.gated_norm(out, z, norm, EPS, groups=self.heads, norm_first=True, out=out, num_sms=num_sms, limits=limits)
        assert out[: scene.decodes].isnan().all()
        padded = min(scene.decodes + scene.padding, len(x))
        positions, tail = scene.positions()[:padded], out[scene.decodes : padded].clone()
        arrived = torch.zeros(padded * self.key_heads, dtype=torch.int32, device=device)
        delta_rule.delta_rule_step(
            x[:padded], z[:padded], b[:padded], a[:padded], weight, bias, a_log, dt_bias, norm, EPS,
            conv=scene.tensor("conv"), positions=positions, count=scene.count(), out=out[:padded],
            arrived=arrived, **shape,
        )  # fmt: skip
        assert not arrived.any()
        assert torch.equal(out[scene.decodes : padded], tail), "padding is not written"
        return out


SIZES = [(3, 3, 24, 20), (1, 2, 16, 40)]
CASES = [(0, torch.float32), (1, torch.float32), (1, torch.bfloat16)]  # A size and a dtype.


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize(("size", "dtype"), CASES)
def test_the_gated_delta_rule(device: str, num_sms: int, size: int, dtype: torch.dtype) -> None:
    model = Delta(*SIZES[size], dtype, sum(row.tokens for row in MIXED))
    name = str(dtype).removeprefix("torch.")
    scene = Scene(model.shapes, MIXED, DECODES, device, conv_dtype=name, padding=2)
    expected, states = model.expected(scene)
    close(model.computed(scene, num_sms), expected, TOLERANCES[dtype])
    close(scene.after("recurrent"), states["recurrent"], TOLERANCES[dtype])
    assert torch.equal(scene.after("conv"), states["conv"])
    scene.assert_others_untouched()


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_the_gated_delta_rule_of_qwen(device: str, num_sms: int, state_dtype: str) -> None:
    rows = [Row(1, 100 + i, in_place=i % 2 == 0) for i in range(33)] + [
        Row(700, 640, (64, 640)),
        Row(1, 63),
        Row(130, 0),
    ]
    model = Delta(16, 32, 128, 128, torch.bfloat16, sum(row.tokens for row in rows))
    scene = Scene(
        model.shapes, rows, 33, device, conv_dtype="bfloat16", dtype=state_dtype, page_bytes=1 << 20, padding=31
    )
    expected, states = model.expected(scene)
    close(model.computed(scene, num_sms), expected, 5e-2)
    close(scene.after("recurrent"), states["recurrent"], 5e-2)
    assert torch.equal(scene.after("conv"), states["conv"])
    scene.assert_others_untouched()


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_similar_keys_lose_no_accuracy(device: str, num_sms: int, dtype: torch.dtype, tolerance: float) -> None:
    """A prompt of one repeated token, which nothing fades: powers of the system would reach 1e18."""
    model = Delta(1, 1, 16, 16, dtype, 80)
    model.rows[:] = model.rows[0]
    model.rows[:, -2:] = torch.tensor([20.0, -30.0])
    scene = Scene(model.shapes, [Row(80, 0)], 0, device)
    expected, states = model.expected(scene)
    close(model.computed(scene, num_sms), expected, tolerance)
    close(scene.after("recurrent"), states["recurrent"], tolerance)


class Mamba:
    """A mixer of Nemotron-H."""

    def __init__(self, heads: int, groups: int, width: int, size: int, dtype: torch.dtype, tokens: int) -> None:
        self.heads, self.groups, self.width, self.size = heads, groups, width, size
        self.channels = heads * width + 2 * groups * size
        self.rows = values(tokens, self.channels + heads * width + heads, dtype=dtype)
        self.dt_bias, self.a_log, self.d = values(heads), torch.rand(heads).log(), values(heads, dtype=dtype)
        self.norm = values(heads * width, dtype=dtype)
        self.limit = (0.01, 2.0)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"conv": (self.channels, 3), "recurrent": (self.heads, self.width, self.size)}

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, z, dt = rows.split((self.channels, self.heads * self.width, self.heads), -1)
        return x, z, dt

    def expected(self, scene: Scene) -> tuple[Tensor, Tensor]:
        rows, z, dt = self.split(self.rows)
        own = self.groups * self.size
        x, b, c = rows.split((self.heads * self.width, own, own), -1)
        tokens = {
            "x": x.unflatten(-1, (self.heads, -1)), "dt": reference.time_steps(dt, self.dt_bias, self.limit),
            "b": b.unflatten(-1, (self.groups, -1)), "c": c.unflatten(-1, (self.groups, -1)),
        }  # fmt: skip
        fixed = {"a": -self.a_log.exp(), "d": self.d}
        y, state = reference.ssd_scan(**tokens, **fixed, state=scene.before["recurrent"], work=scene.plan())
        some = scene.decodes
        y[:some], state[:some] = reference.ssd_step(
            **{name: t[:some] for name, t in tokens.items()}, **fixed, state=scene.before["recurrent"][:some]
        )
        y = y.flatten(-2).to(rows.dtype)
        return reference.gated_norm(y, z, self.norm, EPS, groups=self.groups, norm_first=False), state

    def computed(self, scene: Scene, num_sms: int) -> Tensor:
        device = scene.device
        x, z, dt = self.split(self.rows.to(device))
        fixed = tuple(t.to(device) for t in (self.dt_bias, self.a_log, self.d))
        out = torch.full((len(x), self.heads * self.width), float("nan"), dtype=x.dtype, device=device)
        options: dict[str, Any] = {
            "state": scene.tensor("recurrent"), "tables": scene.tables(), "groups": self.groups, "width": self.width,
            "num_sms": num_sms, "limit": self.limit,
        }  # fmt: skip
        mamba2.ssd_chunks(x, dt, *fixed, work=scene.work(), out=out, **options)
        assert out[: scene.decodes].isnan().all()
        padded = min(scene.decodes + scene.padding, len(x))
        tail = out[scene.decodes : padded].clone()
        mamba2.ssd_step(
            x[:padded], dt[:padded], *fixed, positions=scene.positions()[:padded], count=scene.count(),
            out=out[:padded], **options,
        )  # fmt: skip
        assert torch.equal(out[scene.decodes : padded], tail), "padding is not written"
        return norms.gated_norm(
            out, z, self.norm.to(device), EPS, groups=self.groups, norm_first=False, out=out, num_sms=num_sms
        )


MAMBA_SIZES = [(3, 3, 24, 20), (2, 1, 16, 40)]


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize(("size", "dtype"), CASES)
def test_mamba_2(device: str, num_sms: int, size: int, dtype: torch.dtype) -> None:
    model = Mamba(*MAMBA_SIZES[size], dtype, sum(row.tokens for row in MIXED))
    scene = Scene(model.shapes, MIXED, DECODES, device, padding=2)
    expected, state = model.expected(scene)
    close(model.computed(scene, num_sms), expected, TOLERANCES[dtype])
    close(scene.after("recurrent"), state, TOLERANCES[dtype])


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("state_dtype", ["float32", "float16"])
def test_mamba_2_of_nemotron(device: str, num_sms: int, state_dtype: str) -> None:
    rows = [Row(1, 100 + i, in_place=i % 2 == 0) for i in range(33)] + [
        Row(700, 640, (64, 640)),
        Row(1, 63),
        Row(130, 0),
    ]
    model = Mamba(64, 8, 64, 128, torch.bfloat16, sum(row.tokens for row in rows))
    scene = Scene(model.shapes, rows, 33, device, dtype=state_dtype, page_bytes=1 << 20, padding=31)
    expected, state = model.expected(scene)
    close(model.computed(scene, num_sms), expected, 5e-2)
    close(scene.after("recurrent"), state, 5e-2)


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_no_bit_depends_on_cuts_checkpoints_or_other_requests(device: str, num_sms: int, kind: str) -> None:
    """A prompt of 150 tokens alone, then in two pieces next to others, with a checkpoint."""

    def model(tokens: int) -> Any:
        of = (2, 2, 16, 16, torch.float32, tokens)
        return Delta(*of) if kind == "delta" else Mamba(*of)

    whole = model(150)
    alone = Scene(whole.shapes, [Row(150, 0, (64,))], 0, device)
    expected = whole.computed(alone, num_sms)
    end_state, at_64 = alone.after("recurrent")
    others = [Row(1, 9), Row(70, 3)]
    parts, carried = [], dict[str, Tensor]()
    for begin, end in ((0, 64), (64, 150)):
        piece = Row(end - begin, begin, (end - begin - 10,), in_place=False)
        scene = Scene(whole.shapes, [*others, piece], 1, device)
        if begin:
            scene.place(carried)
        own = model(71 + end - begin)
        weights = {name: value for name, value in vars(whole).items() if name != "rows"}
        vars(own).update(weights, rows=torch.cat((own.rows[:71], whole.rows[begin:end])))
        parts.append(own.computed(scene, num_sms)[71:])
        carried = {name: scene.after(name)[2:3] for name in whole.shapes}
        if not begin:
            assert torch.equal(carried["recurrent"][0], at_64)
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(carried["recurrent"][0], end_state)


COMPILED = """
from weft.kernels.common.compilation import collect
from weft.kernels.common.gpu import KNOWN
from weft.tools.kernels.bench_states import MODELS, Layer, delta_space

layers = [(Layer(MODELS[name], 1, 100, 0, "meta"), delta_space(100, MODELS[name], "meta"))
          for name in ("Qwen3.5-35B-A3B", "Nemotron-3-Nano-30B-A3B")]
calls = [call for layer, space in layers for call in layer.chunk(132, space, layer.work())]
for kernel in collect(lambda: [call() for call in calls], KNOWN["h200"]):
    if kernel.name in ("blocks_kernel", "_scan_kernel"):
        assembly = kernel.function._do_compile(*kernel.arguments).asm["ptx"]
        print(kernel.name, "mma.sync" in assembly, "wgmma" in assembly)
"""


@pytest.mark.nightly
def test_scans_have_no_wgmma(tmp_path: Path) -> None:
    """Triton compiles it wrongly there: see `state_pages.ROWS`. In a process that launches nothing."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    ended = subprocess.run(
        (sys.executable, "-P", "-c", COMPILED), env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["_scan_kernel True False"] * 2 + ["blocks_kernel True False"]


def test_nothing_at_all_is_no_work(device: str, num_sms: int) -> None:
    """Buffers of a captured graph in an iteration without chunks and decodes."""
    model = Delta(1, 2, 16, 16, torch.float32, 5)
    scene = Scene(model.shapes, [Row(1, 4), Row(4, 60)], 1, device)
    work, untouched = scene.work(), scene.pool.clone()
    work.counts.zero_()
    x, z, b, a = model.split(model.rows.to(device))
    out = torch.full((5, 32), float("nan"), device=device)
    weight, norm, a_log, dt_bias = (t.to(device) for t in (model.weight, model.norm, model.a_log, model.dt_bias))
    conv.conv_chunks(x, weight, None, scene.tensor("conv"), scene.tables(), work, out=x.clone(), num_sms=num_sms)
    options: dict[str, Any] = {"state": scene.tensor("recurrent"), "tables": scene.tables(), "key_heads": 1}
    space = delta_rule.delta_space(5, 2, 16, 16, x.dtype, device)
    delta_rule.delta_rule_chunks(
        x, b, a, a_log, dt_bias, value_width=16, work=work, space=space, out=out, num_sms=num_sms, **options
    )
    delta_rule.delta_rule_step(
        x, z, b, a, weight, None, a_log, dt_bias, norm, EPS, conv=scene.tensor("conv"), out=out, num_sms=num_sms,
        positions=torch.zeros(5, dtype=torch.int32, device=device), count=work.counts[:1],
        arrived=torch.zeros(5, dtype=torch.int32, device=device), **options,
    )  # fmt: skip
    assert out.isnan().all()
    assert torch.equal(scene.pool, untouched)


def test_the_benchmark_compares_with_the_reference(device: str, num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setattr(bench_states, "DTYPE", torch.float32)
        small = {
            "delta": Recurrence("gated_delta", 2, 1, 16, 16),
            "mamba": Recurrence("mamba2", 2, 1, 16, 16, conv_bias=True),
        }
        monkeypatch.setattr(bench_states, "MODELS", small)
    for name in bench_states.MODELS:
        for row in bench_states.errors(name, num_sms, device):
            assert max(row["error"], row["state_error"]) < (5e-2 if device == "cuda" else 2e-5), row  # type: ignore[type-var]
