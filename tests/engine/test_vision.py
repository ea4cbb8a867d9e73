"""Vision-language families: each greedy token, and its log-probability, is that of `transformers`' whole model."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from colliding import CollidingIndex
from harness import GREEDY, Harness
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision_models import KINDS, MEAN, STD, Picture, Prompt, oracle_logits, prompt_of, write_checkpoint

from weft.engine.config import EngineConfig
from weft.engine.errors import ModelError, RequestError
from weft.engine.images.rules import rule_of
from weft.engine.model.implementation import choose_spec
from weft.engine.model.vision import FAMILIES, vision_of
from weft.engine.model.vision.tower import load_tower
from weft.engine.model.weights import load_weights
from weft.engine.runner.options.resolve import resolve
from weft.engine.runner.start.vision import served_vision
from weft.engine.wire.messages import AddRequest, Finish, Image
from weft.engine.wire.page_keys import image_parts, page_keys
from weft.engine.wire.pixels import PixelShelf
from weft.engine.wire.sampling import SamplingParams
from weft.server.replicas.replicas import PromptPages, Replica

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
        share = {"share": {"pixels": str(shelf.directory)}}
        self.harness = Harness(path, **{**OPTIONS, **share, **options})

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

    def part(self, tokens: int) -> list[int]:
        """Return how many tokens of a prompt that goes on differently are cached: 0 with recurrent layers, whose states
        are kept at the end of prompts."""
        return [0 if self.kind.startswith("qwen3.5") else tokens]

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


def _nightly_but(*days: str) -> list[Any]:
    return [kind if kind in days else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]


BY_DAY = ("idefics3", "qwen3-vl", "gemma3")
"""in every condition: several tiles, positions on a grid with deepstack, attention inside images"""


@pytest.fixture(params=_nightly_but(*BY_DAY))
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Maker:
    kind: str = request.param
    path = tmp_path_factory.getbasetemp() / f"vision-{kind}"
    if not path.exists():
        write_checkpoint(kind, path)
    return Maker(kind, path, PixelShelf(tmp_path))


@pytest.mark.parametrize(
    "make",
    _nightly_but(*BY_DAY, "smolvlm", "qwen2.5-vl", "mistral3", "qwen3-vl-moe", "qwen3.5", "llava-onevision"),
    indirect=True,
)
def test_in_chunks(make: Maker) -> None:
    _in_chunks_of(7, make)


@pytest.mark.parametrize("chunk", [1, 64])
def test_in_chunks_of_any_size(make: Maker, chunk: int) -> None:
    _in_chunks_of(chunk, make)


def _in_chunks_of(chunk: int, make: Maker) -> None:
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
    assert served.serve([other]) == make.part(4), "pages of another picture are shared"
    assert served.images.stats().encoded == encoded + 1
    unlike = served.harness.tokens[0][0] ^ 1  # as the cache also has the answer
    longer = make.prompt(before, picture, after, [unlike, *make.text(2)], make.picture(1), make.text(2))
    assert served.serve([longer]) == [len(same[0].ids) // 4 * 4]


def test_a_prefix_may_end_inside_a_picture(make: Maker) -> None:
    served = make.engine()
    picture = make.picture(2)
    before = make.text(4 + (2 - len(picture.ids)) % 4)  # the picture ends in the middle of a page
    end = len(before) + len(picture.ids)
    served.serve([make.prompt(before, picture, make.text(9))])
    served.images.forget()
    assert served.serve([make.prompt(before, picture, make.text(9))]) == make.part(end - 2)
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
    assert served.serve([other]) == make.part(4)


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
    assert again.serve([other]) == make.part(4)
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


@pytest.mark.parametrize("make", ["idefics3"], indirect=True)
def test_text_goes_on_while_a_picture_is_encoded(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    served = make.engine()
    tower, go_on = served.harness.engine._image_rows.tower, threading.Event()
    encode = tower.encode
    monkeypatch.setattr(tower, "encode", lambda *of: encode(*of) if go_on.wait(60) else None)
    prompts = [make.prompt(make.text(3), make.picture(1), make.text(3)), make.prompt(make.text(9))]
    handles = [served.harness.add(p.ids, images=p.images, max_tokens=8, logprobs=0, **GREEDY) for p in prompts]
    while handles[1] not in served.harness.finish:
        assert not go_on.is_set()
        served.harness.step()
    scheduler = served.harness.engine.scheduler
    assert (scheduler.stats().queue["encoder"], served.images.stats().encoded) == (1, 0)
    go_on.set()
    served.harness.run()
    for prompt, handle in zip(prompts, handles, strict=True):
        served.check(prompt, handle)
    assert scheduler.stats().queue["encoder"] == 0


@pytest.mark.parametrize("make", ["idefics3"], indirect=True)
def test_an_iteration_and_the_encoder_get_the_same_pool(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, together, zeros = make.engine().harness.engine._image_rows, threading.Barrier(2), np.zeros
    rows.free()

    def allocate(*of: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            together.wait(0.5)  # for the other thread to get here too
        return zeros(*of)

    monkeypatch.setattr("weft.engine.runner.device.image_rows.np.zeros", allocate)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: rows.rows, range(2))
    assert first is second


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


def test_batch_invariant_answers_do_not_depend_on_the_batch(make: Maker) -> None:
    if make.kind == "gemma3":
        pytest.skip("serves text only with batch invariance: see the next test")
    served = make.engine(batch_invariant=True, max_num_batched_tokens=128)
    prompts = make.prompts()
    served.serve(prompts)
    alone = make.engine(batch_invariant=True, max_num_batched_tokens=128)
    for number, prompt in enumerate(prompts):
        alone.serve([prompt])
        own, other = (of.harness.logprobs[number] for of in (alone, served))
        assert [entry.values for entry in own] == [entry.values for entry in other]


@pytest.mark.parametrize("make", ["gemma3"], indirect=True)
def test_an_engine_that_cannot_serve_images_says_so_and_refuses_them(
    make: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    served = make.engine(batch_invariant=True, max_num_batched_tokens=128)
    assert "serves text only here: images that see all of themselves" in capsys.readouterr().err
    assert served.harness.engine.describe().modalities == ("text",)
    prompt = make.prompt(make.text(3), make.picture(), make.text(3))
    with pytest.raises(RequestError, match="takes text only here"):
        served.harness.add(prompt.ids, images=prompt.images)
    served.serve([make.prompt(make.text(9))])


@pytest.mark.parametrize("make", ["gemma3"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"attention": "torch"}, "need weft's own attention kernels on a GPU"),
        (
            {"max_num_batched_tokens": 23},
            "do not fit an iteration: --max-num-batched-tokens must be 24 or more on a GPU",
        ),
        ({"kv": torch.float8_e4m3fn}, "need 16-bit pages on a GPU: leave out --kv-cache-dtype"),
    ],
)
def test_a_gpu_names_what_whole_pictures_need(
    make: Maker, changes: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(model=str(make.path), max_num_seqs=8, num_pages=8)
    spec, _ = choose_spec(config)
    resolved = replace(
        resolve(config, spec), device=torch.device("cuda"), attention="triton", max_num_batched_tokens=24
    )
    if "kv" in changes:
        changes = {"kv": replace(resolved.kv, dtype=changes["kv"])}
    raw = json.loads((make.path / "config.json").read_text())
    assert (served_vision(raw, spec, config, replace(resolved, **changes)) is None) == bool(why)
    assert why in capsys.readouterr().err


def test_only_families_that_were_right_on_a_gpu_run_there() -> None:
    there = set()
    for name, kind in KINDS.items():
        config = kind.config()
        model = AutoModelForImageTextToText._model_mapping[type(config)].__name__
        vision = vision_of(json.loads(config.to_json_string(use_diff=False)) | {"architectures": [model]})
        assert vision is not None
        if not vision.cpu_only:
            there.add(name)
    assert there == {kind for kind in KINDS if not kind.startswith("qwen3.5")}


@pytest.mark.nightly
@pytest.mark.parametrize("make", [kind for kind in KINDS if not kind.startswith("qwen3.5")], indirect=True)
@pytest.mark.parametrize("right", [True, False])
def test_drafts_after_pictures_are_verified(make: Maker, right: bool) -> None:
    prompts = make.prompts()
    served = make.engine()
    served.serve(prompts, 20)
    drafting = make.engine(speculation="suffix" if right else "auto")
    handles = []
    for number, prompt in enumerate(prompts):
        tokens = served.harness.tokens[number]
        told = tokens if right else [token for two in tokens for token in (two, 5)]
        more: dict[str, Any] = {"max_tokens": 20, "logprobs": 0, "prediction": [7, *told], **GREEDY}
        handles.append(drafting.harness.add(prompt.ids, images=prompt.images, **more))
    drafting.harness.run()
    for handle, prompt in zip(handles, prompts, strict=True):
        drafting.check(prompt, handle)
    if right:
        assert sum(drafting.harness.engine.stats().speculation.accepted_tokens.values()) > 20


@pytest.mark.parametrize("make", ["qwen3-vl"], indirect=True)
def test_after_sleep_pictures_are_encoded_again(make: Maker) -> None:
    served = make.engine(share={"pixels": str(make.shelf.directory), "sleeps": True})
    assert served.harness.engine.describe().modalities == ("text", "image")
    prompt = make.prompt(make.text(5), make.picture(2), make.text(6))
    served.serve([prompt])
    served.harness.engine.sleep()
    assert served.images.stats().rows == 0
    served.harness.engine.wake()
    served.serve([prompt])
    assert served.images.stats().encoded == 2


BAD = {
    "digest": ({"digest": b"short"}, "digest"),
    "outside": ({"start": 10**6}, "exceeds the prompt"),
    "negative": ({"start": -1}, "exceeds the prompt"),
    "empty": ({"length": 0}, "exceeds the prompt"),
    "mask": ({"mask": b"\1"}, "mask"),
    "mask values": ({"mask": b"\2" * 15}, "mask"),
    "no tiles": ({"shapes": ()}, "no tiles"),
    "empty tile": ({"shapes": ((0, 24),)}, "no tiles"),
    "negative tile": ({"shapes": ((-16, -24),)}, "no tiles"),
    "huge tile": ({"shapes": ((10**6, 10**6),)}, "MiB of pixels"),
    "other tile": ({"shapes": ((16, 20),)}, "grid"),
    "no grid": ({"grid": ()}, "grid"),
    "zero grid": ({"grid": (1, 0, 0), "shapes": ((1, 1),)}, "grid"),
    "odd grid": ({"grid": (1, 5, 6), "shapes": ((20, 24),)}, "multiple of 2"),
    "video": ({"grid": (2, 4, 6)}, "grid"),
    "fewer": ({"length": 5}, "5 embeddings"),
}


@pytest.mark.parametrize("make", ["qwen2.5-vl"], indirect=True)
@pytest.mark.parametrize("case", BAD)
def test_a_malformed_image_is_refused(bad_engine: Served, make: Maker, case: str) -> None:
    prompt = make.prompt(make.text(3), make.picture(0), make.text(12))
    changes, message = BAD[case]
    (image,) = prompt.images
    with pytest.raises(RequestError, match=message):
        bad_engine.harness.engine.add(_request(prompt, (structs.replace(image, **changes),)))
    assert not bad_engine.harness.engine.has_work


@pytest.mark.parametrize("make", ["qwen2.5-vl"], indirect=True)
def test_images_that_overlap_or_exceed_the_pool_are_refused(make: Maker) -> None:
    served = make.engine(encoder_cache_tokens=8)
    prompt = make.prompt(make.text(3), make.picture(0), make.picture(0), make.text(3))
    with pytest.raises(RequestError, match="image 2: its span"):
        served.harness.engine.add(_request(prompt, (prompt.images[0],) * 2))
    large = make.prompt(make.text(3), make.picture(2))
    with pytest.raises(RequestError, match="more than --encoder-cache-tokens 8"):
        served.harness.engine.add(_request(large, large.images))


def _request(prompt: Prompt, images: tuple[Image, ...]) -> AddRequest:
    return AddRequest(handle=1, prompt_token_ids=prompt.ids.tobytes(), params=SamplingParams(), images=images)


@pytest.fixture
def bad_engine(make: Maker) -> Served:
    return make.engine()


def test_a_router_knows_the_keys_of_pages_with_pictures(make: Maker) -> None:
    served = make.engine()
    prompt, other = (make.prompt([3, 4, 5], make.picture(2), [6] * 9) for _ in range(2))
    served.serve([prompt])
    ready = structs.replace(served.harness.engine.describe(), pages=served.harness.engine.pages())
    replica = Replica(0, None, ready)  # type: ignore[arg-type]

    def cached(of: Prompt) -> int:
        return PromptPages(of.ids.tolist(), "", [ready], of.images).cached_tokens(replica)

    assert cached(prompt) == (len(prompt.ids) - 1) // 4 * 4
    assert cached(other) == 0


SETTINGS: dict[str, dict[str, Any]] = {
    "idefics3": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    "smolvlm": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    "qwen2-vl": {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 64 * 40},
    "qwen2.5-vl": {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 64 * 40},
    **{
        kind: {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 64 * 40}
        for kind in ("qwen3-vl", "qwen3-vl-moe", "qwen3.5", "qwen3.5-moe")
    },
    "gemma3": {"size": {"height": 32, "width": 32}},
    "llava": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    "llava-mistral": {"size": {"shortest_edge": 32}, "do_pad": True},
    "llava-pixtral": {"size": {"longest_edge": 64}},
    "llava-next": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    "llava-onevision": {"size": {"height": 32, "width": 32}},
    "mistral3": {"size": {"longest_edge": 64}},
}


def test_towers_give_as_many_embeddings_as_the_rules_announce(make: Maker) -> None:
    config = json.loads((make.path / "config.json").read_bytes())
    rule = rule_of(config, SETTINGS[make.kind], lambda text: [301] if text.startswith("[") else [310])
    assert rule is not None
    served = make.engine()
    tower = served.harness.engine._image_rows.tower
    for width, height in ((1, 1), (31, 17), (64, 64), (150, 60), (13, 40)):
        for detail in ("auto", "low"):
            plan = rule.plan(width, height, detail)  # type: ignore[arg-type]
            assert tower.vision.num_embeddings(plan.shapes, plan.grid) == plan.num_embeddings
            pixels = bytearray(3 * plan.num_pixels)
            with torch.inference_mode():
                assert tower.encode(pixels, plan.shapes, plan.grid).shape[0] == plan.num_embeddings


@pytest.mark.nightly
@pytest.mark.parametrize("make", ["qwen3-vl-moe"], indirect=True)
def test_published_checkpoints_have_transposed_experts(make: Maker, tmp_path: Path) -> None:
    """`transformers` reads both layouts, and writes the other one."""
    turned = tmp_path / "turned"
    shutil.copytree(make.path, turned)
    tensors = load_file(turned / "model.safetensors")
    experts = [name for name in tensors if ".experts." in name]
    assert experts
    tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in experts}
    save_file(tensors, turned / "model.safetensors", {"format": "pt"})
    Maker(make.kind, turned, make.shelf).engine().serve(make.prompts())


@pytest.mark.parametrize("make", ["qwen3-vl-moe"], indirect=True)
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_in_transposed_tensors_can_be_made_up(make: Maker, ranks: int) -> None:
    """As to compile kernels before the weights are there."""
    spec, _ = choose_spec(EngineConfig(model=str(make.path)))
    own, meta = spec.shard(0, ranks), torch.device("meta")
    made = load_weights(own, Path(), device=meta, dtype=torch.float16, max_positions=64, dummy_seed=0)
    experts = own.experts
    assert experts is not None
    rows = 2 * experts.intermediate_size
    assert made.layers[0]["experts_gate_up"].weight.shape == (experts.count, rows, spec.hidden_size)


@pytest.mark.nightly
@pytest.mark.parametrize("make", ["llava-onevision"], indirect=True)
def test_several_images_of_a_onevision_are_squares(make: Maker) -> None:
    served = make.engine()
    square = lambda: Picture((make.rng.integers(0, 256, (32, 32, 3), dtype=np.uint8),), (), (300,) * 5)  # noqa: E731
    served.serve([make.prompt(make.text(3), square(), make.text(2), square(), make.text(4))])


@pytest.mark.parametrize("make", ["qwen2.5-vl", "qwen3-vl"], indirect=True)
def test_patches_are_those_of_the_image_processor(make: Maker) -> None:
    tower = make.engine().harness.engine._image_rows.tower
    tile = make.rng.integers(0, 256, (24, 40, 3), dtype=np.uint8)
    sizes = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 10**6}
    processor = Qwen2VLImageProcessorPil(**sizes, image_mean=MEAN, image_std=STD)
    made = processor(images=[tile], input_data_format="channels_last", return_tensors="pt")
    grid = tuple(made["image_grid_thw"][0].tolist())
    assert torch.equal(tower.vision._patches(tower._normalise(torch.from_numpy(tile)), grid), made["pixel_values"])


def test_answers_belong_to_their_own_pictures(make: Maker) -> None:
    """Many pictures with the same text, each several times, at once, in a small pool of pages with a host tier."""
    served = make.engine(num_pages=60, host_kv_gib=0.01, encoder_cache_tokens=48, max_num_batched_tokens=32)
    before, after = make.text(5), make.text(4)
    prompts = [make.prompt(before, make.picture(number % 2), after) for number in range(8)]
    served.serve([prompts[number] for number in make.rng.permutation(np.arange(24) % 8)], 4)
    assert served.images.stats().encoded < 24


@pytest.mark.parametrize("make", ["gemma3"], indirect=True)
def test_a_limit_on_the_time_between_tokens_never_divides_a_picture(make: Maker) -> None:
    served = make.engine(itl_slo="p99:1ms", max_num_batched_tokens=16)
    text = make.prompt(make.text(5))
    decoding = served.harness.add(text.ids, max_tokens=60, logprobs=0, **GREEDY)
    served.harness.step()
    served.serve([make.prompt(make.text(6), make.picture(), make.text(20), make.picture(), make.text(2))])
    served.check(text, decoding)


@pytest.mark.parametrize("make", ["gemma3"], indirect=True)
def test_whole_pictures_fit_iterations_with_room_for_one_next_to_all_decodes(make: Maker) -> None:
    """A GPU's buffers end there. Short prompts that keep arriving do not hold a picture up."""
    served = make.engine(max_num_batched_tokens=20, max_num_seqs=4)
    runner, sizes = served.harness.engine.runner, []
    launch = runner.launch

    def counted(batch: Any) -> Any:
        sizes.append(batch.num_tokens)
        return launch(batch)

    runner.launch = counted
    pictures = [make.prompt(make.picture(), make.text(9), make.picture()) for _ in range(6)]
    texts = [make.prompt(make.text(length)) for length in (3, 14, 9, 2, 11, 6) * 2]
    served.serve([*texts[:2], *pictures, *texts[2:]])
    assert max(sizes) <= 20


