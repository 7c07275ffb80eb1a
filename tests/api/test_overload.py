"""Limits of keys and of the queue: buckets, drain rate, shares, headers, refunds, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_live import Live, wait_until
from hypothesis import given
from hypothesis import strategies as st
from test_keys import entry, write

from api.admission import Admission
from api.backlog import ROOM, Backlog, Load
from api.caller import Caller
from api.config import ServerConfig
from api.errors import Rejection
from api.keys import Key
from api.rate_limits import RateLimits, duration
from engine.generation import Finish, TextDelta
from engine.requests import TextRequest
from engine.types import FinishReason, Priority, SamplingParams, Usage

COMPLETIONS = "/v1/completions"
R, I, B = Priority  # noqa: E741
Start = Callable[[ServerConfig], Live]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def limited(requests: int | None = None, tokens: int | None = None) -> Key:
    return Key("k", b"", "t", requests_per_minute=requests, tokens_per_minute=tokens)


def refused(call: Callable[[], Any]) -> tuple[int, str, int]:
    """Status, reason and seconds of a refusal."""
    with pytest.raises(Rejection) as caught:
        call()
    headers = caught.value.headers or {}
    return caught.value.status_code, caught.value.reason, int(headers["retry-after"])


# Buckets.


def test_requests_per_minute() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    key = limited(requests=30)
    for _ in range(30):
        limits.reserve(key, 5)
    assert refused(lambda: limits.reserve(key, 5)) == (429, "requests_per_minute", 2)
    assert limits.headers(key) == {
        "x-ratelimit-limit-requests": "30",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    clock.now = 2.0
    limits.reserve(key, 5)
    assert refused(lambda: limits.reserve(key, 5))[2] == 2
    clock.now = 1e6
    assert limits.headers(key)["x-ratelimit-remaining-requests"] == "30"


def test_tokens_are_reserved_and_given_back() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    key = limited(requests=100, tokens=600)
    first = limits.reserve(key, 400)
    assert refused(lambda: limits.reserve(key, 400)) == (429, "tokens_per_minute", 20)
    assert limits.headers(key)["x-ratelimit-remaining-requests"] == "99", "a refused request takes nothing"
    limits.settle(first, 100)
    limits.reserve(key, 400)
    assert limits.headers(key)["x-ratelimit-remaining-tokens"] == "100"


def test_a_request_beyond_the_bucket_takes_all_of_it_and_owes_the_rest() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    key = limited(tokens=600)
    reservation = limits.reserve(key, 10_000)
    limits.settle(reservation, 1_200)
    assert limits.headers(key)["x-ratelimit-remaining-tokens"] == "0"
    assert refused(lambda: limits.reserve(key, 1))[2] == 61
    clock.now = 61
    limits.reserve(key, 1)


def test_limits_that_change_with_the_file_begin_anew() -> None:
    limits = RateLimits(Clock())
    limits.reserve(limited(requests=1), 1)
    refused(lambda: limits.reserve(limited(requests=1), 1))
    limits.reserve(limited(requests=2), 1)
    assert limits.headers(limited()) == {}
    for _ in range(9):
        limits.reserve(limited(), 10**9)


@given(seed=st.integers(0, 2**32))
def test_no_more_is_served_than_the_rate_and_one_bucket(seed: int) -> None:
    """What all requests have used never exceeds one bucket and what has come in since."""
    rng = random.Random(seed)
    clock = Clock()
    limits = RateLimits(clock)
    key = limited(tokens=600)
    running: list[tuple[Any, int]] = []
    used = 0
    for _ in range(200):
        clock.now += rng.random() * 3
        most = rng.randint(1, 300)
        with contextlib.suppress(Rejection):
            running.append((limits.reserve(key, most), rng.randint(0, most)))
        if running and rng.random() < 0.6:
            reservation, amount = running.pop(rng.randrange(len(running)))
            limits.settle(reservation, amount)
            used += amount
        assert used <= 600 + 10 * clock.now + 1e-6


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.1201, "121ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (361.2, "6m2s")]
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# The queue.


def load(sequences: int = 1, tokens: int = 10, tenant: str = "", priority: Priority = I) -> Load:
    return Load(tenant, priority, sequences, tokens)


def fill(backlog: Backlog, **fields: Any) -> int:
    """Join one by one until one is refused; how many were taken."""
    count = 0
    while True:
        try:
            backlog.check(load(**fields))
        except Rejection:
            return count
        backlog.join(load(**fields))
        count += 1


def test_each_band_leaves_room_for_those_before_it() -> None:
    backlog = Backlog(100, 10**6, 60, Clock())
    assert fill(backlog, priority=B) == ROOM[B] * 100
    assert fill(backlog, priority=I) == (ROOM[I] - ROOM[B]) * 100
    assert fill(backlog, priority=R) == 10
    assert refused(lambda: backlog.check(load(priority=R))) == (503, "queue_full", 1)
    assert [backlog.waiting(band) for band in Priority] == [10, 40, 50]


def test_tokens_are_bounded_too_and_an_empty_queue_takes_anything() -> None:
    backlog = Backlog(100, 1000, 60, Clock())
    backlog.check(load(tokens=5000))
    backlog.join(load(tokens=800))
    assert refused(lambda: backlog.check(load(tokens=101)))[:2] == (503, "queue_full")
    backlog.check(load(tokens=100))
    backlog.leave(load(tokens=800), 800, begun=True)
    assert (backlog.sequences, backlog.tokens) == (0, 0)


def test_a_tenant_alone_takes_half_and_the_next_finds_room() -> None:
    backlog = Backlog(100, 10**6, 60, Clock())
    assert fill(backlog, tenant="a") == 50
    assert refused(lambda: backlog.check(load(tenant="a")))[:2] == (429, "tenant_share")
    assert fill(backlog, tenant="b") == 25
    assert fill(backlog, tenant="c") == 13
    backlog.check(load(tenant="d"))
    assert fill(Backlog(100, 10**6, 60, Clock()), tenant="") == 90, "without tenants there is nobody to share with"


def test_the_drain_rate_tells_the_wait_and_when_to_come_back() -> None:
    clock = Clock()
    backlog = Backlog(10**6, 10**9, 60, clock)
    for _ in range(1000):
        backlog.join(load())
    assert backlog.expected_wait("", B) == 0, "nothing is known yet"
    for _ in range(300):  # five a second
        clock.now += 0.2
        backlog.leave(load(), 10, begun=True)
    assert backlog.expected_wait("", B) == pytest.approx(700 / 5, rel=0.02)
    status, reason, retry = refused(lambda: backlog.check(load()))
    assert (status, reason) == (503, "queue_slow") and retry == pytest.approx(80, abs=3)
    backlog.check(load(priority=B))
    assert backlog.expected_wait("", R) == 0
    backlog.check(load(priority=R))


def test_a_tenant_waits_for_its_own_and_its_turns() -> None:
    clock = Clock()
    backlog = Backlog(10**6, 10**9, 5, clock)
    for _ in range(100):
        backlog.join(load(tenant="many"))
    for _ in range(50):  # ten a second
        clock.now += 0.1
        backlog.leave(load(tenant="many"), 10, begun=True)
    backlog.join(load(tenant="many"))
    assert refused(lambda: backlog.check(load(tenant="many")))[:2] == (503, "queue_slow")
    for _ in range(20):
        backlog.check(load(tenant="few"))
        backlog.join(load(tenant="few"))
    assert backlog.expected_wait("few", I) == pytest.approx(4.0) and backlog.expected_wait("many", I) > 7


def test_the_rate_follows_and_a_standstill_counts() -> None:
    clock = Clock()
    backlog = Backlog(10**6, 10**9, 1e9, clock)
    for _ in range(10_000):
        backlog.join(load())
    for rate in (50, 5):
        for _ in range(60 * rate):
            clock.now += 1 / rate
            backlog.leave(load(), 10, begun=True)
        assert backlog.expected_wait("", B) == pytest.approx(backlog.sequences / rate, rel=0.1)
    before = backlog.expected_wait("", B)
    clock.now += 30
    assert backlog.expected_wait("", B) > 5 * before


def test_time_without_a_queue_and_aborts_say_nothing_about_the_rate() -> None:
    clock = Clock()
    backlog = Backlog(10**6, 10**9, 60, clock)
    for _ in range(50):
        backlog.join(load())
        clock.now += 0.1
        backlog.leave(load(), 10, begun=True)
        clock.now += 1000
    for _ in range(100):
        backlog.join(load())
    for _ in range(50):
        backlog.leave(load(), 10, begun=False)
    assert backlog.expected_wait("", B) == pytest.approx(50 * 0.1)


# Tickets.


def request(num_prompt: int = 10, n: int = 1, max_tokens: int = 20) -> TextRequest:
    return TextRequest(array("i", range(num_prompt)), SamplingParams(max_tokens=max_tokens), n=n)


def delta(index: int, tokens: int = 1, ended: bool = False) -> TextDelta:
    finish = Finish(FinishReason.STOP, Usage(0, 0, 0)) if ended else None
    return TextDelta(index, "", tuple(range(tokens)), finish=finish)


def test_a_ticket_holds_places_until_first_tokens_and_tokens_until_its_end() -> None:
    backlog, limits = Backlog(100, 10**6, 60, Clock()), RateLimits(Clock())
    key = limited(tokens=1000)
    caller = Caller(key, "", None, {})
    ticket = Admission(backlog, limits).admit(caller, [request(n=2), request(num_prompt=5)])

    def left() -> str:
        return limits.headers(key)["x-ratelimit-remaining-tokens"]

    assert (backlog.sequences, backlog.tokens, left()) == (3, 15, str(1000 - 15 - 60))
    ticket.note(0, [delta(0, 3), delta(1, 0)])
    assert (backlog.sequences, backlog.tokens) == (2, 5)
    ticket.note(0, [delta(0), delta(1, 0, ended=True)])
    ticket.note(1, [delta(0, 2)])
    assert (backlog.sequences, backlog.tokens) == (0, 0)
    ticket.close()
    assert left() == str(1000 - 15 - 6)


def test_a_ticket_that_was_never_used_gives_all_back() -> None:
    backlog, limits = Backlog(100, 10**6, 60, Clock()), RateLimits(Clock())
    key = limited(requests=10, tokens=1000)
    Admission(backlog, limits).admit(Caller(key, "", None, {}), [request()]).close()
    assert backlog.sequences == 0
    assert limits.headers(key)["x-ratelimit-remaining-tokens"] == "1000"


# Over HTTP.


def key_file(folder: Path, *entries: dict[str, Any]) -> ServerConfig:
    write(folder / "keys.json", *entries)
    return ServerConfig(api_key_file=str(folder / "keys.json"), max_queued_requests=4)


def bearer(live: Live, name: str) -> httpx.Client:
    return live.http(headers={"authorization": f"Bearer {name}"})


def metric(live: Live, reason: str) -> float:
    labels = {"model_name": "tiny", "engine": "0", "reason": reason}
    value = live.state.metrics._registry.get_sample_value("rootgraft:admission_rejections_total", labels)
    return float(value)


def check_refusal(reply: httpx.Response, status: int, kind: str, code: str) -> None:
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"], error["param"]) == (status, kind, code, None)
    assert int(reply.headers["retry-after"]) >= 1 and error["message"].endswith(".")


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_beyond_its_limits(tmp_path: Path, serve_with: Start, stream: bool) -> None:
    live = serve_with(key_file(tmp_path, entry("a", requests_per_minute=2), entry("b", tokens_per_minute=100)))
    body = {"prompt": "abcd", "max_tokens": 20, "stream": stream}
    with bearer(live, "a") as http:
        left = [http.post(COMPLETIONS, json=body).headers["x-ratelimit-remaining-requests"] for _ in range(2)]
        reply = http.post(COMPLETIONS, json=body)
    assert left == ["1", "0"]
    check_refusal(reply, 429, "requests", "rate_limit_exceeded")
    assert reply.headers["x-ratelimit-limit-requests"] == "2" and reply.headers["retry-after"] == "30"
    with bearer(live, "b") as http:
        # 5 tokens in the prompt, 8 in the answer: 12 are given back each time.
        left = [http.post(COMPLETIONS, json=body).headers["x-ratelimit-remaining-tokens"] for _ in range(6)]
        assert len(live.frontend.seen) == 8
        reply = http.post(COMPLETIONS, json=body)
        check_refusal(reply, 429, "tokens", "rate_limit_exceeded")
        assert "x-ratelimit-limit-requests" not in reply.headers
    assert metric(live, "requests_per_minute") == metric(live, "tokens_per_minute") == 1


def ask_in_thread(http: httpx.Client, replies: list[httpx.Response], body: dict[str, Any]) -> threading.Thread:
    thread = threading.Thread(target=lambda: replies.append(http.post(COMPLETIONS, json=body)))
    thread.start()
    return thread


def test_a_queue_that_is_full(tmp_path: Path, serve_with: Start) -> None:
    """Places are held until first tokens, shared between tenants, and free again when the gate opens."""
    live = serve_with(key_file(tmp_path, entry("a"), entry("b"), entry("late", priority="batch")))
    live.frontend.gate = asyncio.Event()
    replies: list[httpx.Response] = []
    with bearer(live, "a") as a, bearer(live, "b") as b, bearer(live, "late") as late:
        threads = [ask_in_thread(a, replies, {"prompt": "x", "n": 2})]
        wait_until(lambda: live.state.admission.backlog.sequences == 2)
        check_refusal(a.post(COMPLETIONS, json={"prompt": "x"}), 429, "requests", "rate_limit_exceeded")
        check_refusal(late.post(COMPLETIONS, json={"prompt": "x"}), 503, "server_error", "server_overloaded")
        threads.append(ask_in_thread(b, replies, {"prompt": "x"}))
        wait_until(lambda: live.state.admission.backlog.sequences == 3)
        check_refusal(b.post(COMPLETIONS, json={"prompt": ["x", "y"]}), 503, "server_error", "server_overloaded")
        live.loop.call_soon_threadsafe(live.frontend.gate.set)
        for thread in threads:
            thread.join(20)
        assert [reply.status_code for reply in replies] == [200, 200]
        assert live.state.admission.backlog.sequences == 0
        assert late.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200
    assert (metric(live, "tenant_share"), metric(live, "queue_full")) == (1, 2)


def test_a_client_that_leaves_gives_its_place_back(tmp_path: Path, serve_with: Start) -> None:
    live = serve_with(key_file(tmp_path, entry("a", tokens_per_minute=1000)))
    live.frontend.gate = asyncio.Event()
    with bearer(live, "a") as http, pytest.raises(httpx.ReadTimeout):
        http.post(COMPLETIONS, json={"prompt": "x"}, timeout=0.2)
    wait_until(lambda: live.state.admission.backlog.sequences == 0)
    with bearer(live, "a") as http:
        wait_until(lambda: http.get("/version").headers["x-ratelimit-remaining-tokens"] == "1000")


def test_timeouts_of_header_and_option(live: Live, serve_with: Start) -> None:
    bounded = serve_with(ServerConfig(request_timeout=10.0))
    for server, asked, timeout in (
        (live, None, None),
        (live, "5", 5.0),
        (live, "0.25", 0.25),
        (live, "86400", 86400.0),
        (bounded, None, 10.0),
        (bounded, "5", 5.0),
        (bounded, "60", 10.0),
    ):
        with server.http(headers={} if asked is None else {"x-request-timeout": asked}) as http:
            assert http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200
        assert server.frontend.seen[-1].timeout == timeout


@pytest.mark.parametrize(
    "value", ["", "0", "0.0", "-1", "+1", "nan", "inf", "1e3", "86401", "9999999", "5s", "1,5", "1 2", "0x5", "."]
)
def test_timeouts_that_are_none(live: Live, value: str) -> None:
    with live.http(headers={"x-request-timeout": value}) as http:
        reply = http.post(COMPLETIONS, json={"prompt": "x"})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_header"
    assert "86400" in reply.json()["error"]["message"] and not live.frontend.seen


def test_the_document_says_what_the_code_does() -> None:
    """Every number of the table of limits, every reason, header, option and field of a key."""
    from api.connection import HEAD_TIMEOUT
    from api.guard import BODY_TIMEOUT, MAX_HEADER_BYTES, MAX_HEADERS
    from api.keys import MAX_KEYS, KeyEntry
    from api.protocol.completions import MAX_PROMPTS
    from api.protocol.messages import MAX_MESSAGES
    from api.protocol.sampling import MAX_MODEL_NAME
    from api.protocol.tools import MAX_TOOLS
    from engine.fairness import CACHED_WEIGHT
    from engine.queue import MAX_OVERTAKEN, WINDOW
    from engine.requests import MAX_N, MAX_STOP_LENGTH, MAX_STOPS, MAX_TIMEOUT
    from engine.types import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_SEED, MAX_STOP_TOKEN_IDS, MAX_TOP_K

    text = (Path(__file__).parents[2] / "docs" / "keys-and-limits.md").read_text("utf-8")
    rows = dict(
        line.strip("| ").split(" | ", 1) for line in text.split("## Limits on input")[1].splitlines() if " | " in line
    )
    expected = {
        "body": [ServerConfig().max_request_bytes],
        "headers": [MAX_HEADERS, MAX_HEADER_BYTES],
        "time for the head of a request": [int(HEAD_TIMEOUT)],
        "time for its body": [int(BODY_TIMEOUT)],
        "`x-request-timeout`": [0, int(MAX_TIMEOUT)],
        "`model`, names of adapters": [MAX_MODEL_NAME],
        "`n`": [MAX_N],
        "prompts in a request": [MAX_PROMPTS],
        "messages in a request": [MAX_MESSAGES],
        "`stop`": [MAX_STOPS, MAX_STOP_LENGTH],
        "`stop_token_ids`": [MAX_STOP_TOKEN_IDS],
        "`logit_bias`": [MAX_LOGIT_BIAS, -100, 100],
        "`logprobs`, `top_logprobs`, `prompt_logprobs`": [MAX_LOGPROBS],
        "`top_k`": [MAX_TOP_K],
        "`seed`": [MAX_SEED],
        "`cache_salt`": [128],
        "`tools`": [MAX_TOOLS],
        "keys in a file": [MAX_KEYS],
    }
    del rows["what"]
    assert rows.keys() == expected.keys()
    for name, numbers in expected.items():
        assert all(str(number) in rows[name] for number in numbers), name
    for word in (*Rejection.REASONS, *KeyEntry.model_fields, "x-ratelimit-remaining-requests", "x-request-timeout"):
        assert f"`{word}`" in text or f"{word} =" in text, word
    for name in ("api_key_file", "share_cache_between_keys", "max_queued_requests", "max_queued_tokens"):
        assert f"--{name.replace('_', '-')}" in text
    assert "--max-queue-seconds" in text and "--request-timeout" in text
    assert f"next {WINDOW} requests" in text and f"more than {MAX_OVERTAKEN}" in text and f"{CACHED_WEIGHT}" in text
