"""`read_transformers`: determines the shapes of a `transformers` model from its configuration, its cache and a dry run.

A model is packed if the tokens of many requests pass it in one row: weft then computes its attention. Otherwise each
request passes it alone, with a cache made from its pages. Raises an error with the reason if it cannot be served.
"""

from __future__ import annotations

import copy
import logging
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

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
from weft.engine.model.transformers_impl.spec import AttentionCall, Mixer, TransformersSpec
from weft.engine.model.transformers_impl.trial import NotADecoder, attention_calls, kept_layers, mixers

T = TypeVar("T")
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


KERNELS = ("fla", "causal_conv1d", "mamba_ssm")


@contextmanager
def torch_functions() -> Iterator[None]:
    """Make models that are imported here compute recurrent layers in torch, even if libraries of GPU kernels are
    installed: `transformers` chooses them by import, on CPUs too, where they fail."""
    modules = {name: sys.modules[name] for name in KERNELS if name in sys.modules}
    there = transformers.utils.import_utils
    checks = [
        name
        for name in vars(there)
        if name.startswith("is_")
        and name.endswith(
            ("causal_conv1d_available", "mamba_ssm_available", "mamba_2_ssm_available", "linear_attention_available")
        )
    ]
    before = {name: getattr(there, name) for name in checks}
    sys.modules.update(dict.fromkeys(KERNELS))  # type: ignore[arg-type]
    for name in checks:
        setattr(there, name, lambda *_: False)
    try:
        yield
    finally:
        for name in KERNELS:
            del sys.modules[name]
        sys.modules.update(modules)
        for name, check in before.items():
            setattr(there, name, check)


def build(config: Any, dtype: torch.dtype, device: torch.device, trusted: bool, attention: str = NAME) -> Any:
    """Build the model with random weights. attention: `transformers`' name of an implementation.

    Raises `ModelError`."""
    try:
        with torch.device(device), torch_functions():
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=attention, dtype=dtype, trust_remote_code=trusted
            )
    except KeyError as error:
        if error.args == (NAME,):
            raise ModelError("its code has no attention interface") from None
        raise ModelError(f"transformers cannot build it: KeyError {one_line(error)}") from None
    except (ValueError, ImportError, NotImplementedError, AttributeError, TypeError, RuntimeError) as error:
        raise ModelError(f"transformers cannot build it: {one_line(error)}") from None


def spec_of(config: Any, name: str, *, trusted: bool) -> TransformersSpec:
    try:
        return _packed(config, name, trusted)
    except NotADecoder:
        raise
    except ModelError as reason:
        try:
            return _single(config, name, trusted, str(reason))
        except ModelError as error:
            raise ModelError(str(reason) if str(error) == str(reason) else f"{reason}; one by one: {error}") from None


def _packed(config: Any, name: str, trusted: bool) -> TransformersSpec:
    windows, recurrent = _cache_windows(config)
    module = build(config, torch.bfloat16, torch.device("meta"), trusted)
    calls, vocab_size = _try(module, lambda model: attention_calls(model, config))
    states = _try(module, lambda model: mixers(model, config)) if recurrent else ()
    if not calls and not states:
        raise ModelError("its code never calls the attention interface")
    max_positions, limit = _positions(config.get_text_config(decoder=True))
    hidden = [window for call in calls if (window := windows.get(call.layer)) and call.window is None]
    if hidden and min(hidden) < max_positions:
        max_positions, limit = min(hidden), "its attention calls do not state its window"
    return _spec(config, name, module, calls, states, vocab_size, (max_positions, limit), "")


def _single(config: Any, name: str, trusted: bool, reason: str) -> TransformersSpec:
    _cache_windows(config, indexed=True)
    module = build(config, torch.bfloat16, torch.device("meta"), trusted, "eager")
    calls, states, vocab_size = _try(module, lambda model: kept_layers(model, config))
    return _spec(
        config, name, module, calls, states, vocab_size, _positions(config.get_text_config(decoder=True)), reason
    )


def _spec(
    config: Any, name: str, module: Any, calls: list[AttentionCall], states: tuple[Mixer, ...], vocab_size: int,
    positions: tuple[int, str], single: str,
) -> TransformersSpec:  # fmt: skip
    text = config.get_text_config(decoder=True)
    sizes = {id(p): (key, p.numel()) for key, p in module.named_parameters()}.values()
    ends = getattr(text, "eos_token_id", None)
    default = ends if isinstance(ends, list) else [ends]  # The architecture's, if no file names one.
    hidden_size = int(getattr(text, "hidden_size", 0) or module.get_input_embeddings().weight.shape[1])
    return TransformersSpec(
        architecture=name if name != "(none)" else type(module).__name__,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_number(getattr(text, "intermediate_size", None)) or 4 * hidden_size,
        num_layers=len(calls),
        num_heads=max((call.heads for call in calls), default=1),
        num_kv_heads=max((call.kept[0] for call in calls), default=1),
        head_dim=max((call.kept[1] for call in calls), default=1),
        max_positions=positions[0],
        norm=Norm(eps=0.0),
        dtype=str(getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32").removeprefix("torch."),
        eos_token_ids=tuple(i for i in default if isinstance(i, int) and 0 <= i < vocab_size),
        layers=tuple(Layer(window=call.window) for call in calls),
        calls=tuple(calls),
        mixers=states,
        single=single,
        parameters=sum(size for _, size in sizes),
        active=_active(list(sizes), text),
        config=config,
        limit=positions[1],
    )


def _cache_windows(config: Any, *, indexed: bool = False) -> tuple[dict[int, int | None], bool]:
    """Return the window of each layer that caches keys and values, and whether any layer is recurrent.

    indexed: layers that choose positions by an index are possible. Raises `ModelError` for other kinds of caches."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:  # an architecture with a custom cache
        raise ModelError(f"it has a custom cache: {one_line(error)}") from None
    found: dict[int, int | None] = {}
    recurrent = False
    for index, layer in enumerate(layers):
        kinds = [kind.__name__ for kind in type(layer).__mro__]
        if type(layer).__module__ != DynamicCache.__module__:
            raise ModelError(f"it has a custom cache ({kinds[0]})")
        if any("Indexed" in kind for kind in kinds) and not indexed:
            raise ModelError("it uses indexed (sparse) attention")
        recurrent |= any("LinearAttention" in kind for kind in kinds)
        if "DynamicLayer" in kinds:
            found[index] = getattr(layer, "sliding_window", None)
    return found, recurrent


def _try(module: Any, run: Callable[[TransformersModule], T]) -> T:
    """Do a dry run, on the meta device if the model's code supports that. Raises `ModelError`."""
    try:
        try:
            return run(TransformersModule(module))
        except (RuntimeError, NotImplementedError, ValueError):
            _fill_with_zeros(module)
            return run(TransformersModule(module))
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
