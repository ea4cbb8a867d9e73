"""`ResolvedConfig`: options resolved for the device and model: dtypes, batch limits, size of the pool."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from weft.engine.config import EngineConfig, Pod, expanded
from weft.engine.config.speculation import DraftOptions
from weft.engine.errors import ConfigError, OutOfMemory
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.memory.state_layout import NO_STATES, StateLayout
from weft.engine.model.drafts import read_draft
from weft.engine.model.drafts.spec import DraftSpec, Target
from weft.engine.model.implementation import widened
from weft.engine.model.packed import packed_as
from weft.engine.model.parts import StateTensor
from weft.engine.model.spec import ModelSpec
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.plans.choose import choose_plan, target_of
from weft.engine.plans.plan import Plan, load_plan
from weft.engine.runner.options.footprint import GIB, Footprint, memory_bytes
from weft.engine.runner.options.gpu_limits import check_adapters, check_fp8, check_kernels, check_pod
from weft.engine.runner.options.machine import CPU_SEQUENCES
from weft.engine.runner.options.transformers_shapes import attention_kinds, refuse_on_gpu
from weft.kernels.attention import backends as attention_backends
from weft.kernels.attention.backend import AttentionShape, AttentionUnavailable
from weft.kernels.attention.backends import TRITON_HEAD_DIMS, BackendName
from weft.kernels.attention.work_lists import tokens_of_whole_tiles
from weft.kernels.common.gpu import Gpu, gpu, gpu_device
from weft.kernels.formats.fp8 import E4M3
from weft.kernels.formats.packed_page import PackedPage
from weft.kernels.native.products import start as start_native

log = logging.getLogger("weft.engine")
INVARIANT_CHUNK = 128  # Chunk tokens that batch invariance may need; also the tile size of attention in torch.

DRAFT_ROWS = 64  # Draft tokens of an iteration on a GPU for which there is room when every slot runs.


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The engine's options with all defaults resolved."""

    device: torch.device
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype  # Dtype of activations.
    kv: KvLayout  # Layout and dtype of a page.
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int | None  # None: as many as fit the GPU once everything else is allocated.
    gpu_memory_utilization: float  # Fraction of the GPU, already multiplied by the model's memory share.
    cpu_threads: int
    attention: BackendName
    batch_invariant: bool  # Every operation accumulates in an order that does not depend on the rest of the batch.
    cache_dir: Path  # Folder of results tuned on this machine.
    tuning_seconds: float
    plan: Plan | None = None  # Plan of overlapped nano-batches; None: the serial plan only.
    wait_for_plan: bool = True  # Prepare all pipelines of the plan before the first iteration.
    sleeps: bool = False  # Allocate weights and KV pool so that a sleeping model can give up their memory.
    has_neighbours: bool = False  # Other models use the same device.
    sharers: int = 1  # Engines of this model on the same device, this one included.
    common_weights: bool = False  # These engines share one copy of the weights.
    packed: PackedPage | None = None  # Format of pages in the tiers below the device; None: not packed.
    pod: Pod = "off"  # Whether decodes and chunks share one attention launch.
    enforce_eager: bool = False  # Launch every kernel of an iteration instead of replaying CUDA graphs.
    late_launch: bool = False  # Delay launches so that late arrivals can join.
    drafting: DraftOptions | None = None  # How drafts are made; None: no speculation.
    draft: DraftSpec | None = None  # The model that drafts; None: drafts need none.
    adapters: bool = False  # Requests may use LoRA adapters.
    adapter_slots: int = 0  # LoRA adapters in a GPU's memory at once; 0: none, or a CPU computes them.
    adapter_rank: int = 0  # Largest rank of these adapters.
    states: StateLayout = NO_STATES  # Recurrent states in pages, in the dtypes in which they are kept.

    @property
    def max_sampled(self) -> int:
        """The maximum of tokens that an iteration on a GPU samples: one for each slot, and some for drafts."""
        return self.max_num_seqs + (0 if self.drafting is None else DRAFT_ROWS)

    def chunk_step(self, spec: ModelSpec) -> int:
        """Return the tokens at whose multiples prompts are cut. With batch invariance no attention tile is divided.
        With recurrent states no block of theirs is, and states stand at the ends of pages."""
        step = 1
        if self.batch_invariant:
            step = tokens_of_whole_tiles(spec.heads_per_kv) if self.attention == "triton" else INVARIANT_CHUNK
        return math.lcm(step, self.states.block, self.kv.page_size) if self.states.pages else step

    def attention_shape(self, spec: ModelSpec) -> AttentionShape:
        return _attention_shape(spec, self.kv, self.compute_dtype, self.device, self.max_model_len)


