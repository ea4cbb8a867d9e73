"""Metadata of GGUF files: every length is checked against the file, so a damaged or hostile file is one line."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from weft.engine.errors import ModelError
from weft.engine.model.gguf.file import KINDS, GgufFile

STRING, ARRAY, UINT32 = 8, 9, 4
HUGE = 2**63


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _string(name) + struct.pack("<I", kind) + value


def _array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def _tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCHITECTURE = _key("general.architecture", STRING, _string("llama"))


def _file(
    keys: tuple[bytes, ...] = (ARCHITECTURE,), tensors: tuple[bytes, ...] = (), data: bytes = b"", *, version: int = 3,
    num_keys: int | None = None, num_tensors: int | None = None,
) -> bytes:  # fmt: skip
    counts = len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def _read(content: bytes, folder: Path) -> GgufFile:
    (folder / "it.gguf").write_bytes(content)
    return GgufFile(folder / "it.gguf")


def test_values_of_every_type_are_read(tmp_path: Path) -> None:
    numbers = {
        "u8": (0, "<B", 200), "i8": (1, "<b", -3), "u16": (2, "<H", 60_000), "i16": (3, "<h", -300),
        "u32": (4, "<I", 2**31), "i32": (5, "<i", -7), "f32": (6, "<f", 1e-6), "bool": (7, "<?", True),
        "u64": (10, "<Q", 2**40), "i64": (11, "<q", -(2**40)), "f64": (12, "<d", 0.1),
    }  # fmt: skip
    keys = [_key(name, kind, struct.pack(form, value)) for name, (kind, form, value) in numbers.items()]
    nested = _array(ARRAY, 2, _array(UINT32, 1, struct.pack("<I", 5)) + _array(STRING, 1, _string("é")))
    keys += [_key("nested", ARRAY, nested), _key("words", ARRAY, _array(STRING, 2, _string("a") + _string("")))]
    file = _read(_file((ARCHITECTURE, *keys)), tmp_path)
    for name, (_, _, value) in numbers.items():
        assert file.get(name) == value, name
        assert type(file.get(name)) is type(value)
    assert file.get("nested") == [[5], ["é"]]
    assert file.get("words") == ["a", ""]
    assert file.get("absent", 3) == 3
    assert file.keys_under("u") == ["u8", "u16", "u32", "u64"]


def test_tensors_are_located_from_the_aligned_end_of_the_table(tmp_path: Path) -> None:
    numbers = np.arange(6, dtype="<f4")
    alignment = _key("general.alignment", UINT32, struct.pack("<I", 64))
    keys, table = (ARCHITECTURE, alignment), (_tensor("rope_freqs.weight", (6,)), _tensor("q", (64, 2), 2, 64))
    head = len(_file(keys, table))
    content = _file(keys, table) + bytes(-head % 64) + numbers.tobytes() + bytes(40) + bytes(2 * 2 * 18)
    file = _read(content, tmp_path)
    assert file.numbers("rope_freqs.weight") == numbers.tolist()
    assert file.tensors["q"].kind == "Q4_0"
    assert file.tensors["q"].shape == (2, 64)
    assert file.tensors["q"].offset == file.tensors["rope_freqs.weight"].offset + 64


DAMAGED: dict[str, Callable[[], bytes]] = {
    "an empty file": lambda: b"",
    "another format": lambda: b"PK\x03\x04" + bytes(100),
    "a header alone": lambda: b"GGUF\x03\0\0\0",
    "more keys than bytes": lambda: _file(num_keys=HUGE),
    "more tensors than bytes": lambda: _file(num_tensors=HUGE),
    "a key of 2^63 bytes": lambda: _file((struct.pack("<Q", HUGE) + b"general",)),
    "a string of 2^63 bytes": lambda: _file((_key("general.architecture", STRING, struct.pack("<Q", HUGE)),)),
    "an array of 2^63 numbers": lambda: _file((_key("a", ARRAY, _array(UINT32, HUGE)),)),
    "an array of 2^63 strings": lambda: _file((_key("a", ARRAY, _array(STRING, HUGE)),)),
    "an array of 2^63 arrays": lambda: _file((_key("a", ARRAY, _array(ARRAY, HUGE)),)),
    "a string in an array that exceeds the file": lambda: _file(
        (_key("a", ARRAY, _array(STRING, 2, struct.pack("<Q", HUGE))),)
    ),
    "arrays in arrays without end": lambda: _file((_key("a", ARRAY, _array(ARRAY, 1) * 1000),)),
    "an unknown type of value": lambda: _file((_key("a", 13, bytes(8)),)),
    "an unknown type in an array": lambda: _file((_key("a", ARRAY, _array(99, 1, bytes(8))),)),
    "a key twice": lambda: _file((ARCHITECTURE, ARCHITECTURE)),
    "a tensor twice": lambda: _file(tensors=(_tensor("q", (4,)), _tensor("q", (4,))), data=bytes(32)),
    "a tensor of 2^63 values": lambda: _file(tensors=(_tensor("q", (HUGE,)),), data=bytes(32)),
    "sizes whose product overflows": lambda: _file(tensors=(_tensor("q", (2**32, 2**32)),), data=bytes(32)),
    "a tensor beyond the end": lambda: _file(tensors=(_tensor("q", (4,), 0, 2**40),), data=bytes(32)),
    "an offset that wraps": lambda: _file(tensors=(_tensor("q", (4,), 0, 2**64 - 32),), data=bytes(32)),
    "an offset that is not aligned": lambda: _file(tensors=(_tensor("q", (4,), 0, 3),), data=bytes(64)),
    "a row that no blocks fill": lambda: _file(tensors=(_tensor("q", (48, 2), 2),), data=bytes(4096)),
    "a tensor of 2^31 dimensions": lambda: _file(tensors=(_string("q") + struct.pack("<I", 2**31),)),
    "an alignment of zero": lambda: _file((ARCHITECTURE, _key("general.alignment", UINT32, bytes(4)))),
    "an alignment that is no number": lambda: _file((ARCHITECTURE, _key("general.alignment", STRING, _string("x")))),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_one_line(what: str, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"it\.gguf is not a complete GGUF file \([\d,]+ bytes; .*download it again"
    ) as e:
        _read(DAMAGED[what](), tmp_path)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 300 + len(str(tmp_path))


def test_what_this_reader_does_not_support_is_named(tmp_path: Path) -> None:
    swapped = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
    for content, words in (
        (swapped, "is big-endian"),
        (_file(version=1), "version 1 of the format; supported: 2, 3"),
        (_file(version=77), "version 77"),
        (_file(tensors=(_tensor("blk.0.attn_q.weight", (4,), 4),), data=bytes(32)), "'blk.0.attn_q.weight' in a type"),
    ):
        with pytest.raises(ModelError, match=words):
            _read(content, tmp_path)


def test_any_cut_of_a_file_is_one_line(tmp_path: Path) -> None:
    keys = (ARCHITECTURE, _key("words", ARRAY, _array(STRING, 2, _string("ab") + _string("c"))))
    whole = _file(keys, (_tensor("q", (32, 2), 2),), bytes(36))
    _read(whole, tmp_path)
    for end in range(len(whole)):
        with pytest.raises(ModelError, match="is not a complete GGUF file"):
            _read(whole[:end], tmp_path)


def test_types_are_those_of_the_library() -> None:
    kinds = gguf.GGMLQuantizationType
    assert {number: (name, *sizes) for number, (name, *sizes) in KINDS.items()} == {
        number: (kinds(number).name, *map(int, gguf.GGML_QUANT_SIZES[kinds(number)])) for number in KINDS
    }
