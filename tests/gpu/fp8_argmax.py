"""Counts how often an engine's best token is that of float32, over weights made up like trained ones, or learned.

    python tests/gpu/fp8_argmax.py --model-preset llama-3-8b --json argmax.json
    python tests/gpu/fp8_argmax.py --model-preset llama-3-8b --learn 240 --text docs/*.md --unseen README.md

The float32 model is plain torch over the same tensors: in 16 bits, and rounded by `fp8`, computed side by side, a layer
at a time. Engines in 16 bits, with FP8 weights, with FP8 pages and with both answer the same prompts. Prompt
log-probabilities give the best token of each position. The prompts are random tokens or, with `--learn`, parts of a
text that a model of this shape first learns (`trained_llama`) and of one that it has not seen.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from trained_llama import TrainedLlama, turned, turning

from weft.engine.config import PRESETS, EngineConfig
from weft.engine.engine import Engine
from weft.engine.model.directory import read_spec
from weft.engine.model.families import family_of
from weft.engine.model.realistic import RealisticDummy
from weft.engine.model.spec import ModelSpec
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams
from weft.kernels.formats import fp8

FORMATS: dict[str, dict[str, Any]] = {
    "16 bits": {},
    "FP8 weights, FP8 KV": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "FP8 weights": {"quantization": "fp8"},
    "FP8 KV": {"kv_cache_dtype": "fp8"},
}
Given = Callable[[str, tuple[int, ...]], Tensor]
"""a weight by its name in a checkpoint"""
EIGHT = "float32 over FP8 weights"
WIDE = "float32"


class Reference:
    """A Llama in float32, twice: over weights in 16 bits and over the same weights in e4m3."""

    def __init__(self, spec: ModelSpec, tensor: Given, device: torch.device, dtype: torch.dtype) -> None:
        self.spec, self._tensor = spec, tensor
        self._device, self._dtype = device, dtype

    def _get(self, name: str, *shape: int) -> Tensor:
        return self._tensor(f"{name}.weight", shape).to(self._dtype)

    def _matrix(self, name: str, *shape: int) -> tuple[Tensor, Tensor]:
        """The matrix as it is and rounded to FP8, float32."""
        weight = self._get(name, *shape)
        return weight.float(), fp8.weight_values(fp8.quantize_weight(weight))

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self._get(name, self.spec.hidden_size).float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.norm.eps) * weight

    def logits(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """prompts `[B, T]` -> `[B * T, vocabulary]` of 16-bit weights, of FP8 weights."""
        spec, (count, length) = self.spec, prompts.shape
        heads, kv_heads, d, hidden = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.hidden_size
        cos, sin = turning(spec, length, self._device)

        def split(x: Tensor, of: int) -> Tensor:
            return x.view(count, length, of, d).transpose(1, 2)

        both = [self._get("model.embed_tokens", spec.vocab_size, hidden).float()[prompts]] * 2
        inter = spec.intermediate_size
        for layer in range(spec.num_layers):
            at = f"model.layers.{layer}"
            shapes = {"q": heads * d, "k": kv_heads * d, "v": kv_heads * d}
            w = {n: self._matrix(f"{at}.self_attn.{n}_proj", rows, hidden) for n, rows in shapes.items()}
            w["o"] = self._matrix(f"{at}.self_attn.o_proj", hidden, heads * d)
            w |= {n: self._matrix(f"{at}.mlp.{n}_proj", inter, hidden) for n in ("gate", "up")}
            w["down"] = self._matrix(f"{at}.mlp.down_proj", hidden, inter)
            for i, x in enumerate(both):
                h = self._normed(x, f"{at}.input_layernorm")
                q, k = (turned(split(h @ w[n][i].t(), of), cos, sin) for n, of in (("q", heads), ("k", kv_heads)))
                v = split(h @ w["v"][i].t(), kv_heads)
                k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
                a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = x + a.transpose(1, 2).flatten(2) @ w["o"][i].t()
                h = self._normed(x, f"{at}.post_attention_layernorm")
                both[i] = x + (F.silu(h @ w["gate"][i].t()) * (h @ w["up"][i].t())) @ w["down"][i].t()
        head = self._get("lm_head", spec.vocab_size, hidden).float()
        wide, eight = (self._normed(x, "model.norm").flatten(0, 1) @ head.t() for x in both)
        return wide, eight


def reported(config: dict[str, Any], prompts: np.ndarray) -> np.ndarray:
    """An engine's best token after each position but the last, `[B, T - 1]`."""
    engine = Engine(EngineConfig(**config))
    for handle, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=1)
        engine.add(AddRequest(handle=handle, prompt_token_ids=prompt.astype(np.int32).tobytes(), params=params))
    best: dict[int, list[int]] = {handle: [] for handle in range(len(prompts))}
    while engine.has_work:
        outputs = engine.step()
        if outputs is not None:
            for handle, entries in outputs.prompt_logprobs.items():
                best[handle] += [int(e.ids[1]) for e in entries]  # after the prompt's own
    engine.close()
    return np.array([best[handle] for handle in range(len(prompts))])


