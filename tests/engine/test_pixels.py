"""The shelf of pixels: what `put` writes `take` returns, and nothing else is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from weft.engine.wire.messages import AddRequest, Image, encoder, to_engine_decoder
from weft.engine.wire.pixels import PREFIX, PixelShelf, ShelfFull
from weft.engine.wire.sampling import SamplingParams


def test_tiles_are_read_back_in_order_from_a_private_file(tmp_path: Path) -> None:
    shelf = PixelShelf(tmp_path)
    name = shelf.put(3, [b"abc", memoryview(b"defg")])
    assert PixelShelf(tmp_path).take(name, 7) == b"abcdefg"
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert shelf.num_bytes == 7
    shelf.discard([name])
    shelf.discard([name])
    assert shelf.num_bytes == 0
    with pytest.raises(FileNotFoundError):
        shelf.take(name, 7)


def test_the_directory_is_private_and_abandoned_ones_are_removed() -> None:
    shelf = PixelShelf.make()
    try:
        assert stat.S_IMODE(shelf.directory.stat().st_mode) == 0o700
        dead = shelf.directory.parent / f"{PREFIX}{2**22 + 1}-dead"
        dead.mkdir(exist_ok=True)
        PixelShelf.make().close()
        assert not dead.exists()
        assert shelf.directory.exists()
    finally:
        shelf.close()
    assert not shelf.directory.exists()


@pytest.mark.parametrize(
    "name", ["", "..", "/etc/passwd", "1-" + "0" * 31 + "/", "1-" + "0" * 31 + "\n", "1-" + "g" * 32]
)
def test_other_names_are_never_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="invalid name"):
        PixelShelf(tmp_path).take(name, 1)


def test_links_pipes_and_other_sizes_are_refused(tmp_path: Path) -> None:
    shelf = PixelShelf(tmp_path)
    real = shelf.put(1, [b"12345"])
    link, pipe = "1-" + "a" * 32, "1-" + "b" * 32
    (tmp_path / link).symlink_to(tmp_path / real)
    os.mkfifo(tmp_path / pipe)
    for name, size in ((link, 5), (pipe, 5), (real, 4), (real, 6)):
        with pytest.raises(ValueError, match="pixels"):
            shelf.take(name, size)


def test_a_full_shelf_refuses_until_a_file_is_discarded(tmp_path: Path) -> None:
    shelf = PixelShelf(tmp_path, limit=10)
    first = shelf.put(1, [b"123456"])
    with pytest.raises(ShelfFull):
        shelf.put(1, [b"12345"])
    shelf.discard([first])
    shelf.put(1, [b"12345"])
    assert len(list(tmp_path.iterdir())) == 1


def test_files_of_a_client_that_has_ended_are_removed(tmp_path: Path) -> None:
    shelf = PixelShelf(tmp_path)
    gone, kept = shelf.put(1, [b"a"]), shelf.put(11, [b"b"])
    shelf.discard_client(1)
    assert [path.name for path in tmp_path.iterdir()] == [kept]
    assert gone != kept


def test_images_cross_the_socket() -> None:
    image = Image(bytes(32), 4, b"\1\0\1", 3, "1-" + "a" * 32, ((28, 56),), (1, 2, 4))
    message = AddRequest(handle=1, prompt_token_ids=b"\0" * 28, params=SamplingParams(), images=(image,))
    assert to_engine_decoder.decode(encoder.encode(message)) == message
