"""The recorded H200 profile that weft ships: complete, and what the search makes of it."""

from __future__ import annotations

from weft.autosearch.machine import Machine
from weft.autosearch.profile import recorded_profiles
from weft.autosearch.refine import serial_for
from weft.engine.spec import ModelSpec, RopeScaling

LLAMA_8B = ModelSpec(
    "LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, 8192, 1e-5, 5e5, RopeScaling(), False, False, False, None,
    "bfloat16",
)  # fmt: skip


def test_it_covers_every_operation_and_every_pair() -> None:
    (profile,) = [p for _, p in recorded_profiles() if p.target.gpu == "NVIDIA H200"]
    names = {o.name for o in LLAMA_8B.layer_operations()}
    assert set(profile.features) == names
    for name in names:
        own = [p for p in profile.points if p.operation == name]
        assert {p.sms for p in own} >= {profile.target.sms}
        assert len({p.work for p in own}) >= 3
    assert {(p.compute, p.guest) for p in profile.pairs} >= {(n, "decode") for n in ("qkv", "o", "gate_up", "down")}


def test_the_serial_layer_it_predicts_is_the_one_that_was_measured() -> None:
    (profile,) = [p for _, p in recorded_profiles() if p.target.gpu == "NVIDIA H200"]
    load = profile.load
    machine = Machine(profile, LLAMA_8B)
    # measured as a whole on the same kind of card: 2.15-2.20 ms at 1024/512 with 2,048 tokens
    assert (load.tokens, load.decodes) == (2048, 683)
    assert abs(machine.period(serial_for(LLAMA_8B, load, profile.target.sms), load).ms - 2.17) < 0.1
