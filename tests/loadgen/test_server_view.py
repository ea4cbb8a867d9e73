"""The server's own counters over a run, under weft's names and vLLM's."""

from __future__ import annotations

import pytest

from weft.loadgen import preflight
from weft.loadgen.client import Target
from weft.loadgen.connection import Address
from weft.loadgen.server_view import Snapshot, difference

WEFT = """\
# TYPE weft_time_to_first_token_seconds histogram
weft_time_to_first_token_seconds_bucket{{le="+Inf"}} {n}
weft_time_to_first_token_seconds_sum {total}
weft_time_to_first_token_seconds_count {n}
# TYPE weft_prefix_cache_hit_tokens counter
weft_prefix_cache_hit_tokens_total{{tier="gpu"}} {hits}
weft_prefix_cache_hit_tokens_total{{tier="host"}} 5
"""


def snapshot(text: str) -> Snapshot:
    out = Snapshot.parse(text)
    assert out is not None
    return out


def test_means_and_totals_cover_only_the_run() -> None:
    before = snapshot(WEFT.format(n=10, total=100.0, hits=7))
    after = snapshot(WEFT.format(n=14, total=102.0, hits=27))
    view = difference(before, after)
    assert view.means == {"ttft": pytest.approx(0.5)}
    assert view.counts == {"ttft": 4}
    assert view.totals == {"prefix_hit_tokens": 20}


def test_other_names_are_known_and_a_metric_that_appears_later_starts_at_zero() -> None:
    text = "# TYPE vllm:request_queue_time_seconds histogram\n"
    text += 'vllm:request_queue_time_seconds_sum{model="m"} 3\nvllm:request_queue_time_seconds_count{model="m"} 2\n'
    assert difference(Snapshot(), snapshot(text)).means == {"queue": 1.5}


def test_older_versions_of_vllm_call_the_gaps_time_per_output_token() -> None:
    text = "# TYPE vllm:time_per_output_token_seconds histogram\n"
    text += "vllm:time_per_output_token_seconds_sum 3\nvllm:time_per_output_token_seconds_count 30\n"
    assert difference(Snapshot(), snapshot(text)).means == {"itl": pytest.approx(0.1)}


def test_a_run_without_a_request_has_no_means() -> None:
    same = snapshot(WEFT.format(n=10, total=100.0, hits=7))
    assert difference(same, same).means == {}


@pytest.mark.parametrize("text", ["", "<html>", "go_goroutines 5\n", "weft_x{ 1\n"])
def test_an_unknown_exposition_is_not_a_snapshot(text: str) -> None:
    assert Snapshot.parse(text) is None


async def test_counters_are_read_again_while_a_request_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP process that is asked may not have the last tokens yet, which another one has sent."""
    shown = [WEFT.format(n=10, total=1.0, hits=7) + f"weft_requests_running {n}.0\n" for n in (2, 1, 0, 0)]

    async def get(*_: object) -> tuple[int, bytes]:
        return 200, shown.pop(0).encode()

    monkeypatch.setattr(preflight, "get", get)
    found = await preflight.settled(Target("weft", Address.parse("http://127.0.0.1:1"), "m"))
    assert found is not None
    assert found.idle
    assert len(shown) == 1
    monkeypatch.setattr(preflight, "SETTLE_SECONDS", 0.0)
    shown[:] = [WEFT.format(n=10, total=1.0, hits=7) + "weft_requests_waiting 3.0\n"]
    found = await preflight.settled(Target("weft", Address.parse("http://127.0.0.1:1"), "m"))
    assert found is not None
    assert not found.idle, "others may always have open requests"
