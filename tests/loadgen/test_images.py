"""The images of requests: their files, their place in messages, and `weft load --images`."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driving import content, drive
from sse_server import serving
from test_command import _no_signals, load  # noqa: F401

from weft.loadgen.errors import LoadError
from weft.loadgen.images import Images, parse, png
from weft.loadgen.lengths import Lengths
from weft.loadgen.prompts import PromptMaker
from weft.loadgen.workload import ArrivalOptions, build

MAKER = PromptMaker("words", 3, images=Images(2, 70, 33))


def images_of(message: dict[str, Any]) -> list[bytes]:
    urls = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


@pytest.mark.parametrize("size", [(1, 1), (32, 32), (70, 33), (33, 70)])
def test_a_file_is_a_png_of_colored_squares(size: tuple[int, int]) -> None:
    image = pytest.importorskip("PIL.Image")
    opened = image.open(io.BytesIO(png(*size, np.random.default_rng(5))))
    assert (opened.format, opened.mode, opened.size) == ("PNG", "RGB", size)
    pixels = np.asarray(opened)
    rows, columns = -(-size[1] // 32), -(-size[0] // 32)
    colors = np.random.default_rng(5).integers(0, 256, (rows, columns, 3), np.uint8)
    assert np.array_equal(pixels, colors.repeat(32, axis=0).repeat(32, axis=1)[: size[1], : size[0]])


def test_images_depend_on_seed_and_request_and_differ_within_one() -> None:
    def sent(maker: PromptMaker, index: int) -> list[bytes]:
        made = maker.with_images(index, "hi")
        assert isinstance(made, list)
        assert isinstance(made[0], dict)
        return images_of(made[0])

    assert sent(MAKER, 4) == sent(MAKER, 4)
    distinct = {*sent(MAKER, 4), *sent(MAKER, 5), *sent(replace(MAKER, seed=8), 4)}
    assert len(distinct) == 6


def test_images_follow_the_text_of_the_last_user_message() -> None:
    said = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "a"},
    ]
    made: Any = MAKER.with_images(0, said)  # type: ignore[arg-type]
    assert [made[0], made[2]] == [said[0], said[2]]
    assert [part["type"] for part in made[1]["content"]] == ["text", "image_url", "image_url"]
    assert said[1]["content"] == "one"
    made = MAKER.with_images(0, [{"role": "user", "content": [{"type": "text", "text": "two"}]}])
    assert [part["type"] for part in made[0]["content"]] == ["text", "image_url", "image_url"]
    made = MAKER.with_images(0, said[:1])  # type: ignore[arg-type]
    assert len(images_of(made[1])) == 2
    assert replace(MAKER, images=None).with_images(0, "hi") == "hi"


@pytest.mark.parametrize("text", ["", "x", "-1", "2x", "2x3", "2x3x4x5", "2×3×4", "65", "1x0x9", "1x9x8193"])
def test_an_invalid_value_is_named(text: str) -> None:
    with pytest.raises(LoadError, match="--images"):
        parse(text, "--images")


async def test_turns_of_a_conversation_resend_the_images_of_the_first() -> None:
    async with serving(image_tokens=5) as stub:
        options = content(6, 3, turns=Lengths("constant", 3))
        await drive(stub, build(ArrivalOptions(count=1), options, MAKER, None), chat=True)
        first, *_, last = (request["messages"] for request in stub.requests)
        assert (len(stub.requests), len(last)) == (3, 5)
        assert last[0] == first[0]
        assert len(images_of(first[0])) == 2
        assert all(isinstance(message["content"], str) for message in last[1:])


@pytest.mark.slow
async def test_every_request_carries_images_and_the_results_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, trace = tmp_path / "out.json", tmp_path / "prompts.jsonl"
    flags = ("--rate", "200", "--requests", "5", "--output", "4", "--json", str(report))
    async with serving(image_tokens=15, context=100) as stub:
        assert await load("--server", stub.url, *flags, "--input", "60", "--images", "2x40x50") == 0
        sent = stub.requests[-5:]
        assert [len(images_of(request["messages"][-1])) for request in sent] == [2] * 5
        data = json.loads(report.read_text())
        assert data["workload"]["images_per_request"] == {"count": 2, "width": 40, "height": 50}
        assert data["workload"]["endpoint"] == "/v1/chat/completions"
        assert data["runs"][0]["images_per_request"] == 2
        assert data["runs"][0]["tokens"]["prompt_received"] <= 5 * 96  # texts are cut so that images fit the context
        assert "requests/s with 2 images of 40 × 50 each" in capsys.readouterr().out
        trace.write_text('{"prompt": [1, 2]}\n')
        for wrong in (
            ("--endpoint", "completions"), ("--prompts", "ids"), ("--prompts-file", str(trace)),
            ("--format", "inferencex", "--users", "1", "--input", "4"),
        ):  # fmt: skip
            assert (
                await load("--server", stub.url, "--output", "4", "--json", str(report), "--images", "1", *wrong) == 2
            )
            lines = capsys.readouterr().err
            assert lines.startswith("weft load: --")
            assert "--images" in lines
            assert lines.count("\n") == 1


@pytest.mark.slow
async def test_a_model_without_images_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as stub:
        assert await load("--server", stub.url, "--requests", "1", "--images", "1") == 2
        error = capsys.readouterr().err
        assert "a trial request with 1 image of 512 × 512 failed" in error
        assert error.count("\n") == 1
