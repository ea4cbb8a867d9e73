"""`read_transformers`: determines the shapes of a `transformers` model from its configuration, its cache and a dry run.

It raises an error with the reason if a model cannot be served.
"""

from __future__ import annotations

import copy
import logging
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weft.engine.errors import ModelError, one_line
from weft.engine.model.parts import Layer, Norm
from weft.engine.model.transformers_impl.decoders import architecture, model_type
from weft.engine.model.transformers_impl.hook import NAME
from weft.engine.model.transformers_impl.module import TransformersModule
from weft.engine.model.transformers_impl.spec import AttentionCall, TransformersSpec
from weft.engine.model.transformers_impl.trial import attention_calls

DEFAULT_POSITIONS = 4096  # Context limit if the configuration has none.
MAP_NORESERVE = 0x4000  # Linux mmap flag: memory that is only read takes none, regardless of size.
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence `transformers`' logs and progress bars; errors carry what matters."""
    log = transformers.utils.logging
    before, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()


def read_transformers(path: Path, raw: dict[str, Any], *, trusted: bool = False) -> TransformersSpec:
    """Read a model. raw: the directory's `config.json`. trusted: its own code may run.

    Raises `ModelError` with the reason why `transformers`' code cannot serve it here."""
    with quiet():
        try:
            if "model_type" in raw:
                config = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
            else:
                config = CONFIG_MAPPING[model_type(raw)].from_pretrained(path)
        except Exception as error:  # config validation and remote code raise anything
            version = transformers.__version__
            raise ModelError(f"transformers {version} cannot read config.json: {one_line(error)}") from None
        return spec_of(config, architecture(raw), trusted=trusted)


def build(config: Any, dtype: torch.dtype, device: torch.device, trusted: bool) -> Any:
    """Build the model with random weights. Raises `ModelError`."""
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=NAME, dtype=dtype, trust_remote_code=trusted
            )
    except KeyError as error:
        if error.args == (NAME,):
            raise ModelError("its code has no attention interface") from None
        raise ModelError(f"transformers cannot build it: KeyError {one_line(error)}") from None
    except (ValueError, ImportError, NotImplementedError, AttributeError, TypeError, RuntimeError) as error:
        raise ModelError(f"transformers cannot build it: {one_line(error)}") from None


def spec_of(config: Any, name: str, *, trusted: bool) -> TransformersSpec:
    windows = _cache_windows(config)
    module = build(config, torch.bfloat16, torch.device("meta"), trusted)
    calls, vocab_size = _try(module)
    if not calls:
        raise ModelError("its code never calls the attention interface")
    text = config.get_text_config(decoder=True)
    max_positions, limit = _positions(text)
    hidden = [window for call in calls if (window := windows.get(call.layer)) and call.window is None]
    if hidden and min(hidden) < max_positions:
        max_positions, limit = min(hidden), "its attention calls do not state its window"
    sizes = {id(p): (key, p.numel()) for key, p in module.named_parameters()}.values()
    ends = getattr(text, "eos_token_id", None)
    default = ends if isinstance(ends, list) else [ends]  # The architecture's, if no file names one.
    hidden_size = int(getattr(text, "hidden_size", 0) or calls[0].heads * calls[0].key_dim)
    return TransformersSpec(
        architecture=name if name != "(none)" else type(module).__name__,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_number(getattr(text, "intermediate_size", None)) or 4 * hidden_size,
        num_layers=len(calls),
        num_heads=max(call.heads for call in calls),
        num_kv_heads=max(call.kv_heads for call in calls),
        head_dim=max(call.width for call in calls),
        max_positions=max_positions,
        norm=Norm(eps=0.0),
        dtype=str(getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32").removeprefix("torch."),
        eos_token_ids=tuple(i for i in default if isinstance(i, int) and 0 <= i < vocab_size),
        layers=tuple(Layer(window=call.window) for call in calls),
        calls=tuple(calls),
        parameters=sum(size for _, size in sizes),
        active=_active(list(sizes), text),
        config=config,
        limit=limit,
    )


def _cache_windows(config: Any) -> dict[int, int | None]:
    """Return the window of each layer that caches keys and values. Raises `ModelError` for any other kind of cache."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:  # an architecture with a custom cache
        raise ModelError(f"it has a custom cache: {one_line(error)}") from None
    found: dict[int, int | None] = {}
    for index, layer in enumerate(layers):
        kinds = [kind.__name__ for kind in type(layer).__mro__]
        if any("LinearAttention" in kind for kind in kinds):
            raise ModelError("it has recurrent layers, and their state does not fit KV pages")
        if any("Indexed" in kind for kind in kinds):
            raise ModelError("it uses indexed (sparse) attention")
        if kinds[0] in ("DynamicLayer", "DynamicSlidingWindowLayer"):
            found[index] = getattr(layer, "sliding_window", None)
        elif kinds[0] != "DummyLayer":
            raise ModelError(f"it has a custom cache ({kinds[0]})")
    return found


def _try(module: Any) -> tuple[list[AttentionCall], int]:
    """Do the dry run, on the meta device if the model's code supports that. Raises `ModelError`."""
    try:
        try:
            return attention_calls(TransformersModule(module))
        except (RuntimeError, NotImplementedError, ValueError):
            _fill_with_zeros(module)
            return attention_calls(TransformersModule(module))
    except ModelError:
        raise
    except Exception as error:  # model code raises anything
        raise ModelError(f"a dry run of its code fails: {one_line(error)}") from None


def _fill_with_zeros(module: nn.Module) -> None:
    """Move a module off the meta device, onto zeros that the system allocates only when written."""

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)

    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[key] = nn.Parameter(zeros(parameter), requires_grad=False)
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = zeros(buffer)


def _positions(text: Any) -> tuple[int, str]:
    for name in LENGTHS:
        if value := _number(getattr(text, name, None)):
            return value, ""
    return DEFAULT_POSITIONS, "its configuration has no length"


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _active(sizes: list[tuple[str, int]], text: Any) -> int:
    """Return the parameters used per token: only a share of the experts."""
    count = next((n for key in ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
                  if (n := _number(getattr(text, key, None)))), 0)  # fmt: skip
    top = next((n for key in ("num_experts_per_tok", "moe_top_k", "moe_k", "top_k_experts")
                if (n := _number(getattr(text, key, None)))), 0)  # fmt: skip
    share = top / count if 0 < top < count else 1.0
    return sum(int(n * share) if ".experts." in name else n for name, n in sizes)
