"""Chat completions as OpenAI's own client sees them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from support.api.api_live import Live

from rootgraft.engine.types import MAX_SEED, MIN_SEED

HI = [{"role": "user", "content": "hi"}]


def test_a_whole_answer(live: Live) -> None:
    with live.openai() as client:
        answer = client.chat.completions.create(model="tiny", messages=HI)
    [choice] = answer.choices
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "tiny"
    assert answer.system_fingerprint and answer.system_fingerprint.startswith("fp_")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", "answer 0", None)
    assert choice.message.tool_calls is None
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    num_prompt = len(live.async_engine.seen[0].tokens)
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == num_prompt + 8
    assert answer.usage.prompt_tokens_details.cached_tokens == num_prompt // 2


def test_the_answer_carries_the_name_asked_for(live: Live) -> None:
    with live.openai() as client:
        assert client.chat.completions.create(model="org/alias", messages=HI).model == "org/alias"
    with live.http() as http:
        assert http.post("/v1/chat/completions", json={"messages": HI}).json()["model"] == "tiny"


def test_a_stream_chunk_by_chunk(live: Live) -> None:
    with live.openai() as client:
        chunks = list(client.chat.completions.create(model="tiny", messages=HI, stream=True))
    first, *middle, last = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert "".join(choice.delta.content or "" for choice in middle) == "answer 0"
    assert all(choice.delta.role is None and choice.finish_reason is None for choice in middle)
    assert last.finish_reason == "stop"
    assert last.delta.model_dump(exclude_none=True) == {}
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert {(chunk.object, chunk.model, chunk.usage) for chunk in chunks} == {("chat.completion.chunk", "tiny", None)}


def test_usage_comes_last_and_only_when_asked_for(live: Live) -> None:
    with live.openai() as client:
        chunks = list(
            client.chat.completions.create(
                model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
            )
        )
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens == 8 and usage.prompt_tokens_details is not None
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks[:-1])
    assert all("usage" in chunk.model_fields_set for chunk in chunks)


def test_continuous_usage_grows_to_the_last(live: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with live.openai() as client:
        chunks = list(
            client.chat.completions.create(model="tiny", messages=HI, stream=True, stream_options=options)  # type: ignore
        )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == sorted(counts) and counts[-1] == 8 and len(counts) == len(chunks)


def test_the_raw_stream_ends_in_done(live: Live) -> None:
    with live.http() as http:
        reply = http.post("/v1/chat/completions", json={"messages": HI, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"


def test_n_answers_whole_and_streamed(live: Live) -> None:
    with live.openai() as client:
        answer = client.chat.completions.create(model="tiny", messages=HI, n=3, temperature=0)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.message.content for choice in answer.choices] == ["answer 0", "answer 1", "answer 2"]
        assert answer.usage is not None and answer.usage.completion_tokens == 24
        assert answer.usage.prompt_tokens == len(live.async_engine.seen[0].tokens)
        texts, roles, ends = ["", "", ""], [0, 0, 0], [0, 0, 0]
        for chunk in client.chat.completions.create(model="tiny", messages=HI, n=3, stream=True):
            choice = chunk.choices[0]
            assert not ends[choice.index]
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            ends[choice.index] += choice.finish_reason is not None
    assert (texts, roles, ends) == (["answer 0", "answer 1", "answer 2"], [1, 1, 1], [1, 1, 1])


def test_logprobs_whole_and_streamed(live: Live) -> None:
    asked: Any = {"model": "tiny", "messages": HI, "logprobs": True, "top_logprobs": 3}
    with live.openai() as client:
        whole = client.chat.completions.create(**asked).choices[0].logprobs
        streamed = [
            entry
            for chunk in client.chat.completions.create(**asked, stream=True)
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or []
        ]
    assert whole is not None and whole.content is not None
    assert bytes(byte for entry in whole.content for byte in entry.bytes or []) == b"answer 0"
    assert [entry.model_dump() for entry in whole.content] == [entry.model_dump() for entry in streamed]
    assert [len(entry.top_logprobs) for entry in whole.content] == [3] * 8
    assert whole.content[0].top_logprobs[0].token == whole.content[0].token == "a"
    assert live.async_engine.seen[0].params.logprobs == 3


def test_logprobs_without_top(live: Live) -> None:
    with live.openai() as client:
        logprobs = client.chat.completions.create(model="tiny", messages=HI, logprobs=True).choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.top_logprobs for entry in logprobs.content] == [[]] * 8
    assert live.async_engine.seen[0].params.logprobs == 0


def test_prompt_logprobs(live: Live) -> None:
    with live.http() as http:
        scores = http.post("/v1/chat/completions", json={"messages": HI, "prompt_logprobs": 1}).json()[
            "prompt_logprobs"
        ]
    tokens = live.async_engine.seen[0].tokens
    assert len(scores) == len(tokens) and scores[0] is None
    assert scores[1] == {str(tokens[1]): {"logprob": -0.25, "rank": 1, "decoded_token": chr(tokens[1])}}


def test_held_back_text_makes_no_empty_chunks(live: Live) -> None:
    live.async_engine.say = lambda request, index: "aé"
    with live.http() as http:
        reply = http.post("/v1/chat/completions", json={"messages": HI, "stream": True})
    assert '"content":""},"logprobs"' in reply.text  # the role's chunk
    assert reply.text.count('"delta":{"content":""') == 0


def test_length_and_stop_reasons(live: Live) -> None:
    with live.http() as http:
        cut = http.post("/v1/chat/completions", json={"messages": HI, "max_completion_tokens": 3}).json()["choices"][0]
        stopped = http.post("/v1/chat/completions", json={"messages": HI, "stop": "END"}).json()["choices"][0]
    assert (cut["finish_reason"], cut["stop_reason"], cut["message"]["content"]) == ("length", None, "ans")
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "END")


def test_parameters_reach_the_engine(live: Live) -> None:
    body = {
        "messages": HI,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "seed": 5,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "min_tokens": 1,
        "max_tokens": 9,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logit_bias": {"4": -3, "5": 1.5},
        "cache_salt": "mine",
        "n": 2,
    }
    with live.http() as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    [seen] = live.async_engine.seen
    params = seen.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 0.5, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.2, -0.3, 1.1)
    assert (params.seed, params.min_tokens, params.max_tokens, params.ignore_eos) == (5, 1, 9, True)
    assert params.stop_token_ids == (1, 2) and params.logit_bias == ((4, -3.0), (5, 1.5))
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert (seen.stop, seen.include_stop, seen.skip_special_tokens) == (("a", "b"), True, False)
    assert (seen.n, seen.salt, seen.adapter) == (2, "mine", None)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_any_seed_of_64_bits_is_taken(live: Live, path: str) -> None:
    asked = {
        "/v1/chat/completions": {"messages": HI},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
    }
    with live.http() as http:
        for seed in (-1, MIN_SEED, MAX_SEED):
            assert http.post(path, json=asked[path] | {"seed": seed}).status_code == 200
        assert [request.params.seed for request in live.async_engine.seen] == [-1, MIN_SEED, MAX_SEED]
        for seed in (MIN_SEED - 1, MAX_SEED + 1):
            reply = http.post(path, json=asked[path] | {"seed": seed})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "seed"


def test_nulls_and_fields_without_effect_are_taken(live: Live) -> None:
    fields = (
        "temperature top_p n stop seed logprobs top_logprobs tools tool_choice functions response_format stream "
        "stream_options max_tokens max_completion_tokens logit_bias user audio modalities reasoning_effort"
    )
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "verbosity": "medium",
        "user": "me",
        "metadata": {"a": "b"},
        "safety_identifier": "x",
        "store": True,
        "service_tier": "flex",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "x"},
        "top_k": -1,
    }
    with live.http() as http:
        for body in (dict.fromkeys(fields.split()), neutral):
            assert http.post("/v1/chat/completions", json={"messages": HI, **body}).status_code == 200
    assert live.async_engine.seen[1].params.top_k == 0


def test_default_limit_is_the_room_that_is_left(live: Live) -> None:
    with live.http() as http:
        http.post("/v1/chat/completions", json={"messages": HI})
    [seen] = live.async_engine.seen
    assert seen.params.max_tokens == live.async_engine.max_model_len - len(seen.tokens)


def test_messages_in_every_form(live: Live) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    broken = {"id": "c2", "type": "function", "index": 1, "function": {"name": "g", "arguments": '{"a": '}}
    messages = [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, broken], "refusal": None, "annotations": []},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": []},
        {"role": "user", "content": ""},
    ]
    with live.http() as http:
        reply = http.post("/v1/chat/completions", json={"messages": messages, "chat_template_kwargs": {"deep": True}})
    assert reply.status_code == 200, reply.text
    seen = live.async_engine.tokenizer.rendered[-1]
    assert seen["messages"] == [
        {"role": "system", "content": "be brief", "name": "boss"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "tool_calls": [
                {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"a": 1}}},
                {"type": "function", "id": "c2", "function": {"name": "g", "arguments": '{"a": '}},
            ],
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "f"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "reasoning": "hm"},
        {"role": "user", "content": ""},
    ]
    assert seen["kwargs"] == {"deep": True}
    assert (seen["add_generation_prompt"], seen["continue_final_message"]) == (True, False)


def test_our_own_answer_can_be_sent_back(live: Live) -> None:
    with live.openai() as client:
        message = client.chat.completions.create(model="tiny", messages=HI).choices[0].message
        history = [*HI, message.model_dump(), *HI]
        client.chat.completions.create(model="tiny", messages=history)  # type: ignore[arg-type]
        client.chat.completions.create(model="tiny", messages=[*HI, message, *HI])  # type: ignore[list-item]


def test_continuing_the_last_message(live: Live) -> None:
    messages = [*HI, {"role": "assistant", "content": "so far"}]
    with live.http() as http:
        http.post("/v1/chat/completions", json={"messages": messages, "continue_final_message": True})
    seen = live.async_engine.tokenizer.rendered[-1]
    assert (seen["add_generation_prompt"], seen["continue_final_message"]) == (False, True)


def test_no_chat_template(live: Live) -> None:
    live.async_engine.tokenizer.has_chat_template = False
    with live.openai() as client, pytest.raises(openai.BadRequestError, match="chat template"):
        client.chat.completions.create(model="tiny", messages=HI)


async def test_the_async_client(live: Live) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="none", http_client=httpx.AsyncClient(trust_env=False)
    ) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HI)
        assert answer.choices[0].message.content == "answer 0"
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(text) == "answer 0"
        async with client.chat.completions.stream(model="tiny", messages=HI) as events:
            final = await events.get_final_completion()
        assert final.choices[0].message.content == "answer 0" and final.choices[0].finish_reason == "stop"


def test_context_length_in_the_words_that_clients_look_for(live: Live) -> None:
    with live.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 5000}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages" and "maximum context length" in caught.value.message
