"""Limits of the routes that read labels, embeddings and classes, on both sides."""

from __future__ import annotations

from typing import Any

import pytest
from support.api.api_live import Live

YES = {"type": "predicate", "instructions": "x"}


def choice(count: int) -> dict[str, Any]:
    return {"type": "choice", "instructions": "x", "choices": [{"value": str(number)} for number in range(count)]}


def scale(count: int) -> dict[str, Any]:
    return {"type": "score", "instructions": "x", "levels": [{"label": str(number)} for number in range(count)]}


def nested(levels: int) -> dict[str, Any]:
    return {"a": nested(levels - 1)} if levels else {}


def given(data: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_json", "data": data}]}]


def noul(count: int) -> dict[str, Any]:
    return {str(number): {"type": "noul", "instructions": "x"} for number in range(count)}


DECISION = {"input": "ab", "questions": [YES]}
SCORE = {"query": "ab", "items": ["c"], "label_token_ids": [97]}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "questions": ("/v1/decisions", {**DECISION, "questions": [YES] * 400}, {"questions": [YES] * 401}, "questions"),
    "choices": (
        "/v1/decisions",
        {**DECISION, "questions": [choice(255)]},
        {"questions": [choice(256)]},
        "questions[0].choices",
    ),
    "levels": (
        "/v1/decisions",
        {**DECISION, "questions": [scale(100)]},
        {"questions": [scale(101)]},
        "questions[0].levels",
    ),
    "depth": (
        "/v1/decisions",
        {**DECISION, "input": given(nested(31))},
        {"input": given(nested(33))},
        "input[0].content[0].data",
    ),
    "cache key": (
        "/v1/decisions",
        {**DECISION, "prompt_cache_key": "k" * 256},
        {"prompt_cache_key": "k" * 257},
        "prompt_cache_key",
    ),
    "named questions": (
        "/v1/systemone",
        {"state": "ab", "questions": noul(400)},
        {"questions": noul(401)},
        "questions",
    ),
    "items": ("/v1/score", {**SCORE, "items": ["c"] * 1000}, {"items": ["c"] * 1001}, "items"),
    "labels": (
        "/v1/score",
        {**SCORE, "label_token_ids": [97, 98] * 2048},
        {"label_token_ids": [97] * 4097},
        "label_token_ids",
    ),
    "label tokens": (
        "/v1/score",
        {"query": "ab", "items": ["c"] * 64, "label_token_ids": [97, 98] * 2048},
        {"items": ["c"] * 65},
        "label_token_ids",
    ),
    "texts": ("/v1/embeddings", {"input": ["ab"] * 2048}, {"input": ["ab"] * 2049}, "input"),
    "dimensions": ("/v1/embeddings", {"input": "ab", "dimensions": 4}, {"dimensions": 5}, "dimensions"),
    "classified texts": ("/v1/classify", {"input": ["ab"] * 2048}, {"input": ["ab"] * 2049}, "input"),
    # Beside the token that begins a text and the one that the engine draws.
    "length": ("/v1/embeddings", {"input": "a" * 2046}, {"input": "a" * 2047}, "input"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_limit_holds_on_both_sides(live: Live, name: str) -> None:
    path, within, beyond, param = CASES[name]
    with live.http() as http:
        taken = http.post(path, json=within)
        assert taken.status_code == 200, taken.text[:300]
        refused = http.post(path, json={**within, **beyond})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text[:300]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_the_number_of_ranked_documents_on_both_sides_of_its_limit(live: Live, path: str) -> None:
    """More than there are is a bound like any other: all come."""
    with live.http() as http:
        for count, found in ((1, 1), (2, 2), (3, 2), (2**62, 2)):
            reply = http.post(path, json={"query": "ab", "documents": ["c", "d"], "top_n": count})
            assert reply.status_code == 200 and len(reply.json()["results"]) == found, reply.text
        for wrong in (0, -1, 1.5, "1"):
            reply = http.post(path, json={"query": "ab", "documents": ["c", "d"], "top_n": wrong})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "top_n"), reply.text
