"""Images on several ranks: rank 0 encodes, every rank gets the embeddings, and answers are those of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import GREEDY, Harness
from vision_models import KINDS, Prompt, oracle_logits, prompt_of, write_checkpoint

from weft.engine.ranks import leader
from weft.engine.wire.messages import Finish
from weft.engine.wire.pixels import PixelShelf

OPTIONS: dict[str, Any] = {
    "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "num_pages": 128, "cpu_threads": 1,
    "tensor_parallel_size": 2,
}  # fmt: skip
DAY = "qwen3-vl"


class Served:
    """An engine of two ranks, and prompts with pictures."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.path = kind, write_checkpoint(kind, folder / "model")
        self.shelf, self._rng = PixelShelf(folder), np.random.default_rng(0)
        self.harness = Harness(self.path, **OPTIONS, share={"pixels": str(self.shelf.directory)})

    def prompts(self) -> list[Prompt]:
        """Prompts with one picture, none and three."""
        text, picture = self._rng.integers(3, 290, 40).tolist(), KINDS[self.kind].picture
        return [
            prompt_of(self.shelf, [text[:5], picture(self._rng, 2), text[5:8]]),
            prompt_of(self.shelf, [text[8:17]]),
            prompt_of(
                self.shelf,
                [part for size in range(3) for part in (text[20 + size : 22 + size], picture(self._rng, size))]
                + [text[30:33]],
            ),
        ]

    def check(self, prompts: list[Prompt]) -> list[int]:
        """Serve prompts together, compare every token and return how many of each prompt came from the cache."""
        add = self.harness.add
        handles = [add(p.ids, images=p.images, max_tokens=5, ignore_eos=True, logprobs=0, **GREEDY) for p in prompts]
        self.harness.run()
        for handle, prompt in zip(handles, prompts, strict=True):
            tokens = self.harness.tokens[handle]
            expected = oracle_logits(self.path, self.kind, prompt, tokens).log_softmax(-1)
            assert expected.argmax(-1).tolist() == tokens
            for row, token, entry in zip(expected, tokens, self.harness.logprobs[handle], strict=True):
                assert float(entry.values[0]) == pytest.approx(float(row[token]), abs=2e-4)
        return [self.harness.cached[handle] for handle in handles]


@pytest.mark.parametrize(
    "kind", [kind if kind == DAY else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_ranks_answer_about_pictures(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "PART_BYTES", 1000)  # a picture's embeddings need several orders
    served = Served(kind, tmp_path)
    try:
        prompts = served.prompts()
        assert served.check(prompts) == [0, 0, 0]
        again = served.check([prompts[0], served.prompts()[0]])
        assert again[0] >= 8  # the same picture is found
        assert again[1] < 8  # another is not
        # Pixels that are gone end their request alone.
        gone = served.prompts()[0]
        served.shelf.discard(image.file for image in gone.images)
        handle = served.harness.add(gone.ids, images=gone.images, max_tokens=2, **GREEDY)
        served.check(served.prompts())
        assert served.harness.finish[handle] is Finish.REFUSED
    finally:
        served.harness.engine.close()
