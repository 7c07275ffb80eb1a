"""The whole server as its users start it: command line, engine process, the default model, OpenAI's client."""

from __future__ import annotations

import itertools
import json
import signal
import time
from typing import Any

import openai
import psutil
import pytest
from support.api.real_server import QUESTION, RealServer, start
from support.machine.waits import HANG_SECONDS

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def server(real_server: RealServer) -> RealServer:
    return real_server


def test_streamed_and_whole_answers_are_the_same(server: RealServer) -> None:
    asked = {"model": "small", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = server.client.chat.completions.create(**asked)  # type: ignore[call-overload]
    *chunks, last = server.client.chat.completions.create(  # type: ignore[call-overload]
        **asked, stream=True, stream_options={"include_usage": True}
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content and text
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 24
    assert last.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_scores_of_an_echo_are_those_of_the_generation(server: RealServer) -> None:
    asked = {"model": "small", "temperature": 0, "logprobs": 1}
    prompt = server.http.post("/tokenize", json={"prompt": "The capital of France is"}).json()["tokens"]
    made = server.client.completions.create(prompt=prompt, max_tokens=8, **asked).choices[0]  # type: ignore
    tokens = server.http.post("/tokenize", json={"prompt": made.text}).json()["tokens"]
    echoed = server.client.completions.create(prompt=prompt + tokens, max_tokens=0, echo=True, **asked)  # type: ignore
    scores = echoed.choices[0].logprobs
    assert scores.tokens[len(prompt) :] == made.logprobs.tokens
    assert scores.token_logprobs[0] is None and len(scores.token_logprobs) == len(prompt) + 8
    assert scores.token_logprobs[len(prompt) :] == pytest.approx(made.logprobs.token_logprobs, abs=0.15)
    assert echoed.choices[0].text == "The capital of France is" + made.text
    assert echoed.usage is not None and echoed.usage.completion_tokens == 0


def test_stop_and_n(server: RealServer) -> None:
    answer = server.client.completions.create(
        model="small", prompt="1, 2, 3, 4, 5,", temperature=0, max_tokens=30, stop=" 8", n=2
    )
    assert [choice.text for choice in answer.choices] == [" 6, 7,"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2


def test_no_draft_behind_a_stop_string_is_counted(server: RealServer) -> None:
    """The second time nearly all of an answer is drafted from the first, and much of it lies behind the stop string."""
    asked: dict[str, Any] = {"temperature": 0, "stop": [".", "a"]}
    prompt = {"prompt": "Once upon a time", "max_tokens": 24}
    chat = {"messages": QUESTION, "max_tokens": 24}
    server.http.post("/v1/completions", json={**prompt, "temperature": 0}).raise_for_status()
    for path, body, n in (
        ("/v1/completions", prompt, 1),
        ("/v1/completions", prompt, 3),
        ("/v1/chat/completions", chat, 2),
        ("/v1/responses", {"input": "Name three colours.", "max_output_tokens": 24}, 1),
    ):
        body = {**body, **asked, **({"n": n} if n > 1 else {})}
        for _ in range(2):
            usage = server.http.post(path, json=body).raise_for_status().json()["usage"]
            total = usage.get("completion_tokens", usage.get("output_tokens"))
            details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
            assert 0 < total < 24 * n and max(details.values()) <= total, usage
        if path != "/v1/responses":
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            *_, last, _ = server.http.post(path, json=streamed).text.strip().split("\n\n")
            again = json.loads(last.removeprefix("data: "))["usage"]
            # How many drafts are tried follows from what steps take, and may differ.
            assert max(again.pop("completion_tokens_details").values()) <= total
            del usage["completion_tokens_details"]
            assert again == usage


def test_an_event_holds_the_tokens_of_one_step(server: RealServer) -> None:
    """From the second time on the answer is drafted from the first, as far as that is worth it on this machine."""
    body = {"prompt": "1, 2, 3, 4, 5, 6, 7, 8,", "max_tokens": 60, "temperature": 0, "stream": True}
    told = {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    most = 1
    for _ in range(6):
        events = server.http.post("/v1/completions", json=told).text.strip().split("\n\n")[:-1]
        usages = [json.loads(event.removeprefix("data: "))["usage"] for event in events]
        counts = [0, *(usage["completion_tokens"] for usage in usages)]
        pieces = [after - before for before, after in itertools.pairwise(counts)]
        assert counts[-1] == 60 and max(pieces) <= 17  # 16 drafts and the token after them
        assert sum(piece > 0 for piece in pieces) >= 60 - usages[-1]["completion_tokens_details"]["drafted_tokens"]
        most = max(most, *pieces)
    assert most > 1


def test_sigterm_ends_it_with_0() -> None:
    server = start()
    try:
        stream = server.client.completions.create(
            model="small", prompt="x", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [next(stream)]
        server.process.send_signal(signal.SIGTERM)
        chunks += stream
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(HANG_SECONDS) == 0
    finally:
        server.close()


def test_the_end_of_the_engine_ends_it_with_70() -> None:
    server = start()
    try:
        [engine] = psutil.Process(server.process.pid).children()
        stream = server.client.completions.create(
            model="small", prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        engine.kill()
        with pytest.raises(openai.APIError):
            list(stream)
        assert server.process.wait(HANG_SECONDS) == 70
    finally:
        server.close()


def test_an_engine_that_hangs_ends_it_with_70() -> None:
    server = start()  # found after 5 seconds
    try:
        [engine] = psutil.Process(server.process.pid).children()
        stream = server.client.completions.create(
            model="small", prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        engine.suspend()
        with pytest.raises(openai.APIError, match=r"hangs.*5 seconds \(--heartbeat-timeout\)"):
            list(stream)
        health = server.http.get("/health")
        assert health.status_code == 503 and "hangs" in health.json()["error"]["message"]
        assert server.process.wait(HANG_SECONDS) == 70
        assert not engine.is_running()
    finally:
        server.close()


def test_a_server_that_was_stopped_with_its_engine_goes_on() -> None:
    """A terminal's Ctrl-Z, a container that is frozen: longer than an engine may be silent."""
    server = start("--heartbeat-timeout", "2")
    try:
        processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children()]
        stream = server.client.completions.create(
            model="small", prompt="x", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        for process in reversed(processes):
            process.suspend()
        time.sleep(5)
        for process in processes:
            process.resume()
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
        assert server.http.get("/health").status_code == 200
    finally:
        server.close()


def test_an_answer_that_is_cut_off_by_the_end_makes_it_1() -> None:
    server = start("--shutdown-timeout", "0")
    try:
        stream = server.client.completions.create(
            model="small", prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError):
            list(stream)
        assert server.process.wait(HANG_SECONDS) == 1
    finally:
        server.close()
