"""Keys from flags and files, and their per-minute limits over all processes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import httpx
import pytest
from exposed import value_of
from hypothesis import given
from hypothesis import strategies as st
from stub import Script, serving

from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig
from weft.server.keys import BATCH_PRIORITY, MAX_FILE_BYTES, MAX_KEYS, digest, load_keys, match, precedence, renumbered
from weft.server.observe.limits import RateLimits
from weft.server.observe.metrics import Metrics
from weft.server.observe.shared_state import SharedState


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_come_from_flags_and_a_file_plain_or_hashed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    hashed = hashlib.sha256(b"third").hexdigest()
    file.write_text(f"# team a\nsecond\n\n  sha256:{hashed}  \nfirst\n")
    keys = list(load_keys(ServeConfig(api_key=["first"], api_key_file=str(file))))
    assert keys == [digest("first"), digest("second"), digest("third")]
    assert [match(key, keys) for key in ("first", "second", "third", f"sha256:{hashed}", "")] == [0, 1, 2, None, None]


async def test_a_key_with_a_trailing_newline_is_the_key_without() -> None:
    """As in a variable from a Secret that was created with `--from-file`."""
    async with serving(api_key=["first\n"], admin_api_key=" admin\n") as server:
        assert (await server.http.get("/v1/models", headers=bearer("first"))).status_code == 200
        assert (await server.http.get("/admin/models", headers=bearer("admin"))).status_code == 200
        for wrong in (bearer("firs"), {"x-api-key": ""}, {}):
            assert (await server.http.get("/v1/models", headers=wrong)).status_code == 401
    with pytest.raises(ValueError, match="blank"):
        ServeConfig(admin_api_key=" \n")


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot read"), ("# none\n", "contains no keys"), (b"\xff", "UTF-8")]
)
def test_a_file_without_keys_is_an_error_and_not_open_access(
    tmp_path: Path, text: str | bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        load_keys(ServeConfig(api_key_file=str(file)))


HEX = "0123456789abcdef" * 4
LIKE_DIGESTS = [
    f"sha256:{HEX}  # alice", f"sha256:{HEX[1:]}", f"sha256:{HEX}0", f"sha256:{HEX[1:]}g", f"sha256: {HEX}",
    f"sha256 :{HEX}", f"sha256 {HEX}", f"sha256={HEX}", f"sha256-{HEX}", f"sha256{HEX}", f"sha256:{HEX},alice",
    f"SHA256:{HEX}", f"Sha256:{HEX}", f"sha-256:{HEX}", f"sha265:{HEX}", f"alice:{HEX}", f"alice:sha256:{HEX}",
    f'"sha256:{HEX}"', f"\\sha256:{HEX}", f"SHA256(key)= {HEX}", f"{HEX}  -", f"{HEX} *key", "sha256:", "sha256",
    f"\uff53ha256\uff1a{HEX}", f"sha512:{HEX}{HEX}", f"sha3-256:{HEX}", f"sha1:{HEX[:40]}", f"md5:{HEX[:32]}",
    f"blake2b:{HEX}", "{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=", "{SSHA}abc=", "$2b$12$abcdefghijklmnopqrstuv",
    "alice:$2y$05$abcdef", "$argon2id$v=19$m=65536$abc", "$6$salt$abc", "pbkdf2_sha256$600000$salt$abc",
    "pbkdf2:sha256:600000$salt$abc", "scrypt:32768:8:1$salt$abc",
]  # fmt: skip
MALFORMED = [
    *LIKE_DIGESTS, "two words", "a\tb", "key  # comment", "a\0b", "a\x0bb", "a\x85b", "a\u200bb", "a\ufeff", "a\rb",
    '"quoted"', "'quoted'", "x" * 10_000,
]  # fmt: skip


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_line_is_an_error_that_names_file_and_line_but_not_the_key(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(f"# team a\nfirst\n\n{line}\nlast\n".encode())
    config = ServeConfig(api_key=["other"], api_key_file=str(file))
    with pytest.raises(ConfigError) as found:
        load_keys(config)
    assert f"--api-key-file {file}, line 4: " in str(found.value)
    assert line not in str(found.value).partition("line 4: ")[2].replace("'sha256:'", "")
    assert "\n" not in str(found.value)
    for option in ({"api_key": ["good", line]}, {"admin_api_key": line}):
        with pytest.raises(ConfigError, match=r"^--api-key, number 2: |^--admin-api-key: "):
            load_keys(ServeConfig(**option))


@pytest.mark.parametrize("line", LIKE_DIGESTS)
def test_a_line_like_a_digest_is_refused_as_one(line: str) -> None:
    with pytest.raises(ValueError, match=r"looks like a digest|white space"):
        digest(line)


@pytest.mark.parametrize(
    "key",
    [
        HEX,
        "sk-proj-abc:def",
        "schl\u00fcssel",
        "weft-sha256-x",
        "YWJj==",
        "a#b",
        "shared:key",
        "a$b$c",
        "sha",
        "x" * 4000,
    ],
)
def test_plain_keys_of_other_forms_are_keys(tmp_path: Path, key: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"  {key}\t\r\n", encoding="utf-8-sig", newline="")
    assert list(load_keys(ServeConfig(api_key_file=str(file)))) == [digest(key)]
    assert match(key.encode().decode("latin-1"), [digest(key)]) == 0


def test_a_digest_may_have_any_case_and_stands_for_a_key_listed_twice(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    hashed = hashlib.sha256(b"third").hexdigest()
    file.write_bytes(f"\ufeffsha256:{hashed.upper()}\r\nthird\r\nthird\r\n  # comment\r\n".encode())
    assert list(load_keys(ServeConfig(api_key=["third"], api_key_file=str(file)))) == [digest("third")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"good\nb\xff\n", "line 2: this is not UTF-8"),
        ("key\n".encode("utf-16"), "line 1: this is not UTF-8"),
        (b"\0" * 99, "line 1: "),
        (b"\r\n \t\r\n#\r\n", "contains no keys"),
        (b"#" * (MAX_FILE_BYTES + 1), "is larger than 16 MiB"),
        (
            "\n".join(map(str, range(MAX_KEYS + 1))).encode(),
            f"line {MAX_KEYS}: there are more than {MAX_KEYS} API keys",
        ),
    ],
    ids=["latin-1", "utf-16", "nul", "only comments", "too large", "too many"],
)
def test_a_file_that_is_not_a_list_of_keys_is_an_error(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        load_keys(ServeConfig(api_key=["good"], api_key_file=str(file)))


def test_a_folder_or_an_endless_device_is_no_file_of_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read --api-key-file .*: Is a directory"):
        load_keys(ServeConfig(api_key_file=str(tmp_path)))
    with pytest.raises(ConfigError, match="is larger than"):
        load_keys(ServeConfig(api_key_file="/dev/zero"))


def test_keys_keep_their_numbers_when_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a\nb\nc\n")
    config = ServeConfig(api_key_file=str(file))
    keys = list(load_keys(config))
    file.write_text("c\nd\n")
    keys = renumbered(keys, load_keys(config), 4)
    assert keys == [digest("d"), b"", digest("c")]
    assert [match(key, keys) for key in ("a", "b", "c", "d", "")] == [None, None, 2, 0, None]
    file.write_text("e\nf\ng\nh\nc\n")
    with pytest.raises(ConfigError, match="more than 4"):
        renumbered(keys, load_keys(config), 4)
    assert renumbered(keys, load_keys(config), 5) == [digest(key) for key in "efcgh"]


def test_a_line_may_set_the_best_priority_of_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    hashed = digest("b").hex()
    file.write_text(f"a priority=-10\nsha256:{hashed}\tpriority=5 \nc\npriority=7\nc\n")
    config = ServeConfig(api_key=["d  priority=+3"], api_key_file=str(file), best_priority=-1)
    best = [3, -10, 5, -1, -1]
    assert load_keys(config) == dict(zip(map(digest, ["d", "a", "b", "c", "priority=7"]), best, strict=True))
    for line in (
        "a priority=", "a priority=x", "a priority=1.5", "a priority=1 2", "a priority=\u0661", "a x priority=1",
        "a priority=1 # x", "a priority=9999999999", "sha256:ab priority=1", f"sha256:{hashed} priority=x",
    ):  # fmt: skip
        file.write_text(f"c\n{line}\n")
        with pytest.raises(ConfigError, match=r"line 2: (a key has no|this looks like).* only priority=NUMBER may"):
            load_keys(ServeConfig(api_key_file=str(file)))
    file.write_text("a\nb\na priority=3\n")
    with pytest.raises(ConfigError, match="line 3: this key is listed before with another priority"):
        load_keys(ServeConfig(api_key_file=str(file)))


@given(st.integers(-50, 2000), st.integers(-50, 2000))
def test_a_priority_counts_between_keys_only_in_the_range_of_its_key(priority: int, best: int) -> None:
    found = precedence(priority, best)
    assert found >= best, "no client buys more than its key has"
    assert found <= max(best, 0 if priority < BATCH_PRIORITY else BATCH_PRIORITY)
    if best <= priority <= 0:
        assert found == priority
    if priority >= BATCH_PRIORITY:
        assert found >= BATCH_PRIORITY
    assert precedence(priority + 1, best) >= found


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_requests_a_minute_hold_over_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    shared_state = SharedState(2, 2)
    processes = [
        RateLimits(SharedState(2, 2, shared_state.fd), Metrics(shared_state, row).rejected, requests=6, tokens=None)
        for row in range(2)
    ]
    assert [processes[i % 2].enter(1) is None for i in range(8)] == [True] * 6 + [False] * 2
    assert processes[0].enter(0) is None  # another key
    refusal = processes[1].enter(1)
    assert refusal is not None
    assert (refusal.status, refusal.retry_after) == (429, 10)
    clock.now += 10
    assert [processes[i % 2].enter(1) is None for i in range(2)] == [True, False]
    clock.now += 1e6  # an allowance does not accumulate
    assert [processes[0].enter(1) is None for _ in range(7)] == [True] * 6 + [False]


def test_tokens_are_charged_when_known_and_paid_back_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    shared_state = SharedState(1, 1)
    limits = RateLimits(shared_state, Metrics(shared_state).rejected, requests=None, tokens=60)
    assert limits.enter(0) is None
    limits.charge(0, 90)
    refusal = limits.enter(0)
    assert refusal is not None
    assert refusal.retry_after == 31
    clock.now += 31
    assert limits.enter(0) is None
    limits.charge(0, 10**9)
    refusal = limits.enter(0)
    assert refusal is not None
    assert refusal.retry_after == 120


@pytest.mark.asyncio
async def test_rates_over_http() -> None:
    async with serving(api_key=["a", "b"], rate_limit=2) as server:
        body = {"prompt": "hi", "max_tokens": 2}
        statuses = [(await server.post("/v1/completions", body, headers=bearer("a"))).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        refused = await server.post("/v1/completions", body, headers=bearer("a"))
        assert refused.json()["error"] == {
            "message": "This key may use 2 requests a minute.",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert 0 < int(refused.headers["retry-after"]) <= 30
        assert (await server.post("/v1/completions", body, headers=bearer("b"))).status_code == 200
        assert (await server.http.get("/v1/models", headers=bearer("a"))).status_code == 200
        rejected = value_of(server.service.metrics, "weft_rejected_total", {"reason": "rate_limit_exceeded"})
        assert rejected == 2


@pytest.mark.asyncio
async def test_the_engine_gets_the_number_of_the_key() -> None:
    async with serving(api_key=["a", "b"]) as server:
        for key, path, body in (
            ("b", "/v1/completions", {"prompt": "hi", "n": 2}),
            ("a", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            assert (await server.post(path, {**body, "max_tokens": 2}, headers=bearer(key))).status_code == 200
        assert [request.tenant for request in server.engine.added] == [1, 1, 0]
    async with serving() as server:
        assert (await server.post("/v1/completions", {"prompt": "hi"}, headers=bearer("z"))).status_code == 200
        assert [request.tenant for request in server.engine.added] == [0]


@pytest.mark.asyncio
async def test_token_rates_count_prompt_and_output() -> None:
    async with serving(rate_limit_tokens=9) as server:
        body = {"prompt": [1, 2, 3, 4, 5, 6, 7], "max_tokens": 5}
        assert (await server.post("/v1/completions", body)).status_code == 200
        refused = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert refused.status_code == 429


async def test_a_priority_counts_between_keys_as_far_as_the_key_allows_on_every_endpoint(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("b priority=-10\n")
    async with serving(api_key=["a"], api_key_file=str(file)) as server:
        for path, body in (
            ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "model": "stub"}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
        ):
            for key, priority in (("a", -99), ("a", 7), ("a", 1000), ("b", -99), ("b", -3), ("b", 7)):
                server.engine.added.clear()
                answer = await server.post(path, {**body, "priority": priority}, headers=bearer(key))
                assert answer.status_code == 200, answer.text
                (added,) = server.engine.added
                assert added.priority == priority
                assert added.precedence == precedence(priority, -10 if key == "b" else 0)


async def test_a_key_that_fills_the_queue_refuses_no_other_key_its_first_request() -> None:
    async with serving(api_key=["a", "b"], max_queued_requests=2, max_num_seqs=1) as server:
        gate = asyncio.Event()
        server.engine.script = Script("abc", gate=gate)

        def post(key: str) -> asyncio.Task[httpx.Response]:
            body = {"prompt": "hi", "max_tokens": 2}
            return asyncio.create_task(server.post("/v1/completions", body, headers=bearer(key)))

        tasks = [post("a") for _ in range(3)]
        await server.settle(lambda: server.engine.num_open == 3)
        assert (await post("a")).json()["error"]["code"] == "queue_full"
        tasks.append(post("b"))
        await server.settle(lambda: server.engine.num_open == 4)
        assert (await post("b")).json()["error"]["code"] == "queue_full"
        gate.set()
        assert [response.status_code for response in await asyncio.gather(*tasks)] == [200] * 4
        counts = [value_of(server.service.metrics, "weft_key_queue_time_seconds_count", {"key": key}) for key in "01"]
        assert counts == [3, 1]


async def test_the_wait_of_a_request_that_is_given_up_before_it_starts_counts() -> None:
    async with serving(api_key=["a", "b"]) as server:
        server.engine.script = Script("abcdef", stop_after=0)
        body = {"prompt": "hi", "max_tokens": 2}
        task = asyncio.create_task(server.post("/v1/completions", body, headers=bearer("b")))
        await server.settle(lambda: server.engine.num_open == 1)
        task.cancel()
        await server.settle(lambda: server.engine.num_open == 0)
        assert value_of(server.service.metrics, "weft_key_queue_time_seconds_count", {"key": "1"}) == 1
