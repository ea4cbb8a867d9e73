"""What a search's numbers are worth: Equation 5's optimum beside them, and which of them were measured."""

from __future__ import annotations

from weft.autosearch import costmodel
from weft.autosearch.modelled import SOURCES
from weft.autosearch.profile import Profile
from weft.autosearch.structure import every_operation
from weft.engine.model.operations import Role
from weft.engine.model.spec import ModelSpec


def product_flops(profile: Profile, spec: ModelSpec) -> float:
    """FLOP/s of the fastest product that the profile has, on one GPU. spec: of one rank."""
    operations = every_operation(spec)
    products = [o.name for o in operations.values() if o.role in (Role.PRODUCT, Role.EXPERTS)]
    return max(operations[p.operation].flops * p.work / p.ms * 1e3 for p in profile.points if p.operation in products)


def optimum(profile: Profile, spec: ModelSpec, whole: ModelSpec) -> tuple[float, str]:
    """Tokens/s of one GPU by Equation 5, and the line that says so. whole: the model of all ranks."""
    flops, gpus = product_flops(profile, spec), spec.shard_of.ranks
    best = costmodel.optimal_throughput(flops, whole.active_parameters)
    kind = "modelled" if profile.modelled else "measured"
    text = f"optimal throughput (Equation 5) {best:,.0f} tokens/s/GPU"
    if gpus > 1:
        text += f", {gpus * best:,.0f} on {gpus} GPUs"
    return best, f"{text}, at the {flops / 1e12:,.0f} TFLOP/s of the fastest {kind} product"


def reached(name: str, tokens: int, layer_ms: float, spec: ModelSpec, best: float) -> str:
    """How near to the optimum an iteration comes whose layers take so long; without embedding and sampling."""
    rate = tokens / (layer_ms / 1e3 * spec.num_layers) / spec.shard_of.ranks
    return f"{name}: {rate:,.0f} tokens/s/GPU in the layers alone, {rate / best:.0%} of it"


def provenance(profile: Profile) -> list[str]:
    """What was measured and what was modelled, where anything was modelled."""
    if not profile.modelled:
        return []
    measured = [name for name in profile.features if name not in profile.modelled]
    lines = [f"MODELLED, NOT MEASURED ({profile.target.gpu}): {', '.join(profile.modelled)}"]
    lines.append(f"measured: {', '.join(measured) or 'nothing of this model, and no pair of operations'}")
    return lines + [f"behind the formulas: {text}" for text in SOURCES]
