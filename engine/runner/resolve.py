"""`ResolvedConfig`: what the device offers and what the engine takes of it: dtypes, batch bounds, size of the pool."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.engine.config import EngineConfig, Pod
from weft.engine.errors import ConfigError, OutOfMemory
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.broad.spec import BroadSpec
from weft.engine.model.implementation import widened
from weft.engine.model.parts import Placement
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.choose import choose_plan, target_of
from weft.engine.plans.plan import Plan, load_plan
from weft.engine.runner.broad_shapes import kinds_of_calls, refuse_on_gpu
from weft.kernels import attention_backends
from weft.kernels.attention import AttentionShape, AttentionUnavailable
from weft.kernels.attention_backends import TRITON_HEAD_DIMS, BackendName
from weft.kernels.fp8 import E4M3
from weft.kernels.gpu import gpu, gpu_device
from weft.kernels.packed_page import PackedPage
from weft.kernels.work_lists import tokens_of_whole_tiles

log = logging.getLogger("weft.engine")
GIB = 2**30
CPU_MEMORY_SHARE = 0.25
"""of the machine's memory, at most, for KV pages on the CPU"""

EXPERT_ACTIVATIONS = ("silu", "swiglu_oai")
"""those of the kernels of experts (`kernels.experts_triton`)"""
INVARIANT_CHUNK = 128
"""tokens of a chunk that batch invariance may need, and of the tiles of attention in torch"""


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The engine's options with every open choice made."""

    device: torch.device
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    """of activations"""
    kv: KvLayout
    """a page, with a dtype of its own"""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int | None
    """None: as many as the GPU has room for once everything else is there"""
    gpu_memory_utilization: float
    """of the whole GPU, with the model's part of it taken into account"""
    cpu_threads: int
    attention: BackendName
    batch_invariant: bool
    """one accumulation order for every operation, whatever shares the batch"""
    cache_dir: Path
    """of what was tuned on this machine"""
    tuning_seconds: float
    plan: Plan | None = None
    """plans of overlapped nano-batches; None: the serial plan alone"""
    wait_for_plan: bool = True
    """all its pipelines are there before the first iteration"""
    sleeps: bool = False
    """weights and KV pool lie where their memory can be given back"""
    has_neighbours: bool = False
    """other models are on the same device"""
    sharers: int = 1
    """engines of this model on the same device, this one included"""
    common_weights: bool = False
    """these have one copy of the weights"""
    packed: PackedPage | None = None
    """how pages lie in the tiers below the device; None: as they are"""
    pod: Pod = "off"
    """whether attention of decodes and of chunks is one launch"""

    def chunk_step(self, spec: ModelSpec) -> int:
        """Tokens at whose multiples alone prompts are cut: with batch invariance no tile of attention is."""
        if not self.batch_invariant:
            return 1
        return tokens_of_whole_tiles(spec.heads_per_kv) if self.attention == "triton" else INVARIANT_CHUNK

    def attention_shape(self, spec: ModelSpec) -> AttentionShape:
        return _attention_shape(spec, self.kv, self.compute_dtype, self.device, self.max_model_len)


