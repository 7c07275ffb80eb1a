"""What clients send at their defaults, as it was seen on the wire (texts shortened): all of it is taken.

Goose's was written as its source makes it (block/goose, crates/goose/src/providers/formats/openai.rs).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.api.api_live import Live

FOLDER = Path(__file__).parent / "clients"
BODIES = [
    pytest.param(entry["path"], entry["body"], id=f"{path.stem}-{number}")
    for path in sorted(FOLDER.glob("*.json"))
    for number, entry in enumerate(json.loads(path.read_text()))
]


def forced(body: dict[str, Any]) -> bool:
    """Whether the answer must have a form."""
    form = body.get("response_format") or body.get("text", {}).get("format") or {"type": "text"}
    return form["type"] != "text" or body.get("tool_choice", "auto") not in ("auto", "none")


def example(schema: dict[str, Any]) -> Any:
    """An instance of the simple schemas that clients send."""
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return example(schema["anyOf"][0])
    kind = schema.get("type", "object")
    if kind == "array":
        return [example(schema["items"])] if schema.get("minItems") else []
    values = {"string": "Ann", "integer": 30}
    if kind != "object":
        return values[kind]
    return {name: example(schema["properties"][name]) for name in schema.get("required", ())}


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_it_is_taken(live: Live, path: str, body: dict[str, Any]) -> None:
    live.async_engine.say = lambda request, index: (
        json.dumps(example(request.grammar.value() if request.grammar.kind == "json_schema" else {}))
        if request.grammar is not None and request.grammar.kind.startswith("json")
        else "An answer."
    )
    with live.http() as http:
        reply = http.post(path, json=body)
    assert reply.status_code == 200 and '"error":{' not in reply.text, reply.text
    if path != "/tokenize":
        assert (live.async_engine.seen[0].grammar is not None) == (forced(body) or bool(body.get("tools")))
    if body.get("stream"):
        events = reply.text.split("\n\n")
        ends = ("[DONE]", "response.completed", "message_stop")
        assert events[-1] == "" and any(end in events[-2] for end in ends), events[-2]
    elif path == "/v1/responses":
        assert reply.json()["status"] == "completed", reply.text
    elif path == "/v1/chat/completions":
        assert reply.json()["choices"][0]["finish_reason"] in ("stop", "tool_calls")


def test_every_client_is_there() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {
        *("ai_sdk", "dspy", "guidance", "instructor", "langchain_openai", "litellm", "llm", "lm_eval", "openai"),
        *("codex", "claude_code", "qwen_code", "opencode", "goose"),
        *("openai_agents", "pydantic_ai", "open_webui", "cline", "continue", "openrouter"),
    }