def parts_of(text: bytes, count: int, length: int) -> np.ndarray:
    """`count` parts of a text `[count, length]`, of bytes, evenly spread."""
    starts = np.linspace(0, len(text) - length, count).astype(int)
    return np.stack([np.frombuffer(text[start : start + length], np.uint8) for start in starts]).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory with a Llama's config.json")
    parser.add_argument("--model-preset", default="llama-3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt")
    parser.add_argument("--learn", type=float, help="seconds in which a model of this shape learns --text")
    parser.add_argument("--trial", type=float, default=0.0, help="seconds for each size of its steps, tried before")
    parser.add_argument("--text", type=Path, nargs="+", default=[])
    parser.add_argument("--bytes", type=int, default=100_000, help="of --text that are learned")
    parser.add_argument("--unseen", type=Path, help="a text that is not learned")
    parser.add_argument("--batch", type=int, default=8, help="parts of --tokens bytes that a step learns")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = options.model or PRESETS / options.model_preset
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    figures: dict[str, Any] = {}
    sizes = options.prompts, options.tokens
    spec = read_spec(model)
    place = None
    if options.learn is None:
        tensor: Given = RealisticDummy(0, device, spec, family_of(spec.architecture).names)
        requested = {"random": np.random.default_rng(0).integers(0, spec.vocab_size, sizes)}
    else:
        text = b"".join(path.read_bytes() for path in options.text)[: options.bytes]
        tensor = learned = TrainedLlama(spec, device, dtype)
        print(f"learning {len(text):,} bytes", flush=True)
        figures["learned"] = {"bytes": len(text), **learned.learn(
            text, options.learn, lambda line: print(line, flush=True), batch=options.batch, length=options.tokens,
            trial=options.trial,
        )}  # fmt: skip
        place = tempfile.TemporaryDirectory()
        learned.save(model, Path(place.name))
        requested = {"learned": parts_of(text, *sizes)}
        if options.unseen is not None:
            requested["unseen"] = parts_of(options.unseen.read_bytes(), *sizes)
    best, ahead = {}, {}
    with torch.inference_mode():
        reference = Reference(spec, tensor, device, dtype)
        for what, prompts in requested.items():
            logits = reference.logits(torch.from_numpy(prompts).to(device))
            for name, x in zip((WIDE, EIGHT), logits, strict=True):
                top = x.view(*sizes, -1)[:, :-1].topk(2, -1)
                best[what, name] = top.indices[..., 0].cpu().numpy()
                ahead[what, name] = (top.values[..., 0] - top.values[..., 1]).cpu().numpy()
            del logits, x, top
    del reference, tensor
    if options.learn is not None:
        del learned

    def compare(label: str, what: str, got: np.ndarray, of: str) -> None:
        same = got == best[what, of]
        margins, apart = ahead[what, of], ahead[what, of][~same]
        margin = {"median": float(np.median(apart)), "largest": float(apart.max())} if len(apart) else {}
        right = float((got == requested[what][:, 1:]).mean())
        figures[f"{label} vs {of}, {what}"] = {
            "positions": same.size, "share": float(same.mean()), "ahead where they differ": margin,
            "ahead everywhere, median": float(np.median(margins)), "share that the text has": right,
        }  # fmt: skip
        print(
            f"{what}: {label} vs {of}: {same.mean():.2%} of {same.size} (text's: {right:.2%}); float32's best is "
            f"ahead of its second by {np.median(margins):.3f} (median), where they differ by {margin}", flush=True,
        )  # fmt: skip
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=1) + "\n")

    for what in requested:
        compare(EIGHT, what, best[what, EIGHT], WIDE)
    where: dict[str, Any] = {"model": str(options.model)} if options.model else {"model_preset": options.model_preset}
    where |= {"load_format": "dummy", "dummy_weights": "realistic"}
    common: dict[str, Any] = {
        "device": options.device, "dtype": options.dtype,
        "plan": "serial", "tuning_seconds": 0, "prefix_caching": False, "max_model_len": options.tokens + 1,
        "kv_cache_gib": 1.0, "max_num_batched_tokens": 512, "max_num_seqs": 8,
        **(where if place is None else {"model": place.name}),
    }  # fmt: skip
    for name in options.formats:
        formats = FORMATS[name]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        together = np.concatenate(list(requested.values()))
        for (what, _), got in zip(
            requested.items(), np.split(reported({**common, **formats}, together), len(requested)), strict=True
        ):
            compare(name, what, got, WIDE)
            if "quantization" in formats:
                compare(name, what, got, EIGHT)
    if place is not None:
        place.cleanup()


if __name__ == "__main__":
    main()
