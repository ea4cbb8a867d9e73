"""GEMMs that write to other ranks compile for Hopper without a GPU: flags are set after the writes that they
announce."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from compiled import compiled

pytest.importorskip("triton")
SCRIPT = """
import torch
from weft.kernels.collectives import push_gemm as pushed
from weft.kernels.collectives.peer import Peers
from weft.kernels.matmul.gemm_launch import workspace

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

def one():
    return meta(1, dtype=torch.int32)

def work():
    space = workspace("meta")
    for tokens, steps, ranks in ((16, 1, 2), (256, 2, 2), (2048, 1, 2), (2048, 2, 4), (16, 1, 8), (2048, 2, 8)):
        peers = Peers(meta(ranks, dtype=torch.int64), 1, ranks, one(), (1 << 20,) * ranks)
        inbox = pushed.Inbox(1 << 20, 2048, 1 << 12, 1 << 13)
        sent = pushed.push_project(peers, one(), inbox, meta(tokens, 4096), meta(8192, 4096), None, steps=steps,
            num_sms=132, space=space, num_tokens=one())
        pushed.reduce_pushed(peers, one(), sent, meet=1 << 10, x=1 << 20, sumsq=1 << 18, stride_sumsq=2048, live=one(),
            ticket=one(), tokens=tokens, hidden=8192, dtype=torch.bfloat16, add=True, overlap=True, num_sms=132)
"""


RELEASE = r"atom\.\S*release\S*\.exch|atom\.exch\S*release"


@pytest.mark.nightly
def test_flags_are_set_after_the_end_of_the_writes_that_they_announce(tmp_path: Path) -> None:
    found = compiled(SCRIPT, tmp_path)
    products = [text for name, text in found.items() if name.startswith("push_kernel")]
    assert len(products) == 6
    assert not any(".local" in text for text in products)
    by_bulk = [text for text in products if "cp.async.bulk.tensor.2d.global" in text]
    assert len(by_bulk) == 3
    for text in products:
        flags = [m.start() for m in re.finditer(RELEASE, text)]
        assert flags
        assert all(".sys" in text[at : text.index("\n", at)] for at in flags)
    for text in by_bulk:  # what was only read from shared memory has not arrived
        for at in (m.start() for m in re.finditer(RELEASE, text)):
            before = text[:at]
            waited = before.rfind("cp.async.bulk.wait_group 0;")
            assert waited > before.rfind("cp.async.bulk.tensor.2d.global")
            assert before.find("bar", waited) > waited
    by_stores = [text for text in products if text not in by_bulk]
    assert all("st.global.v4" in text for text in by_stores), "addresses from a table are aligned"
    sums = [text for name, text in found.items() if name.startswith("_reduce_pushed")]
    assert sums
    assert all("ld.acquire.sys.global" in text and "ld.global.cg.v4" in text for text in sums)
    in_two = [text for text in sums if re.search(r"atom\S*\.add", text)]
    assert len(in_two) == 3
    for text in in_two:  # in parallel with the GEMM: only its flags are waited for, and its end only at the end
        assert text.count("griddepcontrol.wait") == 1
        assert text.index("griddepcontrol.wait") > text.rindex("st.global")
