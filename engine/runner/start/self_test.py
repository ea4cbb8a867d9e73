"""`self_test`: checks that a `transformers` model computes the same in weft's batches as in its own `generate`.

It runs tokens of two sequences in chunks, in a batch and one by one. A model that differs is refused, because it would
give wrong answers without any error. `load_tested` loads a model and tests it on a CPU; on a GPU `make_runner` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from weft.engine.config import EngineConfig
from weft.engine.errors import ModelError, one_line
from weft.engine.model.transformers_impl.module import TransformersModule
from weft.engine.model.transformers_impl.reading import quiet
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.model.transformers_impl.weights import load_transformers
from weft.engine.runner.cpu.transformers_cpu import TransformersCpuExecutor
from weft.engine.runner.iteration.batch import Batch, SamplingInputs, StateRows
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.engine.wire.sampling import COLUMNS, SamplingParams

LONG, SHORT, NEW = 13, 6, 3  # Tokens of the two prompts, and tokens generated after each.
TOLERANCE = {torch.float32: 1e-3}
NARROW_TOLERANCE = 0.1
"""Limit for bfloat16 and float16: the median over rows of the norm of the difference relative to the row's norm."""

Run = Callable[[Batch], Tensor]  # Computes a batch and returns the logits `[S, V]` of the rows that sample.


class _Sequence(NamedTuple):
    tokens: np.ndarray  # Prompt and output.
    prompt_len: int
    logits: Tensor  # `[NEW, V]` from the model's own `generate`.


def load_tested(spec: TransformersSpec, options: EngineConfig, config: ResolvedConfig) -> TransformersModule:
    """Load the model. Raises `ModelError`, also if its results in weft's batches differ from those on its own."""
    model = load_transformers(
        spec, options.model_path, device=config.device, dtype=config.weight_dtype, max_positions=config.max_model_len,
        dummy_seed=options.seed if options.load_format == "dummy" else None, trusted=options.trust_remote_code,
    )  # fmt: skip
    if config.attention != "triton":  # a GPU's test needs its runner's work lists
        _test(spec, model, config)
    return model


def _test(spec: TransformersSpec, model: TransformersModule, config: ResolvedConfig) -> None:
    shape = config.kv.shape(1 + pages_needed(config.kv.page_size, config.states.pages))
    with torch.inference_mode():
        # Unwritten pages may contain anything.
        pool = torch.full(shape, float("nan"), dtype=config.kv.dtype)
        pool[0] = 0
    executor = TransformersCpuExecutor(spec, model, pool, config)

    def run(batch: Batch) -> Tensor:
        inputs = executor.inputs(batch, torch.from_numpy(batch.token_ids).long())
        x, place = executor.forward(inputs)
        return executor.logits(x, place, torch.from_numpy(batch.sampling.logit_tokens).long())

    self_test(spec, model, run, config)


