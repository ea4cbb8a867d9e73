"""Images on a GPU: the kernels against torch, and whole engines against `transformers` in float32."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
sys.path += [str(Path(__file__).parent.parent / "engine")]

from harness import GREEDY, Harness
from interpreted import interpreted_gpu
from vision_models import KINDS, oracle_logits, prompt_of, write_checkpoint

from weft.engine.wire.pixels import PixelShelf
from weft.kernels.matmul.image_rows import axes_tensor, put_images, rotary_rows

HERE = torch.cuda.is_available()
WITHIN = 0.03


def test_rotary_rows_take_each_pair_from_its_axis(device: str) -> None:
    table, positions = torch.randn(40, 12, 2, device=device), torch.randint(0, 40, (3, 20), device=device).int()
    axes = (0, 1, 2) * 4
    out = torch.empty(11, 12, 2, device=device)
    rotary_rows(table, positions, axes_tensor(axes, torch.device(device)), out=out)
    expected = torch.stack([table[positions[axis, :11].long(), pair] for pair, axis in enumerate(axes)], 1)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("parts", "add"), [(1, False), (1, True), (3, True)])
def test_images_change_their_rows_alone(device: str, parts: int, add: bool) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    images = torch.randn(6, 4, 200, device=device).to(dtype)
    before = torch.randn(5, 200, device=device).to(dtype)
    rows = torch.tensor([-1, 5, -1, 2, 2], dtype=torch.int32, device=device)
    sums = torch.randn(parts, 5, device=device)
    x, old = before.clone(), sums.clone()
    put_images(x, sums, rows, images[:, 2], add=add)
    changed = [1, 3, 4]
    expected = before.clone()
    own = images[rows[changed].long(), 2]
    expected[changed] = (before[changed].float() + own.float()).to(dtype) if add else own
    assert torch.equal(x, expected)
    torch.testing.assert_close(sums.sum(0)[changed], x.float().square().sum(-1)[changed])
    assert torch.equal(sums[:, [0, 2]], old[:, [0, 2]])


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["idefics3", "smolvlm", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "mistral3"])
def test_an_engine_gives_transformers_tokens(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, one with pictures, in chunks that cut them. A second request finds a picture's pages cached."""
    path, shelf = write_checkpoint(kind, tmp_path / "model", wide=HERE), PixelShelf(tmp_path)
    rng = np.random.default_rng(0)
    text, picture = rng.integers(3, 290, 40).tolist(), KINDS[kind].picture
    first = prompt_of(shelf, [text[:5], picture(rng, 2), text[5:9], picture(rng, 0), text[9:12]])
    # The last prompt finds the pages of the first in the cache, and computes one token.
    prompts = [first, prompt_of(shelf, [text[12:24]]), first._replace(ids=np.append(first.ids, 17).astype(np.int32))]
    options = {
        "device": "cuda", "page_size": 16, "num_pages": 24, "max_num_seqs": 2, "max_num_batched_tokens": 16,
        "dtype": "float16", "share": {"pixels": str(shelf.directory)},
    }  # fmt: skip

    def serve() -> Harness:
        harness = Harness(path, **options)
        harness.poison_pages()
        for prompt in prompts:
            harness.add(prompt.ids, images=prompt.images, max_tokens=2, ignore_eos=True, logprobs=0, **GREEDY)
        harness.run()
        return harness

    if device == "cuda":
        harness = serve()
    else:
        with interpreted_gpu(monkeypatch):
            harness = serve()
    for handle, prompt in enumerate(prompts):
        answer = harness.tokens[handle]
        expected = oracle_logits(path, kind, prompt, answer).log_softmax(-1)
        for row, token, entry in zip(expected, answer, harness.logprobs[handle], strict=True):
            assert float(entry.values[0]) == pytest.approx(float(row[token]), abs=WITHIN)
            assert float(row.max() - row[token]) < WITHIN
