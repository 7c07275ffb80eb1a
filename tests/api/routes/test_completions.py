"""Completions as OpenAI's own client sees them: prompts in every form, echo and scores."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from support.api.api_fakes import BOS
from support.api.api_live import Live


def test_a_whole_answer(live: Live) -> None:
    with live.openai() as client:
        answer = client.completions.create(model="tiny", prompt="ab")
    [choice] = answer.choices
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == "tiny"
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "answer 0", "stop", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 8, 11)
    [seen] = live.async_engine.seen
    assert list(seen.tokens) == [BOS, 97, 98] and seen.params.max_tokens == 16


def test_a_stream(live: Live) -> None:
    with live.openai() as client:
        chunks = list(
            client.completions.create(model="tiny", prompt="ab", stream=True, stream_options={"include_usage": True})
        )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "answer 0"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [*[None] * 7, "stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_prompts_in_every_form(live: Live, prompt: Any, tokens: list[list[int]]) -> None:
    live.async_engine.say = lambda request, index: f"{chr(request.tokens[-1])}{index}"
    with live.openai() as client:
        answer = client.completions.create(model="tiny", prompt=prompt, n=2)
        streamed = [""] * len(answer.choices)
        for chunk in client.completions.create(model="tiny", prompt=prompt, n=2, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
    expected = [f"{chr(ids[-1])}{index}" for ids in tokens for index in range(2)]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(tokens)))
    assert [choice.text for choice in answer.choices] == expected == streamed
    assert [list(request.tokens) for request in live.async_engine.seen[: len(tokens)]] == tokens
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, tokens))
    assert answer.usage.completion_tokens == 2 * 2 * len(tokens)


def test_without_special_tokens(live: Live) -> None:
    with live.http() as http:
        http.post("/v1/completions", json={"prompt": "ab", "add_special_tokens": False})
    assert list(live.async_engine.seen[0].tokens) == [97, 98]


def test_logprobs(live: Live) -> None:
    with live.openai() as client:
        logprobs = client.completions.create(model="tiny", prompt="ab", logprobs=2).choices[0].logprobs
        chunks = list(client.completions.create(model="tiny", prompt="ab", logprobs=2, stream=True))
    assert logprobs is not None and logprobs.tokens == list("answer 0")
    assert logprobs.token_logprobs == [-0.25] * 8
    assert logprobs.text_offset == list(range(8))
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] == {"a": -0.25, "b": -1.25}
    pieces = [chunk.choices[0].logprobs for chunk in chunks]
    assert [offset for piece in pieces if piece for offset in piece.text_offset or []] == list(range(8))


def test_scoring_as_lm_eval_does(live: Live) -> None:
    """One more entry than there are tokens to score, the first null, a maximum at each position."""
    with live.http() as http:
        body = {
            "prompt": [[97, 98, 99], [100]],
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
            "temperature": 0,
            "seed": 1,
        }
        answer = http.post("/v1/completions", json=body).json()
    first, second = (choice["logprobs"] for choice in answer["choices"])
    assert first["tokens"] == ["a", "b", "c", "a"] and second["tokens"] == ["d", "a"]
    assert first["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert first["top_logprobs"][0] is None and first["top_logprobs"][1] == {"b": -0.25}
    assert first["text_offset"] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["abca", "da"]
    assert live.async_engine.seen[0].params.prompt_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_zero_scores_the_prompt_alone(live: Live, stream: bool) -> None:
    body = {
        "prompt": "é1",
        "echo": True,
        "logprobs": 0,
        "max_tokens": 0,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    with live.openai() as client:
        reply: Any = client.completions.create(model="tiny", **body)
        chunks = list(reply) if stream else [reply]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    usage = chunks[-1].usage
    assert "".join(choice.text for choice in choices) == "é1"
    assert choices[-1].finish_reason == "length"
    logprobs = choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["<s>", "bytes:\\xc3", "bytes:\\xa9", "1"]
    assert logprobs.text_offset == [0, 0, 0, 1]
    assert logprobs.token_logprobs == [None, -0.25, -0.25, -0.25]
    assert usage is not None and (usage.completion_tokens, usage.prompt_tokens) == (0, 4)
    assert live.async_engine.seen[0].params.max_tokens == 1


def test_max_tokens_zero_without_echo_gives_no_text(live: Live) -> None:
    with live.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 0}).json()
    assert answer["choices"][0]["text"] == "" and answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_of_text_and_of_ids(live: Live) -> None:
    with live.http() as http:
        for prompt, text in (("ab", "ab"), ([97, 98], "ab"), ([BOS, 97], "a")):
            answer = http.post("/v1/completions", json={"prompt": prompt, "echo": True, "max_tokens": 1}).json()
            assert answer["choices"][0]["text"] == text + "a"
            assert answer["choices"][0]["logprobs"] is None


def test_prompt_logprobs_beside_other_logprobs(live: Live) -> None:
    body = {"prompt": [97, 98], "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 1}
    with live.http() as http:
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert live.async_engine.seen[0].params.prompt_logprobs == 3
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.25}, {"a": -0.25}]
    assert len(choice["prompt_logprobs"]) == 2 and choice["prompt_logprobs"][0] is None
    assert list(choice["prompt_logprobs"][1]) == ["98", "97", "99"]


def test_all_prompts_are_checked_before_one_is_begun(live: Live) -> None:
    with live.http() as http:
        reply = http.post("/v1/completions", json={"prompt": [[97], [97] * 5000]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt[1]"
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert not live.async_engine.seen


async def test_many_prompts_with_the_async_client(live: Live) -> None:
    live.async_engine.say = lambda request, index: bytes(list(request.tokens)).decode()
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="none", http_client=httpx.AsyncClient(trust_env=False)
    ) as client:
        prompts = [[97 + number % 26] * (1 + number % 7) for number in range(64)]
        answer = await client.completions.create(model="tiny", prompt=prompts)
        assert [choice.text for choice in answer.choices] == [bytes(prompt).decode() for prompt in prompts]
