"""Mixed requests over HTTP whose answers are the same on any replica: free, sampled, structured, tools, adapters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from benchmarks.serve.schemas import SCHEMAS, is_valid
from rootgraft.api.cli.remote_server import RemoteError, RemoteServer

QUESTIONS = (
    "Tell me about the sea.", "Write a story of a fox and a hen.", "What is a matrix?", "Describe a person.",
    "Why do leaves fall in autumn?", "Name a colour and say why you like it.", "How does one bake bread?",
)  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "order",
        "description": "Order a part.",
        "parameters": {
            "type": "object",
            "properties": {"part": {"type": "string", "maxLength": 20}, "count": {"type": "integer", "minimum": 1}},
            "required": ["part", "count"],
            "additionalProperties": False,
        },
    },
}
ADAPTERS = ("pirate", "contact-card", "shell", "second-pirate")
"""Those of ``examples/adapters``, and one of them under another name: it has a slot of its own."""
KINDS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 5, "presence_penalty": 0.7, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "seed": 9, "top_p": 0.9, "n": 2},
    {"temperature": 0.7, "seed": 2, "stop": [".", "\n\n"]},
    {"temperature": 1, "seed": 3, "schema": 0},
    {"temperature": 0, "schema": 1},
    {"temperature": 0.9, "seed": 4, "adapter": 0},
    {"temperature": 0, "adapter": 1},
    {"temperature": 0.6, "seed": 7, "tools": [TOOL], "tool_choice": "required"},
)


@dataclass
class Answer:
    """The answer to a request: for each choice its text, calls, logprobs, token ids and reason; tokens in all.

    Attributes:
        arrivals: when each event came, in seconds of the monotonic clock.
        error: why there is no whole answer.
    """

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    tokens: tuple[int, int] = (0, 0)
    arrivals: list[float] = field(default_factory=list)
    error: str = ""

    def facts(self) -> Any:
        """Return what must be the same on any replica."""
        return self.choices, self.tokens

    def pauses(self) -> list[float]:
        """Return the seconds between its events."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


def request(number: int, max_tokens: int) -> dict[str, Any]:
    """Return the body of a request; the same number gives the same one."""
    kind = dict(KINDS[number % len(KINDS)])
    body: dict[str, Any] = {"max_tokens": max_tokens}
    question = QUESTIONS[number % len(QUESTIONS)]
    if (schema := kind.pop("schema", None)) is not None:
        schema = SCHEMAS[(schema + number) % len(SCHEMAS)]
        form = {"name": "answer", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
        body["max_tokens"] = 200
    if (adapter := kind.pop("adapter", None)) is not None:
        body["model"] = ADAPTERS[(adapter + number) % len(ADAPTERS)]
    if "tools" in kind:
        body["max_tokens"] = 100
        # The 17 to 30 tokens up to the name of the function, and those after the arguments, show nothing to a client,
        # which would count as a pause of the server: with the tokens' ids there is an event for each of them.
        body["return_token_ids"] = True
    return {**body, **kind, "messages": [{"role": "user", "content": f"{question} ({number})"}]}


def schema_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema that the answer has to follow; None for free text and calls."""
    form = body.get("response_format")
    return None if form is None else form["json_schema"]["schema"]


async def ask(server: RemoteServer, body: Mapping[str, Any]) -> Answer:
    """Send a request and read its stream to the end."""
    answer = Answer()
    try:
        async for event in server.stream("chat/completions", body):
            answer.arrivals.append(time.monotonic())
            for choice in event.get("choices") or ():
                empty: dict[str, Any] = {"text": "", "calls": {}, "logprobs": [], "ids": []}
                _add(answer.choices.setdefault(choice["index"], empty), choice)
            if usage := event.get("usage"):
                answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    except RemoteError as error:
        answer.error = str(error)
    return answer


def _add(said: dict[str, Any], choice: Mapping[str, Any]) -> None:
    delta = choice.get("delta") or {}
    said["text"] += delta.get("content") or ""
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        text = (function.get("name") or "") + (function.get("arguments") or "")
        said["calls"][call["index"]] = said["calls"].get(call["index"], "") + text
    said["logprobs"] += (choice.get("logprobs") or {}).get("content") or ()
    said["ids"] += choice.get("token_ids") or ()
    said["reason"] = choice.get("finish_reason") or said.get("reason")


def is_whole(body: Mapping[str, Any], answer: Answer) -> bool:
    """Return whether a structured answer follows its schema; other answers are not looked at."""
    schema = schema_of(body)
    if schema is not None:
        return all(is_valid(each["text"], schema) for each in answer.choices.values())
    if "tools" in body:
        calls = [call.removeprefix("order") for each in answer.choices.values() for call in each["calls"].values()]
        return bool(calls) and all(is_valid(call, TOOL["function"]["parameters"]) for call in calls)  # type: ignore[index]
    return True


def first_difference(one: Any, other: Any) -> str:
    """Return two answers as JSON, from a little before they differ on."""
    first, second = (orjson.dumps(each, option=orjson.OPT_NON_STR_KEYS).decode() for each in (one, other))
    at = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return f"...{first[max(0, at - 60) : at + 60]}... then ...{second[max(0, at - 60) : at + 60]}..."
