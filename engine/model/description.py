"""`describe`: a human-readable summary of a model's parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from weft.engine.model.parts import Experts, Quantization, Recurrence
from weft.engine.model.rope import Rope
from weft.engine.model.spec import ModelSpec
from weft.engine.model.transformers_impl.spec import TransformersSpec


def describe(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return (part, description) pairs in the order of a layer."""
    if isinstance(spec, TransformersSpec):
        return _describe_calls(spec)
    gated = "gated " if spec.gated else ""
    rows = [
        ("layers", f"{spec.num_layers} of width {spec.hidden_size}, norms {spec.placement.value}"),
        ("norm", _norm(spec)),
        ("positions", _positions(spec)),
        ("attention", f"{spec.num_heads} query heads, {_kept(spec)}{_attention(spec)}"),
        ("windows", _windows(spec)),
    ]
    if spec.recurrence is not None:
        rows.append(("recurrent", _recurrence(spec, spec.recurrence)))
    layers = [spec.layer(i) for i in range(spec.num_layers)]
    dense = sum(layer.mlp and not layer.experts for layer in layers)
    if dense:
        rows.append(("MLP", f"{gated}{spec.activation}, {spec.intermediate_size} columns, on {dense} layers"))
    if spec.experts is not None:
        rows.append(
            (
                "experts",
                f"{_experts(spec.experts)}, {gated}{spec.activation}, on {sum(of.experts for of in layers)} layers",
            )
        )
    biases = {"q, k, v": spec.qkv_bias, "o": spec.o_bias, "MLP": spec.mlp_bias, "vocabulary": spec.head_bias}
    rows.append(("biases", ", ".join(name for name, there in biases.items() if there) or "none"))
    if spec.quantization is not None:
        rows.append(("weights in FP8", _quantization(spec.quantization)))
    if spec.widened:
        rows.append(("weights on disk", "FP8, for activations in 16 bits; 16 bits once loaded"))
    if spec.integers is not None:
        own = spec.integers
        by = f"groups of {own.group} columns" if own.group else "rows"
        rows.append(
            (
                "weights on disk",
                f"{own.bits} bits as {own.method} has them, scales of {by}; kept on a CPU, 16 bits on a GPU",
            )
        )
    tied = "tied" if spec.tie_embeddings else "untied"
    rows.append(("vocabulary", f"{spec.vocab_size} tokens, {tied}{_scales(spec)}"))
    return rows


def _describe_calls(spec: TransformersSpec) -> list[tuple[str, str]]:
    """Describe a model that `transformers` computes: only its attention calls and states are known."""
    rows = [("requests", f"one at a time: {spec.single}")] if spec.single else []
    for call, count in Counter(call._replace(layer=0) for call in spec.calls).items():
        if call.row:
            numbers = sum(heads * width for heads, width in call.row)
            what = f"{count} layers" if spec.single else f"{count} calls of {call.heads} query heads"
            rows.append(("attention", f"{what}, {numbers} numbers a token in the cache"))
            continue
        sizes = f"{call.key_dim}" if call.key_dim == call.value_dim else f"{call.key_dim} and {call.value_dim}"
        extra = {
            f", windows of {call.window}": bool(call.window),
            f", scores capped at {call.softcap:g}": bool(call.softcap),
            ", sinks": call.sinks,
        }
        words = "".join(word for word, there in extra.items() if there)
        rows.append(
            ("attention", f"{count} calls of {call.heads} query heads, {call.kv_heads} KV heads of {sizes}{words}")
        )
    states = Counter(tuple(tensor.shape for tensor in mixer.tensors) for mixer in spec.mixers)
    for shapes, count in states.items():
        named = " and ".join("x".join(map(str, shape)) for shape in shapes)
        rows.append(("recurrent", f"{count} layers with states of {named}"))
    return [*rows, ("vocabulary", f"{spec.vocab_size} tokens"), ("positions", f"{spec.max_positions} at most")]


def _norm(spec: ModelSpec) -> str:
    kind = "LayerNorm" if spec.norm.centred else "RMS norm"
    extra = ", weights less one" if spec.norm.unit_offset else ""
    return f"{kind}, eps {spec.norm.eps:g}{extra}{', with biases' if spec.norm.bias else ''}"


