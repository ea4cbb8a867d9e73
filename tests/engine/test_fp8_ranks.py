"""FP8 weights and pages on ranks: each rank has its shard of the same matrices and scales, and together they answer the
same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fp8_files import write_fp8
from harness import GREEDY, Harness
from safetensors.torch import load_file, save_file
from threads import of_threads
from tiny import save_tiny
from torch import Tensor

from weft.engine.model.directory import read_spec
from weft.engine.model.layer_weights import LayerWeights
from weft.engine.model.weights import load_weights
from weft.kernels.formats import fp8, fp8_matrix
from weft.kernels.reference import layer as reference
from weft.tools.kernels.fp8_operands import row_values

CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 64}
SIZES: dict[str, Any] = {
    "hidden_size": 160, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "num_hidden_layers": 2,
}  # fmt: skip
"""o and down have whole blocks of columns on each of four ranks; rows of q, gate and up start inside blocks on all of
them"""
FORMS = ["compressed-tensors, channel, dynamic", "compressed-tensors, tensor, static", "fp8, block"]
PROMPTS = [np.random.default_rng(3).integers(3, 199, n) for n in (40, 9, 21)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama2", tmp_path_factory.mktemp("plain"), **SIZES)


def with_kv_scales(path: Path) -> Path:
    """A scale for each KV head of the first layer's K, one for all of V."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5, 0.02])
    tensors["model.layers.0.self_attn.v_scale"] = torch.tensor([0.1])
    save_file(tensors, file, {"format": "pt"})
    return path


def numbers(layers: tuple[LayerWeights, ...], name: str) -> list[Tensor]:
    found = [layer[name].fp8 for layer in layers]
    return [fp8.weight_values(matrix.weight) for matrix in found if matrix is not None]


@pytest.mark.parametrize(
    ("form", "ranks"),
    [
        (FORMS[1], 4),
        (FORMS[2], 2),
        *(pytest.param(form, 4, marks=pytest.mark.nightly) for form in (FORMS[0], FORMS[2])),
    ],
)
def test_shards_have_the_values_of_the_whole(plain: Path, tmp_path: Path, form: str, ranks: int) -> None:
    """Rows of q, gate and up; columns of o and down; rows of k and v, which two of four ranks share."""
    there, _ = write_fp8(plain, tmp_path, form)
    spec = read_spec(with_kv_scales(there))
    whole = load_weights(spec, there, **CPU)
    parts = [load_weights(spec.shard(rank, ranks), there, **CPU) for rank in range(ranks)]
    heads, kv_heads, d = 4 // ranks, max(1, 2 // ranks), 128
    for name, dim in (("gate_up", 0), ("o", 1), ("down", 1)):
        together = zip(*(numbers(part.layers, name) for part in parts), strict=True)
        for own, want in zip(together, numbers(whole.layers, name), strict=True):
            assert torch.equal(torch.cat(own, dim), want)
    for layer, want in enumerate(numbers(whole.layers, "qkv")):
        q, k, v = want.split((4 * d, 2 * d, 2 * d))
        for rank, part in enumerate(parts):
            own = numbers(part.layers, "qkv")[layer].split((heads * d, kv_heads * d, kv_heads * d))
            first = rank * 2 // ranks * d
            assert torch.equal(own[0], q[rank * heads * d :][: heads * d])
            assert torch.equal(own[1], k[first : first + kv_heads * d])
            assert torch.equal(own[2], v[first : first + kv_heads * d])
    assert whole.kv_scales is not None
    for rank, part in enumerate(parts):
        assert part.kv_scales is not None
        first = rank * 2 // ranks
        assert torch.equal(part.kv_scales, whole.kv_scales[:, :, first : first + kv_heads])
    for layer in range(2):
        scales = {str(p.layers[layer][n].fp8.input_scale) for p in (whole, *parts) for n in ("qkv", "down")}  # type: ignore[union-attr]
        assert len(scales) == 1


def served(path: Path, ranks: int, **options: Any) -> Iterator[tuple[list[int], Tensor]]:
    harness = Harness(
        path, page_size=16, num_pages=24, max_num_batched_tokens=32, cpu_threads=1, tensor_parallel_size=ranks,
        **options,
    )  # fmt: skip
    try:
        handles = [harness.add(p, max_tokens=4, prompt_logprobs=1, ignore_eos=True, **GREEDY) for p in PROMPTS]
        harness.run()
        for handle in handles:
            known = [float(entry.values[0]) for entry in harness.prompt_logprobs[handle]]
            yield harness.tokens[handle], torch.tensor(known)
    finally:
        harness.engine.close()