@given(
    tokens=st.lists(st.integers(0, 3), min_size=8, max_size=24),
    page_size=st.sampled_from([1, 2, 4]),
    start=st.integers(0, 7),
    length=st.integers(1, 8),
    shift=st.integers(0, 3),
)
def test_pages_share_keys_only_before_the_first_page_with_another_picture(
    tokens: list[int], page_size: int, start: int, length: int, shift: int
) -> None:
    ids = np.array(tokens, np.int32)
    length = min(length, len(ids) - start)

    def keys(digest: bytes, at: int) -> list[bytes]:
        images = [Image(digest * 32, at, b"", length, "", ((4, 4),), ())]
        return page_keys(b"root", ids, page_size, images=image_parts(images, page_size))

    own, plain = keys(b"a", start), page_keys(b"root", ids, page_size)
    assert keys(b"a", start) == own
    others = [keys(b"b", start), plain]
    if 0 < shift <= len(ids) - start - length:
        others.append(keys(b"a", start + shift))
    for other in others:
        same = [a == b for a, b in zip(own, other, strict=True)]
        shared = min(start // page_size, len(own))
        assert same == [True] * shared + [False] * (len(own) - shared)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_malformed_tower_is_refused_in_one_line(architecture: str) -> None:
    tower = {"image_size": 336, "patch_size": 14, "deepstack_visual_indexes": 5}
    damaged: list[Any] = ["a word", [1]]
    damaged += [tower] if "Qwen" in architecture or "LlavaNext" in architecture else []
    for each in damaged:
        config = {"architectures": [architecture], "model_type": "qwen3_vl", "vision_config": each}
        with pytest.raises(ModelError, match="wrong kind") as error:
            vision_of({**config, "image_grid_pinpoints": [[float("inf"), 1]]})
        assert "\n" not in str(error.value)


def test_windows_in_one_launch_equal_one_launch_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the GPU's operator gets the segments that `transformers` would loop over."""
    path = write_checkpoint("qwen2.5-vl", tmp_path / "model", wide=True)
    vision = vision_of(json.loads((path / "config.json").read_bytes()))
    assert vision is not None
    tower = load_tower(vision, path, torch.float32, torch.device("cpu"))
    pixels = bytearray(np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8).tobytes())
    calls = []

    def attend(q: Any, k: Any, v: Any, begins: Any, _: Any, *__: Any, scale: float) -> tuple[torch.Tensor]:
        calls.append(len(begins) - 1)
        parts = [part.split(begins.diff().tolist()) for part in (q, k, v)]
        attended = [
            torch.nn.functional.scaled_dot_product_attention(*(p.transpose(0, 1) for p in own), scale=scale)
            for own in zip(*parts, strict=True)
        ]
        return (torch.cat(attended, 1).transpose(0, 1),)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", attend)
    with torch.inference_mode():
        before = tower.encode(pixels, ((40, 56),), (1, 10, 14))
        vision.on_gpu(tower._parts)
        torch.testing.assert_close(tower.encode(pixels, ((40, 56),), (1, 10, 14)), before)
    assert calls == [12, 12, 12, 1]
