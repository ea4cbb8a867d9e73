"""The Llama architecture in plain torch, for training only. Parameter names are those of `LlamaForCausalLM`."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.tools.demo.tokenizer import BEGIN_ID, END_ID, PAD_ID, VOCAB_SIZE


@dataclass(frozen=True)
class Shape:
    """The sizes of the network. The defaults are the shipped model's: 5.7 million parameters."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 7
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        sizes = asdict(self)
        theta = sizes.pop("rope_theta")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes,
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": BEGIN_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "use_cache": True,
            "dtype": "bfloat16",
        }


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query, kv = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [rows, tokens, hidden]; cos, sin: [tokens, head_dim]."""
        rows, tokens, _ = x.shape
        q, k, v = (
            projection(x).view(rows, tokens, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, tokens, -1))
        return projected


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Network(nn.Module):
    """`forward` gives the final hidden states; `head` and `weighted_loss` turn them into logits or a loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.model = Decoder(shape)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.02 / (2 * shape.num_hidden_layers) ** 0.5 if residual else 0.02
                nn.init.normal_(parameter, 0.0, scale, generator=generator)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [rows, tokens] int -> hidden states [rows, tokens, hidden]."""
        length = tokens.shape[1]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        normed: Tensor = self.model.norm(x)
        return normed

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


def weighted_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy over targets, each counted by its weight. hidden: [n, hidden]; targets, weights: [n]."""
    losses = F.cross_entropy(F.linear(hidden, embedding).float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin: [max_position_embeddings, head_dim], each half the same angles."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_position_embeddings), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding; x: [rows, heads, tokens, head_dim], the pair of a dimension lies half a head away."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)
