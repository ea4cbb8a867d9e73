"""An EAGLE-3 head in plain torch, for training only. Parameter names are those of its checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.tools.demo.network import MLP


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a head. Its hidden size is its model's."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    taps: tuple[int, int, int]  # The model's layers whose input is read.

    def config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        sizes = asdict(self)
        taps = list(sizes.pop("taps"))
        return {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, **sizes,
            "target_hidden_size": self.hidden_size, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "tie_word_embeddings": False, "norm_before_residual": False, "dtype": "float32",
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": taps},
        }  # fmt: skip


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape, inner, width = shape, 2 * shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(inner, shape.num_attention_heads * width, bias=False)
        self.k_proj = nn.Linear(inner, shape.num_key_value_heads * width, bias=False)
        self.v_proj = nn.Linear(inner, shape.num_key_value_heads * width, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, before: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x `[rows, tokens, 2 H]`. `before` has K and V of the earlier steps, and gets those of this one.

        In step s a token sees K and V of step 0 up to s tokens back, and of each step after it one token further on:
        those that drafting would have."""
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        q, k, v = (
            each(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin).repeat_interleave(group, 1)
        before.append((k, v.repeat_interleave(group, 1)))
        step, tokens = len(before) - 1, x.shape[1]
        keys, values = before[0]
        unseen = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1 - step)
        scores = [(q @ keys.transpose(-1, -2)).masked_fill(unseen, -1e9)]
        later = [tuple(F.pad(each, (0, 0, step - r, 0))[..., :tokens, :] for each in before[r]) for r in _after(step)]
        scores += [(q * k).sum(-1, keepdim=True) for k, _ in later]
        weights = (torch.cat(scores, -1) * self.shape.head_dim**-0.5).softmax(-1)
        mixed = weights[..., :tokens] @ values
        for place, (_, v) in enumerate(later):
            mixed = mixed + weights[..., tokens + place, None] * v
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def _after(step: int) -> range:
    return range(1, step + 1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, before: list[tuple[Tensor, Tensor]]
    ) -> Tensor:  # fmt: skip
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(both, cos, sin, before)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Head(nn.Module):
    """See `HeadShape`. `ids [draft vocabulary]` are the model's tokens that it drafts."""

    def __init__(self, shape: HeadShape, ids: Tensor, output: Tensor) -> None:
        """output `[V, H]`: the model's output head, from which this one starts."""
        super().__init__()
        self.shape, self.ids = shape, ids
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(output[ids])

    def forward(self, embedded: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Return the logits `[rows, tokens, draft vocabulary]` of each step: the first reads the model's states at the
        token before, each later one what the step before it gave there.

        embedded `[rows, tokens, H]`: of all tokens but the first; states `[rows, tokens, 3 H]`: before each of them."""
        half = self.shape.head_dim // 2
        turn = self.shape.rope_theta ** (-torch.arange(half, device=states.device) / half)
        angle = torch.outer(torch.arange(1, embedded.shape[1] + 1, device=states.device), turn)
        hidden, before, logits = self.fc(states), list[tuple[Tensor, Tensor]](), []
        for _ in range(steps):
            hidden = self.midlayer(embedded, hidden, angle.cos(), angle.sin(), before)
            logits.append(self.lm_head(self.norm(hidden)))
            hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return logits

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint."""
        return {
            **{name: tensor.detach().float().cpu().contiguous() for name, tensor in self.state_dict().items()},
            "d2t": (self.ids - torch.arange(len(self.ids), device=self.ids.device)).cpu(),
        }
