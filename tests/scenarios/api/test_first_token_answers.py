"""Answers that are read from their first token: decisions and rankings in words begin where an answer does."""

from __future__ import annotations

from typing import Any

import pytest
from support.api.api_live import Live

from rootgraft.engine.types import Pooler

ASKED: dict[str, Any] = {
    "/v1/decisions": {"input": "hi", "questions": [{"type": "predicate", "instructions": "Is it so?"}]},
    "/v1/systemone": {"state": "hi", "questions": {"a": {"type": "noul", "instructions": "Is it so?"}}},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
}


@pytest.mark.parametrize("path", ASKED)
def test_a_prompt_within_a_thought_is_refused(live: Live, path: str) -> None:
    live.async_engine.pooler = Pooler()
    live.async_engine.tokenizer.thinks = "deepseek_r1"
    with live.http() as http:
        reply = http.post(path, json={"model": "tiny", **ASKED[path]})
    assert reply.status_code == 400 and not live.async_engine.seen, reply.text
    assert "begins every answer with a thought" in reply.text


@pytest.mark.parametrize("path", ASKED)
def test_the_mark_before_an_answer_is_added(live: Live, path: str) -> None:
    live.async_engine.pooler = Pooler()
    tokenizer = live.async_engine.tokenizer
    plain = tokenizer.render_chat

    def render(messages: Any, **options: Any) -> str:
        text: str = plain(messages, **options)
        told = messages[-1]["role"] == "assistant"
        return text.replace("<assistant>", "<assistant><say>") if told else text

    tokenizer.render_chat = render
    with live.http() as http:
        http.post(path, json={"model": "tiny", **ASKED[path]})
    prompts = [bytes(token for token in request.tokens if token < 256).decode() for request in live.async_engine.seen]
    assert prompts and all(prompt.partition("<assistant>")[2].startswith("<say>") for prompt in prompts)
