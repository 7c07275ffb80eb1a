"""An image in a request is an error 400 that names its field, through each door that takes messages."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from support.api.api_live import Live
from support.api.socket_asks import hear, socket_of, tell

_PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
_URL = f"data:image/png;base64,{_PNG}"
_TEXT = {"type": "text", "text": "What is this?"}
_CHAT_IMAGE = {"type": "image_url", "image_url": {"url": _URL}}
_ITEM_IMAGE = {"type": "input_image", "image_url": _URL}
_BLOCK_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PNG}}
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


_CHAT = {"model": "tiny", "messages": user(_TEXT, _CHAT_IMAGE)}
_RESPONSES = {"model": "tiny", "input": user({"type": "input_text", "text": "What is this?"}, _ITEM_IMAGE)}
# By door and place: path, body, field.
DOORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", _CHAT, "messages[0].content[1].type"),
    "chat, a result": (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [
                *user(_TEXT),
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "a", "content": [_CHAT_IMAGE]},
            ],
        },
        "messages[2].content[0].type",
    ),
    "responses": ("/v1/responses", _RESPONSES, "input[0].content[1].type"),
    "messages": (
        "/v1/messages",
        {"model": "tiny", "max_tokens": 4, "messages": user(_TEXT, _BLOCK_IMAGE)},
        "messages[0].content[1].type",
    ),
    "messages, a result": (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 4,
            "messages": [
                *user(_TEXT),
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                *user({"type": "tool_result", "tool_use_id": "a", "content": [_BLOCK_IMAGE]}),
            ],
        },
        "messages[2].content[0].content[0].type",
    ),
    "Ollama's chat": (
        "/api/chat",
        {"model": "tiny", "messages": [{"role": "user", "content": "What is this?", "images": [_PNG]}]},
        "messages[0].images",
    ),
    "Ollama's generate": ("/api/generate", {"model": "tiny", "prompt": "What is this?", "images": [_PNG]}, "images"),
    "decisions": (
        "/v1/decisions",
        {
            "model": "tiny",
            "input": _RESPONSES["input"],
            "decisions": [{"id": "a", "type": "boolean", "description": "Is it a cat?"}],
        },
        "input[0].content[1].type",
    ),
    "tokenize": ("/tokenize", _CHAT, "messages[0].content[1].type"),
}


@pytest.mark.parametrize("door", DOORS)
def test_an_image_is_refused_by_its_field(live: Live, door: str) -> None:
    path, body, field = DOORS[door]
    with live.http() as http:
        reply = http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    told = reply.json()
    error = told["error"] if isinstance(told["error"], dict) else {"message": told["error"], **told}
    assert error.get("param", field) == field and field in error["message"], told
    assert "image" in error["message"], told


@pytest.mark.parametrize(
    ("path", "message", "field"),
    [
        ("/v1/responses", {"type": "response.create", **_RESPONSES}, "input[0].content[1].type"),
        ("/v1/stream", {"type": "generate", "id": "a", **_CHAT}, "messages[0].content[1].type"),
    ],
)
def test_an_image_over_a_web_socket_is_refused_by_its_field(
    live: Live, path: str, message: dict[str, Any], field: str
) -> None:
    with socket_of(live, path) as socket:
        tell(socket, message)
        found = hear(socket)
    assert (found["type"], found["status"], found["error"]["param"]) == ("error", 400, field), found
