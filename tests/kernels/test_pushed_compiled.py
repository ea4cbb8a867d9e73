"""Products that write to other ranks compile for Hopper without a GPU: flags follow the end of what they tell of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from compiled import compiled

pytest.importorskip("triton")
SCRIPT = """
import torch
from weft.kernels import pushed
from weft.kernels.collectives import Peers
from weft.kernels.gemm_launch import workspace

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

def one():
    return meta(1, dtype=torch.int32)

def work():
    space = workspace("meta")
    for tokens, steps, ranks in ((16, 1, 2), (256, 2, 2), (2048, 1, 2), (2048, 2, 4)):
        peers = Peers(meta(ranks, dtype=torch.int64), 1, ranks, one(), (1 << 20,) * ranks)
        inbox = pushed.Inbox(1 << 20, 2048, 1 << 12, 1 << 13)
        sent = pushed.push_project(peers, one(), inbox, meta(tokens, 4096), meta(8192, 4096), None, steps=steps,
            num_sms=132, space=space, num_tokens=one())
        pushed.reduce_pushed(peers, one(), sent, meet=1 << 10, x=1 << 20, sumsq=1 << 18, stride_sumsq=2048, live=one(),
            ticket=one(), tokens=tokens, hidden=8192, dtype=torch.bfloat16, add=True, beside=True, num_sms=132)
"""


EARLY = """
import torch
from weft.kernels import mid_hopper, pushed
from weft.kernels.collectives import Peers
from weft.kernels.mid_config import MidConfig

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

def few(count=1):
    return meta(count, dtype=torch.int32)

def work():
    peers = Peers(meta(4, dtype=torch.int64), 1, 4, few(), (1 << 20,) * 4)
    sent = pushed.Pushed(pushed.Inbox(1 << 20, 2048, 1 << 12, 1 << 13), 2, 64, 256)
    pushed.reduce_pushed(peers, few(), sent, meet=1 << 10, x=1 << 20, sumsq=1 << 18, stride_sumsq=2048, live=few(),
        ticket=few(), tokens=2048, hidden=8192, dtype=torch.bfloat16, add=True, beside=True, num_sms=132,
        arrivals=pushed.Arrivals(1 << 11, few(5), 24))
    x, common = meta(2048, 8192), {"sumsq": meta(4, 2048, dtype=torch.float32), "stride_sumsq": 2048, "eps": 1e-5,
        "PARTS": 4, "arrived": few(16), "number": few(), "abort": few(), "RANKS": 4, "GROUP": 8, "num_sms": 132}
    ahead = MidConfig(256, ahead=4)
    mid_hopper.launch_product("gate_up", ahead, x, meta(14336, 8192), meta(2048, 7168), few(), None, **common)
    mid_hopper.launch_product("qkv", MidConfig(160), x, meta(2560, 8192), meta(2048, 2048), few(), None, **common,
        rotary=meta(4096, 128, dtype=torch.float32), positions=few(2048), slots=few(2048),
        kv=meta(9, 80, 2, 64, 2, 128), layer=0, layers=80, HQ=16, HKV=2, D=128, PAGE=64)
"""


@pytest.mark.nightly
def test_products_that_begin_on_rows_wait_for_flags_first_and_for_the_sum_last(tmp_path: Path) -> None:
    found = compiled(EARLY, tmp_path)
    assert not any(".local" in text for text in found.values())
    (told,) = (text for name, text in found.items() if name.startswith("_reduce_pushed"))
    assert told.rindex("griddepcontrol.wait") > told.rindex("atom.")
    counted = told.index(".acq_rel.")
    stored = told.rindex("st.global", 0, counted)
    assert re.search(r"@%p\d+ bra", told[stored:counted]), "not behind every item: that waits for what is on its way"
    for text in (text for name, text in found.items() if name.startswith("mid_kernel")):
        spin = text.index("ld.acquire.sys.global")
        load = text.index("cp.async.bulk.tensor.2d.shared")
        assert spin < text.index("fence.proxy.async.global", spin) < load, "nothing is fetched before"
        assert text.count("griddepcontrol.wait") == 1
        assert "griddepcontrol.launch_dependents" in text
        assert len(re.findall(r"ld\.global\.cg\.b32", text)) == 2, "how many tokens, and of which iteration"
        assert not re.search(r"^\s*ld\.global\.b32", text, re.MULTILINE), "no word of all threads from an SM's cache"


RELEASE = r"atom\.\S*release\S*\.exch|atom\.exch\S*release"


@pytest.mark.nightly
def test_flags_are_set_behind_the_end_of_the_writes_that_they_tell_of(tmp_path: Path) -> None:
    found = compiled(SCRIPT, tmp_path)
    products = [text for name, text in found.items() if name.startswith("push_kernel")]
    assert len(products) == 4
    assert not any(".local" in text for text in products)
    by_bulk = [text for text in products if "cp.async.bulk.tensor.2d.global" in text]
    assert len(by_bulk) == 2
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
    assert len(in_two) == 2
    for text in in_two:  # beside the product: its flags alone are waited for, and its end only in the end
        assert text.count("griddepcontrol.wait") == 1
        assert text.index("griddepcontrol.wait") > text.rindex("st.global")
