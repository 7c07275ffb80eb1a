"""What becomes of a batch's account: a file of answers, a file of errors, and the tokens that were used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from .batch_lines import read_requests

_WORDS = {
    "cancelled": ("batch_cancelled", "This batch was cancelled before the request was answered."),
    "expired": ("batch_expired", "This batch's time was up before the request was answered."),
}


def answers(account: Path, *, failed: bool) -> Iterator[bytes]:
    """The lines of an account that are successes, or those that are not."""
    with account.open("rb") as file:
        for line in file:
            if (orjson.loads(line)["response"]["status_code"] != 200) == failed:
                yield line


def unanswered(source: Path, account: Path, outcome: str) -> Iterator[bytes]:
    """A line of error for each request that has no answer, of a batch that ends before its end."""
    with account.open("rb") as file:
        done = {orjson.loads(line)["custom_id"] for line in file}
    code, message = _WORDS[outcome]
    for request in read_requests(source):
        if request.custom_id not in done:
            fields = {"id": f"batch_req_{uuid4().hex}", "custom_id": request.custom_id, "response": None}
            yield orjson.dumps({**fields, "error": {"code": code, "message": message}}) + b"\n"


def used(account: Path) -> dict[str, int]:
    """The tokens of all answers: of prompts, those of them that were cached, and generated ones."""
    counts = {"input": 0, "cached": 0, "output": 0}
    for line in answers(account, failed=False):
        usage: dict[str, Any] = orjson.loads(line)["response"]["body"].get("usage") or {}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        counts["input"] += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        counts["cached"] += details.get("cached_tokens", 0)
        counts["output"] += usage.get("completion_tokens", usage.get("output_tokens", 0))
    return counts
