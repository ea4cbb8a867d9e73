"""Vision-language families: each greedy token, and its log-probability, is that of `transformers`' whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from colliding import CollidingIndex
from harness import GREEDY, Harness
from vision_models import KINDS, Picture, Prompt, oracle_logits, prompt_of, write_checkpoint

from weft.engine.wire.messages import Finish
from weft.engine.wire.pixels import PixelShelf

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "page_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_pages": 120,
}
TOLERANCE = 2e-4
MAX_TOKENS = 8


class Served:
    """An engine of a family, with a shelf for pictures."""

    def __init__(self, kind: str, path: Path, shelf: PixelShelf, **options: Any) -> None:
        self.kind, self.path, self.shelf = kind, path, shelf
        share = {"pixels": str(shelf.directory)}
        self.harness = Harness(path, **{**OPTIONS, **options}, share=share)

    @property
    def images(self) -> Any:
        return self.harness.engine.scheduler.images

    def serve(self, prompts: Sequence[Prompt], max_tokens: int = MAX_TOKENS, **options: Any) -> list[int]:
        """Serve prompts together and check every token. Returns how many tokens of each came from the cache."""
        harness = self.harness
        handles = [
            harness.add(p.ids, images=p.images, max_tokens=max_tokens, logprobs=0, **GREEDY, **options) for p in prompts
        ]
        harness.run()
        for handle, prompt in zip(handles, prompts, strict=True):
            self.check(prompt, handle)
        return [harness.cached[handle] for handle in handles]

    def check(self, prompt: Prompt, handle: int) -> None:
        assert self.difference(prompt, handle) < TOLERANCE

    def difference(self, prompt: Prompt, handle: int) -> float:
        """Return the largest difference of a log-probability from the oracle's."""
        tokens = self.harness.tokens[handle]
        expected = oracle_logits(self.path, self.kind, prompt, tokens).log_softmax(-1)
        values = torch.tensor([entry.values[0] for entry in self.harness.logprobs[handle]])
        assert len(values) == len(tokens) > 0
        wrong = float((expected[range(len(tokens)), tokens] - values).abs().max())
        return wrong if expected.argmax(-1).tolist() == tokens else max(wrong, 1.0)


class Maker:
    """Makes engines and prompts of one family."""

    def __init__(self, kind: str, path: Path, shelf: PixelShelf) -> None:
        self.kind, self.path, self.shelf = kind, path, shelf
        self.rng = np.random.default_rng(0)

    def engine(self, **options: Any) -> Served:
        return Served(self.kind, self.path, self.shelf, **options)

    def text(self, length: int) -> list[int]:
        return self.rng.integers(3, 290, length).tolist()

    def picture(self, size: int = 1) -> Picture:
        return KINDS[self.kind].picture(self.rng, size)

    def prompt(self, *parts: Sequence[int] | Picture) -> Prompt:
        return prompt_of(self.shelf, parts)

    def prompts(self) -> list[Prompt]:
        """Prompts with no, one and three pictures."""
        one = self.prompt(self.text(5), self.picture(2), self.text(3))
        three = self.prompt(
            self.text(3), self.picture(0), self.text(1), self.picture(1), self.text(2), self.picture(2), self.text(2)
        )
        return [self.prompt(self.text(9)), one, three]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Maker:
    kind: str = request.param
    path = tmp_path_factory.getbasetemp() / f"vision-{kind}"
    if not path.exists():
        write_checkpoint(kind, path)
    return Maker(kind, path, PixelShelf(tmp_path))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_in_chunks(make: Maker, chunk: int) -> None:
    served = make.engine(max_num_batched_tokens=chunk)
    served.harness.poison_pages()
    served.serve(make.prompts(), 4 if chunk == 1 else MAX_TOKENS)


def test_the_oracle_sees_the_pictures(make: Maker) -> None:
    """A control: the same answer with another picture is far from right."""
    text = make.text(4)
    served, prompt = make.engine(), make.prompt(text, make.picture(), text)
    served.serve([prompt])
    assert served.difference(make.prompt(text, make.picture(), text), 0) > 100 * TOLERANCE


