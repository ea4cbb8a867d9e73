"""What recurrent layers change in a configuration: pages, contexts, chunks, options that exclude them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, OutOfMemory
from weft.engine.memory.kv_layout import EMPTY_PAGE_BYTES, KvLayout
from weft.engine.model.directory import read_spec
from weft.engine.model.parts import Layer, Recurrence, StateSpec, StateTensor
from weft.engine.model.spec import ModelSpec
from weft.engine.runner.options.resolve import ResolvedConfig, resolve

STATE = StateSpec((StateTensor("conv", (32, 3), "bfloat16"), StateTensor("recurrent", (4, 16, 16), "float32")), 48)
RECURRENT, ATTENTION = Layer(state=STATE, attention=False, rope=None), Layer()


def hybrid(*layers: Layer) -> ModelSpec:
    """The demo model's shapes, with these layers in turn."""
    recurrence = Recurrence("gated_delta", heads=4, key_heads=4, key_dim=16, value_dim=16)
    return replace(read_spec(EngineConfig().model_path), layers=layers or (RECURRENT, ATTENTION), recurrence=recurrence)


def resolved(spec: ModelSpec | None = None, **options: Any) -> ResolvedConfig:
    config = EngineConfig(device="cpu", **{"num_pages": 200, "page_size": 16, "dtype": "float32", **options})
    return resolve(config, spec or hybrid())


def test_pages_hold_only_layers_with_keys_and_values() -> None:
    spec = hybrid()
    assert [spec.kv_layer(layer) for layer in range(3)] == [0, 0, 1]
    assert resolved().kv.num_layers == spec.num_layers // 2
    assert [i for i, state in enumerate(spec.states) if state] == list(range(0, spec.num_layers, 2))
    assert spec.recurrent
    assert not hybrid(ATTENTION).recurrent


@pytest.mark.parametrize("page_size", [1, 48, 64, 1024])
def test_pages_of_a_model_without_keys_and_values_hold_states_alone(page_size: int) -> None:
    layout = KvLayout.of(hybrid(RECURRENT), page_size, torch.bfloat16)
    assert EMPTY_PAGE_BYTES <= layout.page_bytes < EMPTY_PAGE_BYTES + 2 * page_size
    assert layout.view(torch.zeros(2 * layout.page_bytes, dtype=torch.uint8)).shape[0] == 2
    assert hybrid(RECURRENT).kv_window is None
    assert resolved(hybrid(RECURRENT)).states.pages > 0


def test_the_context_leaves_pages_for_three_states() -> None:
    states = resolved().states
    assert resolved(num_pages=10 + 3 * states.pages).max_model_len == 9 * 16
    with pytest.raises(OutOfMemory, match=rf"needs at least {2 + 3 * states.pages} \({3 * states.pages} for the rec"):
        resolved(num_pages=1 + 3 * states.pages)


def test_convolutions_keep_inputs_and_states_have_their_own_dtype() -> None:
    def dtypes(**options: Any) -> list[str]:
        state = resolved(**options).states.states[0]
        assert state is not None
        return [tensor.dtype for tensor in state.tensors]

    assert dtypes() == ["float32", "float32"]
    assert dtypes(dtype="bfloat16") == ["bfloat16", "float32"]
    assert dtypes(state_dtype="bfloat16") == ["float32", "bfloat16"]


def test_states_are_part_of_the_identity_of_pages() -> None:
    ids = {resolved(**options).kv.id for options in ({}, {"state_dtype": "bfloat16"}, {"state_dtype": "float16"})}
    assert len(ids) == 3
    other = replace(STATE, tensors=(*STATE.tensors[:1], StateTensor("recurrent", (2, 16, 32), "float32")))
    assert resolved(hybrid(replace(RECURRENT, state=other), ATTENTION)).kv.id not in ids
    assert resolved(hybrid(ATTENTION)).kv.states == ""


def test_chunks_end_at_pages_and_blocks() -> None:
    assert resolved().chunk_step(hybrid()) == 48
    assert resolved(page_size=10).chunk_step(hybrid()) == 240
    assert resolved(hybrid(ATTENTION)).chunk_step(hybrid(ATTENTION)) == 1
    assert resolved(batch_invariant=True).chunk_step(hybrid()) == 384
    with pytest.raises(ConfigError, match="--batch-invariant needs --max-num-batched-tokens 384 or more"):
        resolved(batch_invariant=True, max_num_batched_tokens=200)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"plan": "some.json"}, "--plan some.json: a model with recurrent layers runs serially"),
        ({"tier_kv_format": "packed", "host_kv_gib": 0.1, "dtype": "bfloat16"}, "recurrent states cannot be packed"),
        ({"pod": "auto"}, "--pod auto: a model with recurrent layers"),
    ],
)
def test_options_that_exclude_recurrent_layers_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolved(**options)


@pytest.mark.parametrize("options", [{"state_dtype": "bfloat16"}, {"state_interval": 512}])
def test_options_without_an_effect_are_refused(options: dict[str, Any]) -> None:
    name = "--" + next(iter(options)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"{name}: .* has no recurrent layers; leave it out"):
        resolved(hybrid(ATTENTION), **options)
    with pytest.raises(ValidationError, match="state_interval needs prefix_caching"):
        EngineConfig(state_interval=512, prefix_caching=False)