def pages_needed(page_size: int, states: int = 0) -> int:
    """Return how many pages a self-test uses, starting with page 1. states: pages of a request's states."""
    return 2 * -(-(LONG + NEW) // page_size) + 4 * states


def self_test(spec: TransformersSpec, model: TransformersModule, run: Run, config: ResolvedConfig) -> None:
    """Run the test. run: uses a pool with `pages_needed` free pages. Raises `ModelError` if results differ."""
    try:
        _self_test(spec, model, run, config)
    except ModelError as error:
        raise ModelError(f"transformers' code cannot serve {spec.architecture} here: {error}") from None


def _self_test(spec: TransformersSpec, model: TransformersModule, run: Run, config: ResolvedConfig) -> None:
    device = next(model.module.parameters()).device
    generator = np.random.default_rng(0)
    room = config.max_model_len - NEW
    lengths = (min(LONG, room), min(SHORT, room))
    if room < 1:
        raise ModelError(f"--max-model-len {config.max_model_len} is too short for the self-test of such a model")
    ids = _ordinary_tokens(spec)
    prompts = [generator.choice(ids, length) for length in lengths]
    try:
        with torch.inference_mode(), quiet():
            expected = [_generate_alone(model, prompt, device) for prompt in prompts]
            got = _run_batched(run, expected, config.kv.page_size, config.states.pages)
    except ModelError:
        raise
    except Exception as error:  # of the model's code, on weft's batch
        raise ModelError(f"its code fails on tokens of several requests in a row: {one_line(error)}") from None
    for sequence, logits in zip(expected, got, strict=True):
        _compare(sequence.logits, logits, config.compute_dtype)


def _ordinary_tokens(spec: TransformersSpec) -> np.ndarray:
    """Return ids without tokens for images, padding and ends."""
    text = spec.config.get_text_config(decoder=True)
    special = {v for c in (spec.config, text) for k, v in vars(c).items() if k.endswith("_id") and isinstance(v, int)}
    special |= set(spec.eos_token_ids)
    ids = np.array([i for i in range(min(spec.vocab_size, 5000)) if i not in special])
    return ids[len(ids) // 4 :]


def _generate_alone(model: TransformersModule, prompt: np.ndarray, device: torch.device) -> _Sequence:
    ids = torch.from_numpy(prompt.astype(np.int64))[None].to(device)
    module = model.module
    before, module.generation_config = module.generation_config, GenerationConfig()
    attention = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        output = module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW,
            pad_token_id=0, use_cache=True, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    finally:
        module.set_attn_implementation(attention)
        module.generation_config = before
    tokens = output.sequences[0].cpu().numpy().astype(np.int32)
    if len(tokens) != len(prompt) + NEW:
        raise ModelError(f"its generate() gave {len(tokens) - len(prompt)} tokens, not {NEW}")
    return _Sequence(tokens, len(prompt), torch.cat(list(output.logits)).float().cpu())


def _run_batched(run: Run, sequences: list[_Sequence], page_size: int, states: int) -> list[Tensor]:
    """Return the logits `[NEW, V]` of each sequence computed by weft: the first prompt in two chunks, the second prompt
    in a batch with the second chunk, then both token by token."""
    own = -(-(LONG + NEW) // page_size)
    # Pages are neither in order nor adjacent.
    tables = [np.arange(1 + i, 1 + 2 * own, 2, dtype=np.int32)[::-1] for i in range(2)]
    cut = max(1, sequences[0].prompt_len // 2)
    steps: list[list[tuple[int, int, int, bool]]] = [[(0, 0, cut, False)]]
    if cut < sequences[0].prompt_len:
        steps.append([(0, cut, sequences[0].prompt_len, True), (1, 0, sequences[1].prompt_len, True)])
    else:
        steps = [[(0, 0, cut, True), (1, 0, sequences[1].prompt_len, True)]]
    for n in range(NEW - 1):
        steps.append([(i, s.prompt_len + n, s.prompt_len + n + 1, True) for i, s in enumerate(sequences)])
    found: list[list[Tensor]] = [[], []]
    for number, parts in enumerate(steps, 1):
        decodes = len(parts) if number > len(steps) - (NEW - 1) else 0
        batch = _batch(number, parts, decodes, sequences, tables, page_size)
        if states:
            batch = batch._replace(states=_states(number, batch, parts, 1 + 2 * own, states))
        logits = run(batch).float().cpu()
        for row, (i, *_) in enumerate(part for part in parts if part[3]):
            found[i].append(logits[row])
    return [torch.stack(rows) for rows in found]


def _states(number: int, batch: Batch, parts: list[tuple[int, int, int, bool]], first: int, pages: int) -> StateRows:
    """Let each sequence use two states in turn, of `pages` pages each, from page `first` on."""
    table = first + np.arange(4 * pages, dtype=np.int32).reshape(2, 2, pages)
    rows = [i for i, *_ in parts]
    fresh = batch.kv_len == batch.query_len
    read = np.where(fresh[:, None], np.int32(0), table[(number - 1) % 2][rows])
    none = np.zeros(0, np.int32)
    return StateRows(read, fresh, table[number % 2][rows], none, none, none.reshape(0, pages))


def _batch(
    number: int, parts: list[tuple[int, int, int, bool]], decodes: int, sequences: list[_Sequence],
    tables: list[np.ndarray], page_size: int,
) -> Batch:  # fmt: skip
    """parts: (sequence, first position, end, whether its last token is sampled)."""
    positions = np.concatenate([np.arange(begin, end, dtype=np.int32) for _, begin, end, _ in parts])
    owners = np.concatenate([np.full(end - begin, i) for i, begin, end, _ in parts])
    pages = np.array([tables[i][p // page_size] for i, p in zip(owners, positions, strict=True)], np.int64)
    ends = np.cumsum([end - begin for _, begin, end, _ in parts], dtype=np.int32)
    sampled = np.array([row for row, part in enumerate(parts) if part[3]], np.int32)
    slots = np.array([i for i, *_ in parts], np.int32)
    n, none = len(sampled), SamplingInputs.none()
    greedy = SamplingParams(temperature=0.0)
    return Batch(
        step=number,
        num_decodes=decodes,
        slots=slots,
        epochs=np.zeros(len(parts), np.int32),
        query_len=np.array([end - begin for _, begin, end, _ in parts], np.int32),
        kv_len=np.array([end for _, _, end, _ in parts], np.int32),
        token_ids=np.array([sequences[i].tokens[p] for i, p in zip(owners, positions, strict=True)], np.int32),
        positions=positions,
        slot_mapping=pages * page_size + positions % page_size,
        page_table=np.stack([tables[i] for i, *_ in parts]),
        sampled_rows=sampled,
        sampling=none._replace(
            slots=slots[sampled],
            logit_tokens=(ends - 1)[sampled],
            columns={c.name: np.full(n, c.of(greedy), c.dtype) for c in COLUMNS},
            uniform=np.full(n, 0.5, np.float32),
        ),
        count_resets=(),
        prompt_logprobs=(),
    )


def _compare(expected: Tensor, actual: Tensor, dtype: torch.dtype) -> None:
    if not actual.isfinite().all() or not expected.isfinite().all():
        raise ModelError("its logits are not finite in the self-test")
    if (tolerance := TOLERANCE.get(dtype)) is not None:
        difference = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    else:
        tolerance = NARROW_TOLERANCE
        lengths = expected.norm(dim=-1).clamp(min=1e-6)
        difference = float(((actual - expected).norm(dim=-1) / lengths).median())
    if difference > tolerance:
        raise ModelError(
            f"its logits differ by {difference:.2g} of the largest between a batch of two and generate() alone, so "
            "answers would be wrong"
        )
