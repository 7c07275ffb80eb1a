"""How tests ask for responses, and what they find behind the server."""

from __future__ import annotations

import json
from typing import Any

from support.api.api_live import Live
from support.api.tool_asks import PING, WEATHER

PATH = "/v1/responses"
ASKED: Any = {"model": "tiny", "input": "hi"}
TOOLS: Any = [{"type": "function", **one["function"]} for one in (WEATHER, PING)]


def say(live: Live, text: str) -> None:
    live.async_engine.say = lambda request, index: text


def prompt(live: Live) -> str:
    return bytes(live.async_engine.seen[-1].tokens.tolist()).decode()


def rendered(live: Live) -> list[dict[str, Any]]:
    """The messages of the last conversation."""
    return list(live.async_engine.tokenizer.rendered[-1]["messages"])


def flat(choice: Any) -> Any:
    """A chat's choice of tools as responses have it."""
    if isinstance(choice, str):
        return choice
    if choice["type"] == "function":
        return {"type": "function", **choice["function"]}
    allowed = choice["allowed_tools"]
    return {"type": "allowed_tools", "mode": allowed["mode"], "tools": [flat(one) for one in allowed["tools"]]}


def parse_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a stream; ids, which stored ones have, are their sequence numbers."""
    found = []
    for event in text.split("\n\n")[:-1]:
        name, *numbers, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert numbers in ([], [f"id: {found[-1][1]['sequence_number']}"])
    return found


def events_of(live: Live, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    with live.http() as http:
        reply = http.post(PATH, json={**ASKED, "stream": True, **fields})
    assert reply.status_code == 200 and reply.text.endswith("\n\n"), reply.text
    found = parse_events(reply.text)
    assert [data["type"] for _, data in found] == [name for name, _ in found]
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    return found
