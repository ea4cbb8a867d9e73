"""Writes a checkpoint in AWQ's, GPTQ's and llm-compressor's low-bit integer formats, and its dequantised values.

It follows their documents code by code, and uses nothing of `weft.engine.model.integers`.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""the column of eight that each four bits of a word belong to, starting with the lowest"""
MATRIX = re.compile(r"layers\.\d+\..*(_proj|w[123]|fc[12])\.weight$")


def words(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes `[a, b]` -> int32, several neighbours along `axis` in each, padded with 0 at the end."""
    per = 32 // bits
    turned = codes if axis == 1 else codes.T
    packed = np.zeros((turned.shape[0], -(-turned.shape[1] // per)), np.uint64)
    for column in range(packed.shape[1]):
        for place in range(per):
            which = column * per + (place if order is None else order[place])
            if which < turned.shape[1]:
                packed[:, column] |= turned[:, which].astype(np.uint64) << np.uint64(bits * place)
    made = packed.astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(made if axis == 1 else made.T))


class Form:
    """The format of a checkpoint."""

    def __init__(
        self, method: str, bits: int = 4, group: int = -1, *, act_order: bool = False, symmetric: bool = False,
        **config: Any,
    ) -> None:  # fmt: skip
        self.method, self.bits, self.group, self.act_order = method, bits, group, act_order
        self.symmetric, self.more = symmetric, config

    def config(self) -> dict[str, Any]:
        if self.method == "compressed-tensors":
            weights = {
                "num_bits": self.bits, "type": "int", "symmetric": self.symmetric,
                "strategy": "channel" if self.group < 0 else "group",
                "group_size": None if self.group < 0 else self.group,
                "actorder": "group" if self.act_order else None,
            }  # fmt: skip
            group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
            return {
                "quant_method": self.method, "format": "pack-quantized", "config_groups": {"group_0": group},
                "ignore": ["lm_head"],
            }  # fmt: skip
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return {**common, "zero_point": True, "version": "gemm", **self.more}
        return {**common, "desc_act": self.act_order, "sym": self.symmetric, **self.more}

    def write(self, module: str, weight: Tensor, generator: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """The tensors of a matrix `[out, in]`, and their float32 values."""
        out, inner = weight.shape
        size = inner if self.group < 0 else self.group
        count, top = -(-inner // size), (1 << self.bits) - 1
        group_of = np.arange(inner) // size
        if self.act_order:
            group_of = generator.permutation(group_of)
        numbers = weight.float().numpy()
        scales, zeros = np.zeros((count, out), np.float16), np.zeros((count, out), np.int64)
        codes = np.zeros((out, inner), np.int64)
        for g in range(count):
            own = numbers[:, group_of == g]
            low, high = np.minimum(own.min(1), 0), np.maximum(own.max(1), 0)
            if self.symmetric:
                high = np.maximum(high, -low)
                low = -high
            scales[g] = np.maximum((high - low) / top, 1e-4).astype(np.float16)
            # GPTQ's first version cannot write a zero of 0
            zeros[g] = (top + 1) // 2 if self.symmetric else np.clip(np.rint(-low / scales[g]), 1, top)
            codes[:, group_of == g] = np.clip(np.rint(own / scales[g][:, None]) + zeros[g][:, None], 0, top)
        meant = (codes - zeros.T[:, group_of]) * scales.astype(np.float32).T[:, group_of]
        tensors: dict[str, Tensor]
        if self.method == "awq":
            tensors = {
                "qweight": words(codes.T, 4, 1, AWQ_ORDER), "qzeros": words(zeros, 4, 1, AWQ_ORDER),
                "scales": torch.from_numpy(scales),
            }  # fmt: skip
        elif self.method == "gptq":
            less = 0 if self.more.get("checkpoint_format") == "gptq_v2" else 1
            tensors = {
                "qweight": words(codes.T, self.bits, 0), "qzeros": words(zeros - less, self.bits, 1),
                "scales": torch.from_numpy(scales), "g_idx": torch.from_numpy(group_of.astype(np.int32)),
            }  # fmt: skip
            if not self.act_order:
                del tensors["g_idx"]
        else:
            tensors = {
                "weight_packed": words(codes, self.bits, 1), "weight_scale": torch.from_numpy(scales.T.copy()),
                "weight_shape": torch.tensor([out, inner]),
            }  # fmt: skip
            if not self.symmetric:
                tensors["weight_zero_point"] = words(zeros.T, self.bits, 0)
            if self.act_order:
                tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return {f"{module}.{name}": t for name, t in tensors.items()}, torch.from_numpy(meant.astype(np.float32))


FORMS = {
    "awq": Form("awq", 4, 32),
    "gptq": Form("gptq", 4, 32),
    "gptq, act-order": Form("gptq", 4, 32, act_order=True),
    "gptq, second version, one group": Form("gptq", 4, -1, checkpoint_format="gptq_v2"),
    "gptq, 8 bits, symmetric": Form("gptq", 8, 64, symmetric=True),
    "gptq, 2 bits": Form("gptq", 2, 16),
    "compressed-tensors": Form("compressed-tensors", 4, 32, symmetric=True),
    "compressed-tensors, zeros, act-order": Form("compressed-tensors", 4, 32, act_order=True),
    "compressed-tensors, 8 bits, channel": Form("compressed-tensors", 8, -1),
}


def write_integers(source: Path, folder: Path, form: Form, keep: str = "$nothing") -> tuple[Path, Path]:
    """Write the checkpoint at `source` in a format, and the same numbers in float32. Matrices whose names match `keep`
    are unchanged."""
    generator = np.random.default_rng(7)
    tensors = {n: t.float() for file in sorted(source.glob("*.safetensors")) for n, t in load_file(file).items()}
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stored[name] = plain[name] = tensor
        if MATRIX.search(name) and not re.search(keep, name):
            del stored[name]
            made, plain[name] = form.write(name.removesuffix(".weight"), tensor, generator)
            stored |= made
    paths = folder / "few", folder / "plain"
    for path, which in zip(paths, (stored, plain), strict=True):
        shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({n: t.contiguous() for n, t in which.items()}, path / "model.safetensors", {"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    (paths[0] / "config.json").write_text(json.dumps({**raw, "quantization_config": form.config()}))
    return paths