def _rope(rope: Rope) -> str:
    own = rope.scaling
    scaling = "" if own.kind == "default" else f", {own.kind} x {own.factor:g}"
    if own.kind == "longrope" and own.short_factors == own.long_factors:  # GGUF files have only these
        scaling = ", a factor for each frequency"
    part = "" if rope.part == 1.0 else f" on {rope.part:g} of a head"
    return f"rotary{part}, theta {rope.theta:g}{scaling}"


def _positions(spec: ModelSpec) -> str:
    words = [_rope(rope) for rope in spec.ropes]
    if spec.learned_positions is not None:
        words.append("learned")
    none = sum(spec.layer(i).rope is None and spec.layer(i).attention for i in range(spec.num_layers))
    if not spec.ropes and spec.learned_positions is None:
        words.append("none")
    if none and spec.ropes:
        words.append(f"none on {none} layers")
    return f"{'; '.join(words)}; {spec.max_positions} at most"


def _kept(spec: ModelSpec) -> str:
    if (own := spec.latent) is None:
        return f"{spec.num_kv_heads} KV heads of {spec.head_dim}"
    queries = f", of {own.query_rank} for queries" if own.query_rank else ""
    return f"latents of {own.rank} and rotated keys of {own.rotated}{queries}"


def _attention(spec: ModelSpec) -> str:
    words = {
        "norm over each head of q and k": spec.qk_norm == "head",
        "norm over all of q, and of k": spec.qk_norm == "projection",
        f"scores x {spec.attention_scale or 0:g}": spec.attention_scale is not None,
        f"scores capped at {spec.attention_softcap:g}": bool(spec.attention_softcap),
        "sinks": spec.sinks,
        "output gated": spec.output_gate,
        f"on {len(spec.windows)} of {spec.num_layers} layers": len(spec.windows) < spec.num_layers,
    }
    return "".join(f", {word}" for word, there in words.items() if there)


def _windows(spec: ModelSpec) -> str:
    counted = Counter(spec.windows)
    if set(counted) == {None}:
        return "none"
    words = [f"{n} layers see {'all' if w is None else w}" for w, n in counted.items()]
    return ", ".join(words) + ("" if spec.kv_window is None else "; pages behind are given back")


def _recurrence(spec: ModelSpec, own: Recurrence) -> str:
    number, size = sum(state is not None for state in spec.states), sum(s.nbytes for s in spec.states if s is not None)
    kind = {
        "gated_delta": f"gated delta rule, {own.heads} heads of {own.key_dim} x {own.value_dim}",
        "mamba2": f"Mamba-2, {own.heads} heads of {own.value_dim} x {own.key_dim}",
        "short_conv": f"convolution of {own.heads} channels",
    }
    return f"{kind[own.kind]}, {own.taps} taps, on {number} layers; {size / 2**20:.2f} MiB of states a request"


def _experts(e: Experts) -> str:
    shared = f", {e.shared_size} shared columns" if e.shared_size else ""
    return f"{e.top} of {e.count} a token, {e.intermediate_size} columns each, router {e.router}{shared}"


def _quantization(q: Quantization) -> str:
    words = {"tensor": "tensor", "channel": "output channel", "block": "block of 128 x 128"}
    by = " or ".join(words[of] for of in q.weights)
    made = "quantised while loading" if q.at_load else f"as {q.method} has them"
    activations = {"none": "in 16 bits"}.get(q.activations, f"FP8, {q.activations}")
    kept = f"; its list of modules in 16 bits has {q.kept}" if q.kept else ""
    return f"{made}, a scale for each {by}; activations {activations}{kept}"


def _scales(spec: ModelSpec) -> str:
    words: Iterator[str] = (
        f", {name} {value:g}"
        for name, value, plain in (
            ("embedding x", spec.embedding_scale, 1.0),
            ("residual x", spec.residual_scale, 1.0),
            ("logits x", spec.logits_scale, 1.0),
            ("logits capped at", spec.logits_softcap, 0.0),
        )
        if value != plain
    )
    return "".join(words)