def _compute_dtype(config: EngineConfig, spec: ModelSpec, *, cuda: bool) -> torch.dtype:
    """Raises `ConfigError`."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
    elif cuda:
        dtype = torch.float16 if spec.dtype == "float16" else torch.bfloat16
    else:
        dtype = _cpu_dtype(spec)
    if not cuda and dtype == torch.float16:
        raise ConfigError("--dtype float16 needs a GPU; use float32 or bfloat16 on a CPU")
    if cuda and dtype == torch.float32:
        raise ConfigError("--dtype float32 needs --device cpu; a GPU serves bfloat16 or float16")
    return dtype


def _cpu_dtype(spec: ModelSpec) -> torch.dtype:
    """Return bfloat16 for a bfloat16 checkpoint on a CPU with native bfloat16: half the bytes, twice the speed."""
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native and spec.dtype == "bfloat16" else torch.float32


def _pages_dtype(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, here: Gpu | None) -> torch.dtype:
    """here: the GPU that holds the pages. Raises `ConfigError`."""
    if isinstance(spec, TransformersSpec) and config.batch_invariant:
        raise ConfigError("--batch-invariant needs weft's own layers, not transformers' code; leave it out")
    if config.kv_cache_dtype == "auto":
        return dtype
    if isinstance(spec, TransformersSpec):
        raise ConfigError("--kv-cache-dtype fp8 needs weft's own layers, not transformers' code; leave it out")
    if spec.latent is not None:
        raise ConfigError("--kv-cache-dtype fp8: latents are kept in 16 or 32 bits so far; leave it out")
    if here is not None and here.capability < (8, 9):
        raise ConfigError(f"--kv-cache-dtype fp8: {here.name} has no FP8; leave it out, or use --device cpu")
    return E4M3


def served_as(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """Return the model as its device computes it."""
    if config.device == "cpu" or gpu() is None:
        return _packed_on_cpu(spec, config)
    return spec.expanded() if isinstance(spec, TransformersSpec) else widened(spec)


def _packed_on_cpu(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """Return the model with its matrices in 4 and 8 bits, if the checkpoint has any and this machine's compiled kernels
    multiply by them."""
    if not spec.native or config.quantization is not None or config.load_format == "dummy":
        return spec
    packed = packed_as(spec, config.model_path)
    if packed.packed is None:
        return spec
    if (why := start_native(config.cache_path)) is None:
        return packed
    log.warning("weights in 4 and 8 bits become 16 or 32 bits: %s", why)
    return spec


def resolve(config: EngineConfig, spec: ModelSpec) -> ResolvedConfig:
    """Resolve the configuration for this machine. spec: result of `served_as`.

    Raises `ConfigError` or `OutOfMemory`, one line."""
    here = _gpu_for(config, spec)
    cuda = here is not None
    ranks, sharers = spec.shard_of.ranks, config.share.sharers
    device = gpu_device() if cuda else torch.device("cpu")
    dtype = _compute_dtype(config, spec, cuda=cuda)
    max_num_seqs = config.sequence_limit or (1024 if cuda else CPU_SEQUENCES)
    max_model_len = _context(config, spec, max_num_seqs)
    pages_dtype = _pages_dtype(config, spec, dtype, here)
    kv, shapes = _pages(config, spec, dtype, pages_dtype, device, max_model_len)
    states = _states(config, spec, dtype, kv.page_bytes, device)
    kv = replace(kv, states=states.id)
    (backend,) = {_attention(config, device, shape) for shape in shapes or (None,)}
    drafting = _drafting(config, spec, backend, cuda=cuda)
    draft = None if drafting is None else read_draft(drafting, Target(spec, config.model_path, max_model_len))
    draft_bytes = 0
    if draft is not None:
        own = draft.layer
        kv = replace(kv, drafts=(len(own.kv_heads), *own.kv_heads[0]), draft_planes=own.kv_planes)
        # Engines that share the model's weights have a copy of these each.
        draft_bytes = own.weight_bytes(dtype.itemsize) * config.share.weight_sharers
    planned = cuda and spec.native
    if not planned:
        _check_plan(config)
    plan = _plan(config, spec, device, dtype, pages_dtype, backend) if planned else None
    dense = plan.dense_batch if plan is not None else 0
    max_num_batched_tokens = config.max_num_batched_tokens or dense or (2048 if cuda else 512)
    if config.batch_invariant and max_num_batched_tokens < INVARIANT_CHUNK:
        raise ConfigError(f"--batch-invariant needs --max-num-batched-tokens {INVARIANT_CHUNK} or more")
    if cuda and config.adapters:
        check_adapters(config, spec, backend)
    if cuda and spec.native:
        check_kernels(spec)
    copies = sharers if isinstance(spec, TransformersSpec) else sharers // config.share.weight_sharers
    footprint = Footprint(config, device, cuda, ranks, spec.weight_bytes(dtype.itemsize) + draft_bytes, copies)
    footprint.check_weights(dtype)
    each = -(-max_model_len // kv.page_size) + states.reserved
    num_pages = footprint.pages(kv, max_num_seqs * each + 1, states)
    # A context cannot exceed the pool, so longer ones need no table of positions.
    in_memory = num_pages - 1 if num_pages is not None else kv.pages_in(memory_bytes(device))
    max_model_len = max(2, min(max_model_len, (in_memory - states.reserved) * kv.page_size))
    if config.pod != "off":
        check_pod(config, spec, backend, _attention_shape(spec, kv, dtype, device, max_model_len))
    # The default where late launches were measured to help: iterations on CPUs and shared GPUs vary too much.
    alone = cuda and ranks == sharers == 1 and config.async_scheduling
    resolved = ResolvedConfig(
        device=device,
        weight_dtype=dtype,
        compute_dtype=dtype,
        kv=kv,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_pages=num_pages,
        gpu_memory_utilization=config.gpu_memory_utilization * config.share.memory,
        # Leave one core to the scheduler and the API: if they take a thread's core, all threads wait for that thread.
        cpu_threads=config.cpu_threads or max(1, len(os.sched_getaffinity(0)) - 1),
        attention=backend,
        batch_invariant=config.batch_invariant,
        enforce_eager=config.enforce_eager,
        cache_dir=config.cache_path,
        tuning_seconds=config.tuning_seconds,
        plan=plan,
        wait_for_plan=config.wait_for_plan or ranks > 1,  # all ranks need a pipeline before any rank runs it
        sleeps=config.share.sleeps and ranks == 1,
        has_neighbours=config.share.memory < 1,
        sharers=sharers,
        common_weights=copies < sharers,
        packed=_packed(kv) if config.tier_kv_format == "packed" else None,
        pod=config.pod,
        late_launch=alone if config.late_launch is None else config.late_launch,
        drafting=drafting,
        draft=draft,
        adapters=config.adapters,
        adapter_slots=config.max_loras if cuda and config.adapters else 0,
        adapter_rank=config.max_lora_rank,
        states=states,
    )
    if config.batch_invariant and states.pages and max_num_batched_tokens < (step := resolved.chunk_step(spec)):
        raise ConfigError(f"--batch-invariant needs --max-num-batched-tokens {step} or more for this model")
    return resolved


def _drafting(config: EngineConfig, spec: ModelSpec, attention: str, *, cuda: bool) -> DraftOptions | None:
    """Return how drafts are made. Raises `ConfigError` if they cannot be verified here; 'auto' is off then."""
    if (options := config.drafting) is None:
        return None
    if spec.recurrent:
        why = f"{spec.architecture} has recurrent layers, whose states cannot be rolled back; leave it out"
    elif options.by_model and (refusal := _no_model_drafts(config, spec, cuda=cuda)):
        why = refusal
    elif cuda and config.tensor_parallel_size > 1:
        why = "speculation runs on one GPU only so far: leave it out"
    elif cuda and not spec.native:
        why = f"on a GPU speculation does not run with transformers' code for {spec.architecture}: leave it out"
    elif cuda and attention != "triton":
        why = f"on a GPU speculation needs weft's own attention kernels, not {attention}: leave it out"
    else:
        return options
    if config.speculation == "auto":
        log.warning("--speculation auto is off: %s", why.partition(":")[0])
        return None
    name = "--speculative-config" if config.speculation == "off" else f"--speculation {config.speculation}"
    raise ConfigError(f"{name}: {why}")


def _no_model_drafts(config: EngineConfig, spec: ModelSpec, *, cuda: bool) -> str:
    """Return why no model can draft here, or ""."""
    if cuda and config.drafting is not None and config.drafting.method != "eagle3":
        return f"{config.drafting.method} drafts on a CPU only so far: use suffix, ngram or eagle3"
    if config.tensor_parallel_size > 1:
        return "models draft without tensor parallelism only: leave out --tensor-parallel-size"
    if not spec.native:
        return f"models draft for weft's own layers only, but transformers' code computes {spec.architecture}"
    if spec.packed is not None:
        return "models draft for weights in 16 or 32 bits only: use --quantization none"
    if spec.kv_window is not None:
        return f"{spec.architecture} gives pages back that a model that drafts still reads: leave it out"
    if config.kv_cache_dtype != "auto" or config.tier_kv_format != "raw":
        name = (
            "--tier-kv-format packed"
            if config.kv_cache_dtype == "auto"
            else f"--kv-cache-dtype {config.kv_cache_dtype}"
        )
        return f"K and V of a model that drafts are kept as they are: leave out {name}"
    return "" if config.load_format == "auto" else f"--load-format {config.load_format} has no model that drafts"


def _states(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, page_bytes: int, device: torch.device
) -> StateLayout:
    """Return the layout of recurrent states. Convolutions keep their last inputs, in `dtype`, that of activations.
    Raises `ConfigError` for options that exclude states, or have no effect without them."""
    if not spec.recurrent:
        if config.state_dtype != "auto" or config.state_interval:
            name = "--state-interval" if config.state_interval else "--state-dtype"
            raise ConfigError(f"{name}: {spec.architecture} has no recurrent layers; leave it out")
        return NO_STATES
    if config.plan not in ("auto", "serial"):
        raise ConfigError(f"--plan {config.plan}: a model with recurrent layers runs serially; leave it out")
    if config.pod != "off":
        raise ConfigError(f"--pod {config.pod}: a model with recurrent layers has no such launch; leave it out")
    if config.tier_kv_format == "packed":
        raise ConfigError("--tier-kv-format packed: recurrent states cannot be packed; leave it out")
    if device.type == "cuda":
        raise ConfigError(f"{spec.architecture} has recurrent layers, which run on a CPU only so far: use --device cpu")
    activations = str(dtype).removeprefix("torch.")

    def kept(tensor: StateTensor) -> StateTensor:
        recurrent = tensor.dtype if config.state_dtype == "auto" else config.state_dtype
        return replace(tensor, dtype=activations if tensor.name.startswith("conv") else recurrent)

    layers = [state and replace(state, tensors=tuple(map(kept, state.tensors))) for state in spec.states]
    return StateLayout.of(layers, page_bytes)


def _context(config: EngineConfig, spec: ModelSpec, max_num_seqs: int) -> int:
    """Return the token limit of a request that the model and the CPU's tables allow. Raises `ConfigError`,
    `OutOfMemory`."""
    max_model_len = config.max_model_len or spec.max_positions
    if max_model_len > spec.max_positions:
        raise ConfigError(f"--max-model-len {max_model_len} is more than the model's {spec.max_positions} positions")
    tables = max_model_len * (4 * spec.head_dim + 4 * max_num_seqs)  # rotary angles, and each request's token ids
    if tables > memory_bytes(torch.device("cpu")):
        raise OutOfMemory(
            f"a context of {max_model_len} tokens needs tables of {tables / GIB:,.0f} GiB: lower --max-model-len"
        )
    return max_model_len


def _gpu_for(config: EngineConfig, spec: ModelSpec) -> Gpu | None:
    """Return the GPU that computes the model, or None for the CPU. Raises `ConfigError` if it cannot."""
    here = gpu()
    if config.device == "cuda" and here is None:
        raise ConfigError("--device cuda: no CUDA device is visible; use --device cpu")
    if config.device == "cpu" or here is None:
        return None
    sharers = config.share.sharers
    # Ranks of two engines on the same GPUs could wait for each other forever.
    if sharers > 1 and spec.shard_of.ranks > 1:
        raise ConfigError(
            f"--replicas {sharers} on GPUs needs --tensor-parallel-size 1: leave out one of the two, or use "
            "--data-parallel-size for engines on separate GPUs"
        )
    if not isinstance(spec, TransformersSpec) and spec.quantization is not None:
        check_fp8(spec, here)
    return here


def _pages(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, pages_dtype: torch.dtype, device: torch.device,
    max_model_len: int,
) -> tuple[KvLayout, Sequence[AttentionShape]]:  # fmt: skip
    """Return the layout of a page, and the kinds of attention that the model needs, each once."""
    if not isinstance(spec, TransformersSpec):
        kv = KvLayout.of(spec, config.page_size, pages_dtype)
        return kv, [_attention_shape(spec, kv, dtype, device, max_model_len)]
    cuda = device.type == "cuda"
    kv = KvLayout.of(spec, config.page_size, dtype, TRITON_HEAD_DIMS if cuda else ())
    kinds = attention_kinds(spec, kv)
    shapes = [kind.shape(kv, dtype, device, max_model_len) for kind in dict.fromkeys(kinds.values())]
    if cuda:
        refuse_on_gpu(spec, kinds.values(), config.attention_backend)
    return kv, shapes


def _packed(kv: KvLayout) -> PackedPage:
    if (form := kv.packed) is None:
        name = str(kv.dtype).removeprefix("torch.")
        why = f"they are {name}" if kv.dtype != torch.bfloat16 else "lower --page-size"
        raise ConfigError(f"--tier-kv-format packed: these KV pages cannot be packed: {why}; bfloat16 is what it packs")
    return form


def _check_plan(config: EngineConfig) -> None:
    """Check a plan file that a CPU or transformers' code will not use. Raises `ConfigError` if it is invalid."""
    if config.plan not in ("auto", "serial"):
        load_plan(expanded(config.plan))
        log.warning("the plan %s is not used: plans need a GPU and weft's own layers", config.plan)


