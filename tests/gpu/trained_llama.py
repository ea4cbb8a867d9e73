"""A Llama of any shape in plain torch that learns a text by heart in minutes.

Best tokens of made-up weights are decided by tiny margins, so any rounding changes them. After training, they are the
text's. Bytes are the tokens: the first 256 of the vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from weft.engine.model.spec import ModelSpec

MOVES = (1.2e-5, 2.5e-5, 5e-5)
"""how far a weight may move in a step of a model of `MOVES_OF` columns; elsewhere by the root of their ratio"""
MOVES_OF = 4096
CHECKPOINTED = 2048
"""tokens of a step from which on layers are recomputed in the backward pass instead of kept"""
BETAS = (0.9, 0.95)
"""for Lion (arXiv 2302.06675): its one momentum lets an 8B fit one card"""
WARM = 0.06
"""share of the time in which steps grow"""


def turning(spec: ModelSpec, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[T, D / 2]` float32."""
    ((inv_freq, _),) = spec.rotary(length)
    angle = torch.arange(length, device=device)[:, None] * inv_freq.to(device).float()
    return angle.cos(), angle.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[B, H, T, D]`, any floating dtype."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class TrainedLlama:
    """Weights in `dtype` by their names in a checkpoint, from seeded random numbers."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.spec, self._device = spec, device
        d, hidden, inter = spec.head_dim, spec.hidden_size, spec.intermediate_size
        widths = {"q": spec.num_heads * d, "k": spec.num_kv_heads * d, "v": spec.num_kv_heads * d}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (spec.vocab_size, hidden), "model.norm": (hidden,)}
        shapes["lm_head"] = (spec.vocab_size, hidden)
        for layer in range(spec.num_layers):
            at = f"model.layers.{layer}"
            shapes |= {f"{at}.self_attn.{n}_proj": (rows, hidden) for n, rows in widths.items()}
            shapes |= {f"{at}.self_attn.o_proj": (hidden, spec.num_heads * d)}
            shapes |= {f"{at}.mlp.{n}_proj": (inter, hidden) for n in ("gate", "up")}
            shapes |= {f"{at}.mlp.down_proj": (hidden, inter)}
            shapes |= {f"{at}.{n}_layernorm": (hidden,) for n in ("input", "post_attention")}
        self._seed = seed
        self.weights = {name: torch.empty(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
        self._begin()

    def _begin(self) -> None:
        own = torch.Generator(self._device).manual_seed(self._seed)
        for name, weight in self.weights.items():
            if weight.dim() == 1:
                weight.data.fill_(1.0)
            else:
                writes = name.endswith(("o_proj", "down_proj"))
                wide = 0.02 / (2 * self.spec.num_layers) ** 0.5 if writes else 0.02
                weight.data.normal_(0.0, wide, generator=own)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor by its name in a checkpoint, as made-up tensors are requested."""
        weight = self.weights[name.removesuffix(".weight")]
        assert weight.shape == shape, (name, weight.shape, shape)
        return weight

    def _layer(self, x: Tensor, layer: int, cos: Tensor, sin: Tensor) -> Tensor:
        """x `[B, T, hidden]`."""
        spec, (count, length, _) = self.spec, x.shape
        w = {name.rsplit(".", 1)[-1]: t for name, t in self._of(layer).items()}

        def normed(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], w[f"{name}_layernorm"], spec.norm.eps)

        def heads(h: Tensor, name: str) -> Tensor:
            return (h @ w[f"{name}_proj"].t()).view(count, length, -1, spec.head_dim).transpose(1, 2)

        h = normed(x, "input")
        q, k, v = turned(heads(h, "q"), cos, sin), turned(heads(h, "k"), cos, sin), heads(h, "v")
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + a.transpose(1, 2).flatten(2) @ w["o_proj"].t()
        h = normed(x, "post_attention")
        return x + (F.silu(h @ w["gate_proj"].t()) * (h @ w["up_proj"].t())) @ w["down_proj"].t()

    def _of(self, layer: int) -> dict[str, Tensor]:
        return {name: t for name, t in self.weights.items() if name.startswith(f"model.layers.{layer}.")}

    def loss(self, tokens: Tensor) -> Tensor:
        """tokens `[B, T + 1]`: the mean in nats a token."""
        cos, sin = turning(self.spec, tokens.shape[1] - 1, self._device)
        x = self.weights["model.embed_tokens"][tokens[:, :-1]]
        for layer in range(self.spec.num_layers):
            if tokens.numel() < CHECKPOINTED:
                x = self._layer(x, layer, cos, sin)
            else:
                x = checkpoint(self._layer, x, layer, cos, sin, use_reentrant=False)
        x = F.rms_norm(x, x.shape[-1:], self.weights["model.norm"], self.spec.norm.eps)
        logits = x.flatten(0, 1) @ self.weights["lm_head"].t()
        return F.cross_entropy(logits.float(), tokens[:, 1:].flatten())

    def learn(
        self, text: bytes, seconds: float, say: Callable[[str], None], *, batch: int = 8, length: int = 512,
        enough: float = 0.02, trial: float = 0.0,
    ) -> dict[str, float]:  # fmt: skip
        """Learn parts of `length` bytes, `batch` at once, until the loss is `enough` nats or the time is over. trial:
        seconds in which each of `MOVES` is tried first; the best is kept, the others are undone."""
        wide = {name: w.to(torch.float32, copy=True) for name, w in self.weights.items()}
        momentum = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        rate = 0.0

        def move(name: str, weight: Tensor) -> None:
            gradient, m = weight.grad, momentum[name]
            assert gradient is not None
            wide[name].add_(torch.lerp(gradient, m, BETAS[0]).sign_(), alpha=-rate)
            m.lerp_(gradient, 1 - BETAS[1])
            weight.data.copy_(wide[name])
            weight.grad = None

        for name, weight in self.weights.items():
            weight.requires_grad_()
            weight.register_post_accumulate_grad_hook(lambda w, name=name: move(name, w))
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(self._device)

        def steps(most: float, seconds: float, *, falling: bool) -> dict[str, float]:
            """Step from the start; a weight moves `most` at once, less and less if `falling`."""
            nonlocal rate
            self._begin()
            for name, weight in self.weights.items():
                wide[name].copy_(weight.data)
                momentum[name].zero_()
            own = torch.Generator().manual_seed(1)
            begun, count, shown, mean = time.monotonic(), 0, 0.0, 0.0
            while (spent := (time.monotonic() - begun) / seconds) < 1 and (count < 20 or mean > enough):
                rate = most * min(spent / WARM, 1.0, (1 - spent) / 0.5 if falling else 1.0)
                starts = torch.randint(0, len(data) - length, (batch,), generator=own).tolist()
                loss = self.loss(torch.stack([data[start : start + length + 1] for start in starts]))
                loss.backward()
                last, count = float(loss.detach()), count + 1
                mean = last if count == 1 else mean + (last - mean) * 0.1
                if time.monotonic() - shown > min(10, seconds / 20):
                    say(f"{most:.1e}, step {count}: {mean:.3f} nats a byte, {time.monotonic() - begun:.0f} s")
                    shown = time.monotonic()
            return {"move": most, "steps": count, "nats a byte": mean, "seconds": round(time.monotonic() - begun, 1)}

        moves = [most * (MOVES_OF / self.spec.hidden_size) ** 0.5 for most in MOVES]
        tried = (
            [steps(most, trial, falling=False) for most in moves] if trial else [{"move": moves[1], "nats a byte": 0}]
        )
        done = steps(min(tried, key=lambda t: t["nats a byte"])["move"], seconds, falling=True)
        for weight in self.weights.values():
            weight.requires_grad_(False)
        say(f"{done['steps']} steps: {done['nats a byte']:.3f} nats a byte, {done['seconds']} s")
        return done

    def save(self, config: Path, out: Path) -> None:
        """Save a checkpoint with that config.json, in files of a few layers."""
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_bytes((config / "config.json").read_bytes())
        parts: dict[str, dict[str, Tensor]] = {}
        for name, weight in self.weights.items():
            place = name.split(".")[2] if name.startswith("model.layers.") else "rest"
            parts.setdefault(place, {})[f"{name}.weight"] = weight
        files = {name: f"model-{place}.safetensors" for place, tensors in parts.items() for name in tensors}
        for place, tensors in parts.items():
            save_file(tensors, out / f"model-{place}.safetensors", metadata={"format": "pt"})
        (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
