"""``rootgraft.v1.Generation``: generation with typed messages, through the HTTP routes of chats and completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import grpc
import orjson

from ..exact_json import loads_exact
from ..large_bodies import beside_loop
from .app_calls import AppCalls, CallError, finite
from .messages import message

NAME = "rootgraft.v1.Generation"
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_FORMS = {"regex": "guided_regex", "grammar": "guided_grammar"}
_TEXTS = {"model": "model", "priority": "priority", "cache_key": "prompt_cache_key"}


def _refused(text: str) -> CallError:
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, text)


class GenerationService:
    """The methods of the service. Their arguments are parsed messages.

    Args:
        calls: sends calls to the server's routes.
    """

    def __init__(self, calls: AppCalls) -> None:
        self._calls = calls

    async def unary(self, request: Any, context: Any) -> Any:
        """Return a whole answer. Raises CallError."""
        path, body = await beside_loop(partial(as_body, request))
        answer = await self._calls.json(context, "POST", path, body)
        (choice,) = answer["choices"]
        return message("rootgraft.v1.GenerateResponse")(
            id=answer["id"], model=answer["model"], **_fields(choice, choice.get("message")), usage=_usage(answer)
        )

    async def stream(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """Yield the pieces of an answer. Raises CallError."""
        path, body = await beside_loop(partial(as_body, request))
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        kind = message("rootgraft.v1.GenerateChunk")
        held = None  # The last piece. It is held back until the usage arrives.
        async for event in self._calls.events(context, path, body):
            if event.get("usage") and held is not None:
                held.usage.CopyFrom(_usage(event))
            for choice in event["choices"]:
                piece = kind(id=event["id"], model=event["model"], **_fields(choice, choice.get("delta")))
                if choice.get("finish_reason"):
                    held = piece
                elif piece.text or piece.reasoning or piece.token_ids or piece.tool_calls_json:
                    yield piece
        if held is not None:
            yield held


def as_body(request: Any) -> tuple[str, dict[str, Any]]:
    """Return the route and the body for a request. Raises CallError for errors that the route could not detect."""
    body: dict[str, Any] = {"return_token_ids": True}
    form, given = request.WhichOneof("form"), request.WhichOneof("input")
    if given is None:
        raise _refused("One of 'prompt', 'tokens' and 'chat' is required.")
    body |= {field: value for name, field in _TEXTS.items() if (value := getattr(request, name))}
    for field, value in request.sampling.ListFields():
        body[field.name] = list(value) if field.name == "stop" else finite(field.name, value)
    if given == "chat":
        body["messages"] = [{"role": each.role, "content": each.content} for each in request.chat.messages]
    else:
        body["prompt"] = request.prompt if given == "prompt" else list(request.tokens.ids)
    if form == "json_schema":
        body["guided_json"] = request.json_schema
    elif form == "json_object":
        if not request.json_object:
            raise _refused("'json_object' must be true; remove it for free text.")
        body["response_format"] = {"type": "json_object"}
    elif form == "choices":
        body["guided_choice"] = list(request.choices.texts)
    elif form is not None:
        body[_FORMS[form]] = getattr(request, form)
    return (_CHAT if given == "chat" else _COMPLETIONS), body | _extra(request.extra_json, body)


def _extra(text: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        extra = loads_exact(text.encode() or b"{}")
    except orjson.JSONDecodeError:
        extra = None
    if not isinstance(extra, dict):
        raise _refused("'extra_json' must be a JSON object.")
    for name in ("stream", "stream_options", "n", *body):
        if name in extra:
            raise _refused(f"'extra_json' must not contain '{name}': use the field of the message.")
    return extra


def _fields(choice: dict[str, Any], part: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields of an answer or of a piece. ``part`` is the message or delta of a chat."""
    part = {} if part is None else part
    calls = part.get("tool_calls")
    return {
        "text": (part.get("content") if part else choice.get("text")) or "",
        "reasoning": part.get("reasoning") or "",
        "token_ids": choice.get("token_ids") or (),
        "tool_calls_json": orjson.dumps(calls).decode() if calls else "",
        "finish_reason": choice.get("finish_reason") or "",
    }


def _usage(answer: dict[str, Any]) -> Any:
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return message("rootgraft.v1.Usage")(
        prompt_tokens=usage["prompt_tokens"], cached_tokens=cached, completion_tokens=usage["completion_tokens"]
    )