def memory_bytes(device: torch.device) -> int:
    """Memory this process may use: the GPU's; or the machine's, or its control group's limit when that is lower."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as f:
            limit = f.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _cpu_dtype(spec: ModelSpec) -> torch.dtype:
    """bfloat16 for a bfloat16 checkpoint where the CPU multiplies it natively: half the bytes, twice the speed."""
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native and spec.dtype == "bfloat16" else torch.float32


def served_as(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """The model as its device computes it."""
    cuda = config.device != "cpu" and gpu() is not None
    return widened(spec) if cuda and not isinstance(spec, BroadSpec) else spec


def resolve(config: EngineConfig, spec: ModelSpec) -> ResolvedConfig:
    """Decide what the configuration leaves open, of a model `served_as` its device computes it.

    Raises `ConfigError` or `OutOfMemory`, one line.
    """
    here = gpu()
    if config.device == "cuda" and here is None:
        raise ConfigError("--device cuda: no CUDA device is visible; use --device cpu")
    cuda = config.device != "cpu" and here is not None
    ranks, sharers = spec.shard_of.ranks, config.share.sharers
    # A rank would wait on one GPU for another that waits for its turn on the next.
    if cuda and sharers > 1 and ranks > 1:
        raise ConfigError(
            f"--replicas {sharers} on GPUs needs --tensor-parallel-size 1: leave one of the two out, or use "
            "--data-parallel-size for engines on GPUs of their own"
        )
    if cuda and not isinstance(spec, BroadSpec) and spec.quantization is not None:
        from weft.engine.runner.cuda_fp8 import lacking  # needs Triton

        assert here is not None
        what = "--quantization fp8" if spec.quantization.at_load else f"an FP8 checkpoint ({spec.quantization.method})"
        if here.capability < (8, 9):
            raise ConfigError(
                f"{what}: {here.name} does not multiply FP8; use a checkpoint in 16 bits, or --device cpu"
            )
        if reason := lacking(spec, invariant=config.batch_invariant):
            raise ConfigError(
                f"{what}: a GPU's FP8 products do not do {reason} yet; use a checkpoint in 16 bits, or --device cpu"
            )
        if spec.quantization.activations == "static":
            log.warning("the checkpoint's static scales of activations are not used: a GPU makes its own, as fine")
    device = gpu_device() if cuda else torch.device("cpu")
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
    elif cuda:
        dtype = torch.float16 if spec.dtype == "float16" else torch.bfloat16
    else:
        dtype = _cpu_dtype(spec)
    if not cuda and dtype == torch.float16:
        raise ConfigError("--dtype float16 needs a GPU; use float32 or bfloat16 on a CPU")
    if cuda and dtype == torch.float32:
        raise ConfigError("--dtype float32 needs --device cpu; a GPU serves bfloat16 or float16")
    max_model_len = config.max_model_len or spec.max_positions
    if max_model_len > spec.max_positions:
        raise ConfigError(f"--max-model-len {max_model_len} is more than the model's {spec.max_positions} positions")
    max_num_seqs = config.seats or (1024 if cuda else 256)
    tables = max_model_len * (4 * spec.head_dim + 4 * max_num_seqs)  # of angles, and of each request's token ids
    if tables > memory_bytes(torch.device("cpu")):
        raise OutOfMemory(
            f"a context of {max_model_len} tokens takes tables of {tables / GIB:,.0f} GiB: lower --max-model-len"
        )
    if isinstance(spec, BroadSpec) and config.batch_invariant:
        raise ConfigError("--batch-invariant needs weft's own layers: transformers' code has none; leave it out")
    pages_dtype = dtype if config.kv_cache_dtype == "auto" else E4M3
    if pages_dtype == E4M3 and isinstance(spec, BroadSpec):
        raise ConfigError("--kv-cache-dtype fp8 needs weft's own layers: transformers' code has none; leave it out")
    if pages_dtype == E4M3 and here is not None and cuda and here.capability < (8, 9):
        raise ConfigError(f"--kv-cache-dtype fp8: {here.name} has no FP8; leave it out, or use --device cpu")
    shapes: Sequence[AttentionShape]
    if isinstance(spec, BroadSpec):
        kv = KvLayout.of(spec, config.page_size, dtype, TRITON_HEAD_DIMS if cuda else ())
        kinds = kinds_of_calls(spec, kv)
        shapes = [kind.shape(kv, dtype, device, max_model_len) for kind in dict.fromkeys(kinds)]
        if cuda:
            refuse_on_gpu(spec, kinds, config.attention_backend)
    else:
        kv = KvLayout.of(spec, config.page_size, pages_dtype)
        shapes = [_attention_shape(spec, kv, dtype, device, max_model_len)]
    (backend,) = {_attention(config, shape) for shape in shapes}
    planned = cuda and spec.native
    if not planned:
        _check_plan(config)
    plan = _plan(config, spec, device, dtype, pages_dtype, backend) if planned else None
    dense = plan.dense_batch if plan is not None else 0
    max_num_batched_tokens = config.max_num_batched_tokens or dense or (2048 if cuda else 512)
    if config.batch_invariant and max_num_batched_tokens < INVARIANT_CHUNK:
        raise ConfigError(f"--batch-invariant needs --max-num-batched-tokens {INVARIANT_CHUNK} or more")
    if cuda and spec.native:
        _check_kernels(spec)
    weight_bytes = spec.weight_bytes(dtype.itemsize)
    here_bytes = weight_bytes * (1 if cuda else ranks)  # ranks of a CPU share its memory
    part = config.share.memory
    copies = sharers if isinstance(spec, BroadSpec) else sharers // config.share.weight_sharers
    if device.type != "meta" and copies * here_bytes > 0.9 * part * memory_bytes(device):
        times = f" for each of {copies} engines" if copies > 1 else ""
        times += f", and {part:.0%} of it is this model's (memory_share)" if part < 1 else ""
        raise OutOfMemory(
            f"the weights need {here_bytes / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}{times}, "
            f"the {'GPU' if cuda else 'machine'} has {memory_bytes(device) / GIB:.1f} GiB: "
            "use a smaller model or --dtype bfloat16"
        )
    pages_per_request = -(-max_model_len // kv.page_size)
    num_pages: int | None
    if config.num_pages is not None:
        num_pages = config.num_pages
    elif config.kv_cache_gib is not None:
        num_pages = kv.pages_in(config.kv_cache_gib * GIB / ranks)
    elif cuda:
        num_pages = None
    else:
        room = int(memory_bytes(device) * part * CPU_MEMORY_SHARE / (sharers * ranks))
        room -= weight_bytes * copies // sharers
        num_pages = min(max_num_seqs * pages_per_request + 1, kv.pages_in(room))
    if num_pages is not None and num_pages < 2:
        raise OutOfMemory(
            f"the KV pool has room for {max(num_pages, 0)} pages of {kv.page_bytes / 2**20:.1f} MiB, "
            "it needs at least 2: raise --kv-cache-gib or lower --page-size"
        )
    if num_pages is not None and device.type != "meta" and (sharers > 1 or (part < 1 and not cuda)):
        _check_shares(config, ranks * (weight_bytes * copies // sharers + num_pages * kv.page_bytes), device)
    # No context is longer than its pages: what the config promises beyond that needs no table of positions.
    in_memory = num_pages - 1 if num_pages is not None else kv.pages_in(memory_bytes(device))
    max_model_len = max(2, min(max_model_len, in_memory * kv.page_size))
    if config.pod != "off":
        _check_pod(config, spec, backend, kv, dtype, device, max_model_len)
    return ResolvedConfig(
        device,
        dtype,
        dtype,
        kv,
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens,
        num_pages,
        config.gpu_memory_utilization * part,
        # One core is for the scheduler and the API: where their work takes a thread's core, all threads wait for it.
        config.cpu_threads or max(1, len(os.sched_getaffinity(0)) - 1),
        backend,
        config.batch_invariant,
        config.cache_path,
        config.tuning_seconds,
        plan,
        config.wait_for_plan or ranks > 1,  # all ranks must have a pipeline before one of them runs it
        sleeps=config.share.sleeps and ranks == 1,
        has_neighbours=part < 1,
        sharers=sharers,
        common_weights=copies < sharers,
        packed=_packed(kv) if config.tier_kv_format == "packed" else None,
        pod=config.pod,
    )


def _check_pod(
    config: EngineConfig, spec: ModelSpec, backend: str, kv: KvLayout, dtype: torch.dtype, device: torch.device,
    max_model_len: int,
) -> None:  # fmt: skip
    """Raises `ConfigError` where attention cannot be one launch."""
    able = device.type != "cpu" and backend == "triton" and spec.native and not config.batch_invariant
    if able:
        from weft.kernels.attention_triton import cuts_prefill  # Triton, which a CPU need not have

        able = cuts_prefill(_attention_shape(spec, kv, dtype, device, max_model_len))
    if not able:
        raise ConfigError(
            f"--pod {config.pod} needs a Hopper GPU, the triton attention back end, 16-bit KV, heads of 64 or 128 "
            "numbers, no windows and no --batch-invariant: leave it out"
        )


def _packed(kv: KvLayout) -> PackedPage:
    if (form := kv.packed) is None:
        name = str(kv.dtype).removeprefix("torch.")
        why = f"they are {name}" if kv.dtype != torch.bfloat16 else "lower --page-size"
        raise ConfigError(f"--tier-kv-format packed: these KV pages cannot be packed: {why}; bfloat16 is what it packs")
    return form


def _check_shares(config: EngineConfig, own_bytes: int, device: torch.device) -> None:
    """Refuse engines that fit the device one by one, but not together. `own_bytes`: weights and pages of one, of
    all its ranks."""
    sharers, all_of_it = config.share.sharers, config.share.memory * memory_bytes(device)
    on_gpu = device.type == "cuda"
    if (together := sharers * (own_bytes + (0 if on_gpu else config.host_kv_gib * GIB))) > all_of_it:
        raise OutOfMemory(
            f"{sharers} engines need {together / GIB:.1f} GiB for weights and KV pages, the "
            f"{'GPU' if on_gpu else 'machine'} has {all_of_it / GIB:.1f} GiB for them: lower --kv-cache-gib"
            f"{' or --num-pages' if on_gpu else ', --num-pages or --host-kv-gib'}, which are each engine's, or the "
            "number of engines"
        )


def _check_plan(config: EngineConfig) -> None:
    """A CPU runs no plan, nor does transformers' code; one that is named must still be one. Raises `ConfigError`."""
    if config.plan not in ("auto", "serial"):
        load_plan(Path(config.plan).expanduser())
        log.warning("the plan %s is not used: plans are for a GPU and weft's own layers", config.plan)


