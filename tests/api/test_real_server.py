"""The whole server as its users start it: command line, engine process, the default model, OpenAI's client."""

from __future__ import annotations

import signal

import openai
import psutil
import pytest
from support.api.real_server import QUESTION, RealServer, start

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
        assert server.process.wait(60) == 0
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
        assert server.process.wait(60) == 70
    finally:
        server.close()


def test_an_engine_that_hangs_ends_it_with_70() -> None:
    server = start("--heartbeat-timeout", "5")
    try:
        [engine] = psutil.Process(server.process.pid).children()
        stream = server.client.completions.create(
            model="small", prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        engine.suspend()
        with pytest.raises(openai.APIError):
            list(stream)
        assert server.http.get("/health").status_code == 503
        assert server.process.wait(60) == 70
        assert not engine.is_running()
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
        assert server.process.wait(60) == 1
    finally:
        server.close()