def test_a_prefix_is_shared_with_the_same_picture_only(make: Maker) -> None:
    served = make.engine()
    served.harness.poison_pages()
    before, after, picture = make.text(6), make.text(9), make.picture(2)
    same = [make.prompt(before, picture, after) for _ in range(2)]
    other = make.prompt(before, make.picture(2), after)
    assert (same[0].ids == other.ids).all()
    assert served.serve([same[0]]) == [0]
    encoded = served.images.stats().encoded
    assert served.serve([same[1]]) == [(len(same[1].ids) - 1) // 4 * 4]
    assert served.images.stats().encoded == encoded, "a picture inside a cached prefix is encoded again"
    assert served.serve([other]) == [4], "pages of another picture are shared"
    assert served.images.stats().encoded == encoded + 1
    longer = make.prompt(before, picture, after, make.text(3), make.picture(1), make.text(2))
    assert served.serve([longer]) == [len(same[0].ids) // 4 * 4]


def test_a_prefix_may_end_inside_a_picture(make: Maker) -> None:
    served = make.engine()
    picture = make.picture(2)
    before = make.text(4 + (2 - len(picture.ids)) % 4)  # the picture ends in the middle of a page
    end = len(before) + len(picture.ids)
    served.serve([make.prompt(before, picture, make.text(9))])
    served.images.forget()
    assert served.serve([make.prompt(before, picture, make.text(9))]) == [end - 2]
    assert served.images.stats().encoded == 2


def test_pages_of_other_pictures_are_not_shared_although_their_keys_collide(make: Maker) -> None:
    served, index = make.engine(), CollidingIndex(1)
    served.harness.engine.scheduler.pool.index = index
    before, after = make.text(4), make.text(3)
    for size in (1, 1, 1):
        served.serve([make.prompt(before, make.picture(size), after)])
    assert index.refused["published"] > 0


def test_pictures_at_the_same_place_in_another_order_share_nothing(make: Maker) -> None:
    served = make.engine()
    one, two, text = make.picture(1), make.picture(1), make.text(2)
    served.serve([make.prompt(one, text, two, text)])
    assert served.serve([make.prompt(two, text, one, text)]) == [0]


def test_salts_share_neither_pages_nor_embeddings(make: Maker) -> None:
    served = make.engine()
    prompt = make.prompt(make.text(4), make.picture(1), make.text(4))
    served.serve([prompt], salt="a")
    assert served.serve([prompt], salt="b") == [0]
    assert served.images.stats().encoded == 2
    assert served.images.stats().hits == 0


def test_embeddings_are_cached_without_their_prefix(make: Maker) -> None:
    served = make.engine()
    picture = make.picture(2)
    served.serve([make.prompt(make.text(3), picture, make.text(2))])
    served.serve([make.prompt(make.text(6), picture, make.text(2))])
    stats = served.images.stats()
    assert (stats.encoded, stats.queries, stats.hits) == (1, 2, 1)


def test_a_small_pool_evicts_pictures_that_no_prompt_holds(make: Maker) -> None:
    size = len(make.picture(1).ids)
    served = make.engine(encoder_cache_tokens=size, max_num_batched_tokens=16)
    prompts = [make.prompt(make.text(3), make.picture(1), make.text(3)) for _ in range(4)]
    served.serve(prompts)
    assert served.images.stats().encoded >= 4


def test_when_requests_are_preempted(make: Maker) -> None:
    served = make.engine(num_pages=26, prefix_caching=False)
    served.harness.expect_short_outputs()
    served.harness.poison_pages()
    prompts = [make.prompt(make.text(3), make.picture(1), make.text(3 + i), make.picture(0)) for i in range(4)]
    served.serve(prompts, 20)
    assert served.harness.engine.scheduler.preemptions > 0


def test_with_pages_that_return_from_the_host(make: Maker) -> None:
    served = make.engine(host_kv_gib=0.02)
    tiers, pool = served.harness.engine.tiers, served.harness.engine.scheduler.pool
    assert tiers is not None
    tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
    prompt = make.prompt(make.text(5), make.picture(2), make.text(6))
    other = make.prompt(prompt.ids[:5].tolist(), make.picture(2), prompt.ids[-6:].tolist())
    served.serve([prompt])
    tiers.flush(60)
    pool.evict_all()
    served.images.forget()
    served.harness.poison_pages()
    assert served.serve([prompt]) == [(len(prompt.ids) - 1) // 4 * 4]
    assert served.serve([other]) == [4]


def test_after_a_restart_with_pages_on_disk(make: Maker, tmp_path: Path) -> None:
    options = {"host_kv_gib": 0.01, "ssd_kv_path": str(tmp_path / "ssd"), "ssd_kv_gib": 0.02, "idle_spill_seconds": 0.0}
    prompt = make.prompt(make.text(5), make.picture(2), make.text(6))
    other = make.prompt(prompt.ids[:5].tolist(), make.picture(2), prompt.ids[-6:].tolist())
    served = make.engine(**options)
    served.serve([prompt])
    assert served.harness.engine.tiers is not None
    served.harness.engine.tiers.flush(60)
    served.harness.engine.close()
    again = make.engine(**options)
    tiers = again.harness.engine.tiers
    assert tiers is not None
    tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
    assert again.serve([prompt]) == [(len(prompt.ids) - 1) // 4 * 4]
    assert again.images.stats().encoded == 0
    assert again.serve([other]) == [4]
    again.harness.engine.close()


def test_an_abort_lets_go_of_embeddings(make: Maker) -> None:
    served = make.engine(max_num_batched_tokens=7)
    prompt = make.prompt(make.text(2), make.picture(2), make.text(3))
    handle = served.harness.add(prompt.ids, images=prompt.images)
    served.harness.step()
    served.harness.engine.abort(handle)
    served.harness.run()
    assert all(rows.references == 0 for rows in served.images.pool.rows())
    served.serve([prompt])


def test_pixels_that_are_gone_refuse_their_request_only(make: Maker) -> None:
    served = make.engine()
    gone, other = (make.prompt(make.text(3), make.picture(1), make.text(3)) for _ in range(2))
    make.shelf.discard(image.file for image in gone.images)
    handles = [served.harness.add(p.ids, images=p.images, logprobs=0, **GREEDY) for p in (gone, other)]
    served.harness.run()
    assert served.harness.finish[handles[0]] == Finish.REFUSED
    served.check(other, handles[1])


def test_an_encoder_that_fails_ends_its_requests_only(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    served = make.engine(max_num_batched_tokens=16)
    bad, other = (make.prompt(make.text(3), make.picture(1), make.text(8)) for _ in range(2))
    tower = served.harness.engine._image_rows.tower
    encode, broken = tower.encode, bytes(bad.pictures[0].tiles[0].tobytes())

    def fails(pixels: bytearray, *rest: Any) -> torch.Tensor:
        if pixels.startswith(broken):
            raise RuntimeError("no")
        return encode(pixels, *rest)

    monkeypatch.setattr(tower, "encode", fails)
    handles = [served.harness.add(p.ids, images=p.images, logprobs=0, **GREEDY) for p in (bad, other)]
    served.harness.run()
    assert served.harness.finish[handles[0]] == Finish.NONFINITE
    served.check(other, handles[1])
    monkeypatch.undo()
    assert served.serve([bad]) == [0], "pages of a failed picture are shared"


@pytest.mark.parametrize("make", ["qwen2.5-vl", "qwen3-vl"], indirect=True)
def test_positions_of_a_line_would_be_wrong(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    line = lambda _images, length, _merge: (np.tile(np.arange(length, dtype=np.int32), (3, 1)), 0)  # noqa: E731
    monkeypatch.setattr("weft.engine.scheduling.images.rope_positions", line)
    assert _wrong(make, make.engine()) > 100 * TOLERANCE


@pytest.mark.parametrize("make", ["qwen3-vl"], indirect=True)
def test_an_image_without_deepstack_would_be_wrong(make: Maker) -> None:
    served = make.engine()
    served.harness.engine.runner._executor._deep_ends.clear()
    assert _wrong(make, served) > 100 * TOLERANCE


@pytest.mark.parametrize("make", ["gemma3"], indirect=True)
def test_causal_images_would_be_wrong(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.runner.iteration.batch.Batch.until", None)
    assert _wrong(make, make.engine()) > 100 * TOLERANCE


def test_keys_without_images_would_share_wrong_pages(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.scheduling.images.image_parts", lambda *_: {})
    served, before, after = make.engine(), make.text(5), make.text(3)
    served.serve([make.prompt(before, make.picture(1), after)])
    assert _wrong(make, served, before, after) > 100 * TOLERANCE


def _wrong(make: Maker, served: Served, before: Sequence[int] = (3, 4, 5), after: Sequence[int] = (6, 7)) -> float:
    prompt = make.prompt(before, make.picture(1), after)
    handle = served.harness.add(prompt.ids, images=prompt.images, max_tokens=MAX_TOKENS, logprobs=0, **GREEDY)
    served.harness.run()
    return served.difference(prompt, handle)
