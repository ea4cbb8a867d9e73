"""`on_cards`: what a model needs on known GPUs, and the rate that their memory allows one request; without torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from weft.engine.errors import WeftError
from weft.engine.model.implementation import in_format, widened
from weft.engine.model.spec import ModelSpec
from weft.engine.runner.options.gpu_limits import check_kernels, unsupported_fp8
from weft.engine.runner.options.machine import CACHED_BYTES

GIB = 2**30
UTILIZATION = 0.9  # The default of --gpu-memory-utilization.


class Card(NamedTuple):
    name: str
    memory_gib: float  # As the driver reports it.
    gb_per_second: int  # Memory bandwidth as the vendor publishes it.
    has_fp8: bool


CARDS = (
    Card("L4", 22.5, 300, True),
    Card("RTX 4090", 24.0, 1008, True),
    Card("L40S", 45.0, 864, True),
    Card("A100 80 GB", 80.0, 2039, False),
    Card("H100 SXM", 79.6, 3350, True),
    Card("H200", 140.4, 4800, True),
    Card("B200", 179.1, 8000, True),
)


def bytes_per_token(spec: ModelSpec, itemsize: int) -> int:
    """Return the bytes of weights that one request reads for a token: all but other experts and the embedding's other
    rows."""
    if not spec.native:
        return spec.weight_bytes(itemsize) * spec.active_parameters // max(1, spec.num_parameters)
    idle = spec.num_parameters - spec.active_parameters
    in_fp8 = spec.quantization is not None
    table = 0.0
    if not spec.tie_embeddings:
        own, table = spec.packed, float(itemsize)
        if own is not None:
            table = own.table_bytes + own.table_plain * itemsize
        table *= len(spec.vocabulary) * spec.hidden_size
    return int(spec.weight_bytes(itemsize) - idle * (1 if in_fp8 else itemsize) - table)


def on_cards(spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """Return for each card and each format of the weights: bytes, whether they fit, the KV tokens that fit besides, and
    the most tokens a second of one request. spec: of one rank; the card is one rank's."""
    return {card.name: {name: _on(card, own, name) for name, own in _formats(spec).items()} for card in CARDS}


def _formats(spec: ModelSpec) -> dict[str, ModelSpec]:
    plain = "float16" if spec.dtype == "float16" else "bfloat16"
    if not spec.native:
        return {plain: spec}
    own = widened(spec)
    return {"fp8": own} if own.quantization is not None else {plain: own, "fp8": in_format(own, "fp8")}


def _on(card: Card, spec: ModelSpec, name: str) -> dict[str, Any]:
    if (why := _why_not(card, spec, name)) is not None:
        return {"fits": False, "why_not": why}
    weights = spec.weight_bytes(2)
    kv = spec.kv_planes * 2 * sum(heads * width for heads, width in spec.kv_heads)
    room = int(card.memory_gib * GIB * UTILIZATION) - weights
    if room < kv:
        return {"fits": False, "why_not": f"{weights / GIB:.1f} GiB of weights", "weight_bytes": weights}
    read = bytes_per_token(spec, 2)
    return {
        "fits": True, "weight_bytes": weights, "kv_tokens": room // kv if kv else None, "bytes_per_token": read,
        "tokens_per_second_bound": round(card.gb_per_second * 1e9 / read) if read > CACHED_BYTES else None,
    }  # fmt: skip


def _why_not(card: Card, spec: ModelSpec, name: str) -> str | None:
    """Return why no such card serves the model in this format, or None."""
    if spec.native:
        try:
            check_kernels(spec)
        except WeftError as error:
            return str(error)
    if name != "fp8":
        return None
    if not card.has_fp8:
        return "no FP8"
    missing = unsupported_fp8(spec)
    return None if missing is None else f"FP8 does not support {missing} yet"
