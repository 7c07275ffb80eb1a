"""Token ids back, logprobs of named tokens, and allowed tokens, on chats and completions, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api.api_live import Live
from support.api.reply_checks import check_error

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 40},
}


def chunks_of(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with live.http() as http:
        lines = http.post(path, json={**body, "stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streamed_ids_are_those_of_the_whole_answer(live: Live, path: str) -> None:
    """Also of a character of several tokens, whose text is held back."""
    live.async_engine.say = lambda request, index: f"né {index}"
    body = {**GOOD[path], "n": 2, "return_token_ids": True}
    with live.http() as http:
        whole = http.post(path, json=body).json()
        without = http.post(path, json={**body, "return_token_ids": False}).json()
    assert "token_ids" not in json.dumps(without)
    wanted = [list(f"né {index}".encode()) for index in range(2)]
    assert [choice["token_ids"] for choice in whole["choices"]] == wanted
    prompt = list(live.async_engine.seen[0].tokens)
    holders = [whole] if path == CHAT else whole["choices"]
    assert [each["prompt_token_ids"] for each in holders] == [prompt] * len(holders)
    chunks = chunks_of(live, path, body)
    got: list[list[int]] = [[], []]
    prompts = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            got[choice["index"]] += choice.get("token_ids") or []
            if (choice if path == COMPLETIONS else chunk).get("prompt_token_ids") is not None:
                prompts.append((choice if path == COMPLETIONS else chunk)["prompt_token_ids"])
    assert got == wanted
    assert prompts == [prompt] * len(holders)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_named_tokens_stand_in_the_place_of_the_likeliest(live: Live, path: str) -> None:
    logprobs: Any = True if path == CHAT else 0
    body = {**GOOD[path], "logprobs": logprobs, "logprob_token_ids": [120, 121, 122]}
    with live.http() as http:
        found = http.post(path, json=body).json()["choices"][0]["logprobs"]
    [request] = live.async_engine.seen
    assert request.params.logprob_token_ids == (120, 121, 122)
    if path == CHAT:
        for token in found["content"]:
            assert [each["token"] for each in token["top_logprobs"]] == ["x", "y", "z"]
    else:
        assert all({"x", "y", "z"} <= top.keys() for top in found["top_logprobs"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_allowed_tokens_reach_the_engine(live: Live, path: str) -> None:
    with live.http() as http:
        assert http.post(path, json={**GOOD[path], "allowed_token_ids": [97, 98]}).status_code == 200
    assert live.async_engine.seen[0].params.allowed_token_ids == (97, 98)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_words_reach_the_engine_in_both_spellings(live: Live, path: str) -> None:
    with live.http() as http:
        assert http.post(path, json={**GOOD[path], "bad_words": ["ab", " c"]}).status_code == 200
        assert http.post(path, json={**GOOD[path], "bad_words": ["x" * 256] * 256}).status_code == 200
    assert live.async_engine.seen[0].params.bad_words == ((97, 98), (32, 97, 98), (99,), (32, 99))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_token_ids": [97]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [260]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [97] * 513}, "logprob_token_ids"),
        ({"bad_words": ["x"], "allowed_token_ids": [97]}, "bad_words"),
        ({"bad_words": ["x"], "structured_outputs": {"choice": ["a", "b"]}}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"bad_words": ["x", "y" * 257]}, "bad_words[1]"),
        ({"bad_words": [" "]}, "bad_words[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [260]}, "allowed_token_ids"),
        ({"allowed_token_ids": [97] * 4097}, "allowed_token_ids"),
        ({"allowed_token_ids": [97], "structured_outputs": {"choice": ["a", "b"]}}, "allowed_token_ids"),
    ],
)
def test_what_is_wrong_is_named(live: Live, path: str, fields: dict[str, Any], param: str) -> None:
    if path == COMPLETIONS and "logprobs" in fields:
        fields = {**fields, "logprobs": 1}
    with live.http() as http:
        check_error(http.post(path, json={**GOOD[path], **fields}), 400, param, "invalid_value")


def test_named_tokens_are_of_the_answer_and_not_of_an_echoed_prompt(live: Live) -> None:
    body = {**GOOD[COMPLETIONS], "echo": True, "logprobs": 1, "logprob_token_ids": [97]}
    with live.http() as http:
        check_error(http.post(COMPLETIONS, json=body), 400, "logprob_token_ids", "invalid_value")