def _plan(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype, pages: torch.dtype, backend: str,
) -> Plan | None:  # fmt: skip
    named, excluded = config.plan not in ("auto", "serial"), ""
    if len({layer.experts for layer in spec.layers}) > 1:
        excluded = "a model with both dense and expert layers runs serially"
    elif backend != "triton":
        excluded = "pipelines need the triton attention back end"
    elif config.enforce_eager:
        excluded = "pipelines run in CUDA graphs: leave out --enforce-eager"
    elif config.drafting is not None and config.drafting.by_model:
        excluded = "a model that drafts reads the stream of whole iterations"
    elif spec.recurrent:
        excluded = "a model with recurrent layers runs serially"
    elif config.batch_invariant and any(spec.windows):  # attention's order of sums would depend on where chunks are cut
        excluded = "--batch-invariant excludes plans for a model with attention windows"
    if named and excluded:
        raise ConfigError(f"--plan {config.plan}: {excluded}")
    if excluded or (config.batch_invariant and not named):
        return None
    target = target_of(spec, device, dtype, pages)
    return choose_plan(config.plan, spec, target, config.max_num_batched_tokens)


def _attention_shape(
    spec: ModelSpec, kv: KvLayout, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> AttentionShape:
    # A window as long as the longest context has no effect.
    windows = tuple(w if w and w < max_model_len else None for w in spec.windows)
    return AttentionShape(
        spec.num_heads, kv.num_kv_heads, kv.head_dim, kv.page_size, dtype, device, kv.dtype, windows,
        spec.attention_scale, spec.attention_softcap, spec.sinks, 0 if spec.latent is None else spec.latent.rank,
    )  # fmt: skip


def _attention(config: EngineConfig, device: torch.device, shape: AttentionShape | None) -> BackendName:
    """Return an attention back end that works here. shape: None if no layer needs one. Raises `ConfigError`."""
    try:
        name = attention_backends.choose(config.attention_backend, device)
        if shape is not None:
            attention_backends.check(name, shape)
    except AttentionUnavailable as error:
        raise ConfigError(f"--attention-backend {config.attention_backend}: {error}") from None
    return name