WEIGHTS, PAGES = {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    ("form", "options", "ranks"),
    [
        ("", WEIGHTS | PAGES, 2),
        pytest.param("fp8, block", PAGES, 2, marks=pytest.mark.nightly),
        pytest.param("", WEIGHTS | PAGES, 4, marks=pytest.mark.nightly),
        *(pytest.param(form, PAGES, 4, marks=pytest.mark.nightly) for form in FORMS),
    ],
)
def test_ranks_answer_like_one(plain: Path, tmp_path: Path, form: str, options: dict[str, Any], ranks: int) -> None:
    """Sums of ranks are added in another order, and an operand of o and down may have other blocks of columns, so that
    some e4m3 values differ by one step: not bit-identical."""
    path = with_kv_scales(write_fp8(plain, tmp_path, form)[0]) if form else plain
    one, several = list(served(path, 1, **options)), list(served(path, ranks, **options))
    for (tokens, known), (same, mine) in zip(one, several, strict=True):
        torch.testing.assert_close(mine, known, atol=0.02, rtol=0)
        assert same == tokens


def test_a_cut_block_changes_only_its_smallest_numbers() -> None:
    """A power of two changes no bit of e4m3, except where numbers have fewer than four: below 2^-6 times the scale."""
    numbers = torch.randn(64, 704, generator=torch.Generator().manual_seed(0)) ** 3

    def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = fp8.quantize_rows(x)
        return row_values(rows), rows.scale.t().repeat_interleave(fp8.BLOCK, 1)[:, : x.shape[1]]

    def of_one_and_two(x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        first, second = (quantised(half.contiguous()) for half in x.chunk(2, 1))
        return quantised(x), (torch.cat((first[0], second[0]), 1), torch.cat((first[1], second[1]), 1))

    (whole, _), (parts, _) = of_one_and_two(numbers[:, :512].contiguous())
    assert torch.equal(whole, parts)
    (whole, scale), (parts, own_scale) = of_one_and_two(numbers)
    differ = whole != parts
    assert differ.any()
    assert (numbers.abs() < 2.0**-6 * torch.maximum(scale, own_scale))[differ].all()


def exact_product(a: fp8.Fp8Rows, weight: fp8.Fp8Weight) -> Tensor:
    """Like `fp8.scaled_matmul`, rounded once: independent of a library's order of sums for a shape."""
    total = row_values(a).double() @ weight.values.double().t() * weight.scale.double()
    return total.float()


def adding_as_ranks(ranks: int, *, cut: bool) -> Any:
    """`reference.residual_project` of one rank that adds splits of the columns as `ranks` ranks do. cut: each split
    starts its own blocks."""

    def residual_project(
        a: Tensor, matrix: fp8_matrix.Fp8Matrix, x: Tensor, **_without: object
    ) -> tuple[Tensor, Tensor]:
        width = a.shape[1] // ranks
        given = a if cut else row_values(fp8.quantize_rows(a))
        total = torch.zeros_like(x)
        for part in (slice(first, first + width) for first in range(0, a.shape[1], width)):
            weight = fp8.Fp8Weight(matrix.weight.values[:, part], matrix.weight.scale)
            total += exact_product(fp8.quantize_rows(given[:, part]), weight)
        return reference.add_reduced(total, x)

    return residual_project


def last_states(path: Path, ranks: int) -> np.ndarray:
    """States of requests of one token, whose attention is that token's value: nothing is summed there."""
    harness = of_threads(path, ranks, cpu_threads=1, num_pages=64, page_size=16, quantization="fp8")
    for token in range(3, 51):
        harness.add([token], max_tokens=0, pooling="last")
    harness.run()
    harness.engine.close()
    return np.stack([harness.pooled[handle] for handle in sorted(harness.pooled)])


@pytest.mark.parametrize("width", [512, 480], ids=["whole blocks", "cut blocks"])
def test_ranks_equal_to_the_bit_one_that_adds_in_their_order_and_cuts_their_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Shows that answers differ only because of the order of sums, and of blocks that ranks cut."""
    path = save_tiny("llama2", tmp_path, **{**SIZES, "intermediate_size": width})
    monkeypatch.setattr(fp8_matrix, "scaled_matmul", exact_product)
    two = last_states(path, 2)
    monkeypatch.setattr(reference, "residual_project", adding_as_ranks(2, cut=True))
    assert np.array_equal(last_states(path, 1), two)
    monkeypatch.setattr(reference, "residual_project", adding_as_ranks(2, cut=False))
    assert np.array_equal(last_states(path, 1), two) == (width == 512)
