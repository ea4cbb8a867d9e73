"""Pages packed and unpacked by kernels equal the reference's, and every bit is restored."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from interpreted import InOrder, streams_in_order
from packed_pages import cell_of, far, of_kind, pages, words_of

from weft.engine.memory import cuda_transfer
from weft.kernels.formats.packed_page import PackedPage
from weft.kernels.tiers import pack_pages as kernels

FORMS = [PackedPage(2 * 3 * 16 * 64, 16, 64), PackedPage(5 * 6 * 4, 5, 6), PackedPage(2 * 3 * 20, 3, 20)]


def words_in(pool: torch.Tensor) -> np.ndarray:
    """`[pages, values]` uint16"""
    return pool.cpu().view(torch.int16).numpy().view(np.uint16)


def there_and_back(form: PackedPage, words: np.ndarray, device: str) -> int:
    """Pages of `words [pages, values]` that pack. All are checked."""
    pool = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).to(device)
    back = torch.zeros_like(pool)
    cells = torch.full((kernels.PAGES_PER_LAUNCH, form.nbytes), 0xA5, dtype=torch.uint8, device=device)
    count = 0
    for first in range(0, len(words), kernels.PAGES_PER_LAUNCH):
        # in reverse: a page's position and its packed position are two numbers
        some = list(range(first, min(first + kernels.PAGES_PER_LAUNCH, len(words))))[::-1]
        kernels.pack(form, pool, some, cells)
        here = cells.cpu().numpy()
        packs = [form.holds(cell) for cell in here[: len(some)]]
        for page, cell in zip(some, here, strict=False):
            assert form.num_escapes(cell) == far(form, words[page])
        if good := [page for page, packs_ in zip(some, packs, strict=True) if packs_]:
            kept = cells[: len(some)][torch.tensor(packs, device=device)].contiguous()
            kernels.unpack(form, kept, back, good)
            count += len(good)
            for page in set(some) - set(good):
                assert not back[page].view(torch.int16).any(), "an unpacked page spilled into another"
                back[page] = pool[page]
        else:
            back[some] = pool[some]
    assert np.array_equal(words_in(back), words)
    return count


@pytest.mark.parametrize("form", FORMS)
def test_the_kernels_equal_the_reference(form: PackedPage, device: str) -> None:
    words = np.stack([of_kind(kind, form, np.random.default_rng(kind)).reshape(-1) for kind in range(10)])
    pool = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).to(device)
    for some in ([7, 0, 3, 9], [5], [2, 6, 8, 1]):
        cells = torch.full((4, form.nbytes), 0xA5, dtype=torch.uint8, device=device)
        kernels.pack(form, pool, some, cells)
        for page, cell in zip(some, cells.cpu().numpy(), strict=False):
            reference = cell_of(form, words[page])
            assert (reference is not None) == form.holds(cell)
            if reference is not None:
                bases, escapes = (
                    slice(form.bases_at, form.bases_at + form.blocks * form.width),
                    form.num_escapes(reference),
                )
                assert np.array_equal(cell[bases], reference[bases])
                for part in (slice(form.codes_at, form.codes_at + form.values // 2), slice(form.lows_at, form.values)):
                    assert np.array_equal(cell[part], reference[part])
                lists = [c[form.escapes_at :][: 4 * escapes].view(np.uint32) for c in (cell, reference)]
                assert np.array_equal(*(np.sort(escapes) for escapes in lists)), "the kernel's are in no order"
                assert np.array_equal(words_of(form, cell), words[page])
    assert there_and_back(form, words, device) >= 4


def test_every_bit_of_many_pages_is_restored(device: str) -> None:
    """10,000 pages on a GPU, a few where it is interpreted."""
    form, many = FORMS[0], pages(FORMS[0], 10_000 if device == "cuda" else 12, 5)
    count = 0
    while some := list(itertools.islice(many, 1000)):
        count += there_and_back(form, np.stack([words.reshape(-1) for words in some]), device)
    assert count


@pytest.mark.usefixtures("large")
def test_pages_of_a_large_model(device: str) -> None:
    form = PackedPage(32 * 2 * 64 * 1024, 64, 1024)
    rng = np.random.default_rng(6)
    words = np.stack([of_kind(kind, form, rng).reshape(-1) for kind in (0, 0, 2, 5, 8, 9)])
    assert 3 <= there_and_back(form, words, device) < 6


def test_the_copy_engine_packs_pages_that_leave_and_unpacks_those_that_return(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted; `test_transfer` does it on a GPU. Pages that do not pack follow once this is detected."""
    if device == "cuda":
        pytest.skip("tests/gpu/test_transfer.py")
    form, kinds = FORMS[0], [0, 0, 1, 7, 0, 4, 1, 0, 1, 0]
    rng = np.random.default_rng(7)
    words = np.stack([of_kind(kind, form, rng).reshape(-1) for kind in kinds])
    kv = torch.from_numpy(words.view(np.int16).copy()).view(torch.bfloat16)
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(cuda_transfer, "_local_cpus", lambda _: set())
    gates = [InOrder(), InOrder()]
    waits: list[int] = []
    for i, gate in enumerate(gates):
        monkeypatch.setattr(gate, "wait", lambda _, i=i: waits.append(i), raising=False)
    with streams_in_order(monkeypatch):
        copies = cuda_transfer.CudaCopyEngine(kv, 64, gates, form)  # type: ignore[arg-type]
        pages = list(range(1, len(kinds)))
        copy = copies.out([(page, 3 * page) for page in pages])
        assert waits == [0] * 5 + [1] * 4
        assert not copy.done(), "some go again, as they are"
        assert copy.done()
        assert (sorted(copy.raw), copy.unkept) == ([6, 18, 24], [24]), "there are two remainders"
        kv.view(torch.int16).fill_(-1)
        kept = [page for page in pages if 3 * page not in copy.unkept]
        back = copies.back([(page, 3 * page) for page in kept])
        assert back.done()
        assert sorted(back.raw) == [6, 18]
        copies.close()
    assert np.array_equal(words_in(kv)[kept], words[kept])
    assert (words_in(kv)[[0, 8]] == 0xFFFF).all(), "the dummy page and the one that was not kept"