def _plan(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype, pages: torch.dtype, backend: str
) -> Plan | None:  # fmt: skip
    if len({layer.experts for layer in spec.layers}) > 1:
        if config.plan not in ("auto", "serial"):
            raise ConfigError(f"--plan {config.plan}: a model with dense layers and ones with experts runs serially")
        return None
    if backend != "triton" or config.batch_invariant:
        if config.plan not in ("auto", "serial"):
            raise ConfigError(
                f"--plan {config.plan}: pipelines need the triton attention back end and no batch invariance"
            )
        return None
    target = target_of(spec, device, dtype, pages)
    return choose_plan(config.plan, spec, target, config.max_num_batched_tokens)


def _attention_shape(
    spec: ModelSpec, kv: KvLayout, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> AttentionShape:
    # A window that no context outgrows is none.
    windows = tuple(w if w and w < max_model_len else None for w in spec.windows)
    return AttentionShape(
        spec.num_heads, kv.num_kv_heads, kv.head_dim, kv.page_size, dtype, device, kv.dtype, windows,
        spec.attention_scale, spec.attention_softcap, spec.sinks,
    )  # fmt: skip


def _attention(config: EngineConfig, shape: AttentionShape) -> BackendName:
    """The attention back end, known to work here. Raises `ConfigError`."""
    try:
        name = attention_backends.choose(config.attention_backend, shape.device)
        attention_backends.check(name, shape)
    except AttentionUnavailable as error:
        raise ConfigError(f"--attention-backend {config.attention_backend}: {error}") from None
    return name


def _check_kernels(spec: ModelSpec) -> None:
    """Refuse what the GPU kernels were not made for. Attention's own limits: see `attention_backends.check`."""
    if lacking := next((part for part, asked in _beyond_gpu(spec).items() if asked), None):
        raise ConfigError(f"{spec.architecture}: the GPU kernels have no {lacking} yet; use --device cpu")
    e = spec.experts
    sizes = [spec.hidden_size, spec.intermediate_size]
    if e is not None:
        sizes += [e.intermediate_size, e.shared_size]
    if any(size % 8 for size in sizes):
        raise ConfigError("a GPU needs hidden and intermediate sizes that are multiples of 8; use --device cpu")


def _experts_alone(spec: ModelSpec) -> bool:
    """No MLP is dense."""
    return spec.experts is not None and not spec.experts.shared_size and all(layer.experts for layer in spec.layers)


def _beyond_gpu(spec: ModelSpec) -> dict[str, bool]:
    """Parts that only the torch twins compute, and whether the model has them."""
    e = spec.experts
    return {
        f"experts with norms placed {spec.placement.value}": e is not None and spec.placement is not Placement.PRE,
        "experts with LayerNorm": e is not None and spec.norm.centred,
        "norm over all heads on several ranks": spec.qk_norm == "projection" and spec.shard_of.ranks > 1,
        f"activation {spec.activation} of experts": e is not None and spec.activation not in EXPERT_ACTIVATIONS,
        "activation swiglu_oai outside experts": spec.activation == "swiglu_oai" and not _experts_alone(spec),
    }
