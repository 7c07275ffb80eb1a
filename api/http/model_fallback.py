"""Model fallback: ASGI middleware that lets another model answer, by a rule of the models file or after a failure::

    request --> asked model --5xx before the first byte--> its fallbacks, in order --all failed--> the first error
            --> a rule's model, if one fits

A header of the response names the other model. Two kinds of requests are passed through unchanged: a request that
insists on its model, and a request whose content (such as token ids) is valid for one vocabulary only.
"""

from __future__ import annotations

import asyncio
import codecs
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import orjson
from fastapi import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...engine.types import Priority
from ..access.caller import Caller, GenerationFacts
from ..error_responses import MESSAGES_PATH, error_response
from ..errors import HTTPError, reply_to
from ..exact_json import dumps_exact, loads_exact
from ..fallback_plan import Provider
from ..generate.model_router import ModelRouter
from ..generate.server_state import ServerState
from ..generate.streams import ClientGone, ledger_model, while_connected
from ..observe.usage_ledger import UsageRecord
from .guard import header
from .provider_client import PROVIDER_PATHS, ProviderAnswer, ProviderClient, ProviderFailed

ROUTED_HEADER = "x-routed-model"
STRICT_HEADER = b"x-model"
PATHS = frozenset((*PROVIDER_PATHS, "/v1/responses", MESSAGES_PATH))

_FAILED = frozenset((500, 502, 503, 529))
_TEXTS = ("prompt", "suffix", "messages", "input", "instructions", "system", "tools")
_OF_ONE_VOCABULARY = frozenset(
    (
        *("adapters", "lora_path", "lora_request", "logit_bias", "stop_token_ids", "allowed_token_ids"),
        *("logprob_token_ids", "return_token_ids"),
    )
)
# Before a provider reports the number of a prompt's tokens, a key's limits reserve one token for this many characters.
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that other models may answer.

    Attributes:
        state: state of the model that the request names.
        name: name of that model.
    """

    state: ServerState
    name: str
    data: bytes
    body: Mapping[str, Any]
    num_chars: int


class ModelFallback:
    """Middleware inside of the guard.

    Requests for models with a fallback plan follow the plan; all others pass through.

    Args:
        router: router of the server's models.
    """

    def __init__(self, app: ASGIApp, *, router: ModelRouter) -> None:
        self._app = app
        self._router = router
        self._providers = ProviderClient()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._may_be_routed(scope):
            await self._app(scope, receive, send)
            return
        try:
            if (value := header(scope, STRICT_HEADER)) not in (None, b"strict"):
                raise HTTPError(400, "The header x-model must be 'strict' or absent.", code="invalid_header")
            data = await _read(receive)
        except HTTPError as error:
            await error_response(reply_to(error), scope)(scope, receive, send)
            return
        asked = None if value is not None or data is None else self._asked(data)
        if asked is None:
            await self._app(scope, _Replay(data or b"", receive), send)
            return
        try:
            await self._answer(asked, scope, receive, send)
        except HTTPError as error:
            await error_response(reply_to(error), scope)(scope, receive, send)

    def _may_be_routed(self, scope: Scope) -> bool:
        is_asked = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS
        return is_asked and any(state.plan for state in self._router.states)

    def _asked(self, data: bytes) -> _Asked | None:
        """Parse a body. Returns None if only the model itself can answer or refuse the request."""
        try:
            body = loads_exact(data.removeprefix(codecs.BOM_UTF8))
        except orjson.JSONDecodeError:
            return None
        if not isinstance(body, dict) or any(body.get(name) for name in _OF_ONE_VOCABULARY):
            return None
        name = body.get("model", "") or ""
        state = self._router.of(name) if isinstance(name, str) else None
        prompt = body.get("prompt")
        has_ids = isinstance(prompt, list) and not all(isinstance(each, str) for each in prompt)
        if state is None or not state.plan or has_ids or (name and name not in state.models.names):
            return None
        return _Asked(state, name or state.models.names[0], data, body, _num_chars(body))

    async def _answer(self, asked: _Asked, scope: Scope, receive: Receive, send: Send) -> None:
        plan = asked.state.plan
        priority = _priority(asked.body, scope["state"]["caller"])
        rule = next((route.to for route in plan.routes if route.fits(asked.num_chars, priority)), None)
        if rule is not None and await self._tried(rule, "rule", asked, scope, receive, send):
            return
        first = _Held(send, {})
        await first.run(self._app, scope, _Replay(asked.data, receive))
        facts = scope["state"]["facts"]
        if not first.is_failed or facts.error == "shutting_down":
            await first.release()
            return
        code, reason = facts.error, "overload" if facts.error == "server_overloaded" else "failure"
        for name in plan.fallbacks:
            if name != rule and await self._tried(name, reason, asked, scope, receive, send):
                return
        facts.error = code
        await first.release()

    async def _tried(self, name: str, reason: str, asked: _Asked, scope: Scope, receive: Receive, send: Send) -> bool:
        """Let another model answer. Returns False if it cannot answer and nothing was sent."""
        facts = scope["state"]["facts"]
        facts.error = None
        caller = replace(scope["state"]["caller"], asked_model=asked.name)
        scope = {**scope, "state": {**scope["state"], "caller": caller}}
        headers = {ROUTED_HEADER: f"{name}; reason={reason}"}
        provider = asked.state.plan.providers.get(name)
        if provider is not None:
            is_answered = await self._provided(provider, asked, scope, receive, send, headers)
        elif self._router.owner(name) is None:
            # The model was removed, so another one is tried.
            is_answered = False
        else:
            held = _Held(send, headers, fails_from=400)
            data = dumps_exact({**asked.body, "model": name})
            await held.run(self._app, _with_length(scope, len(data)), _Replay(data, receive))
            is_answered = not held.is_failed
        if is_answered:
            asked.state.observers.metrics.count_fallback(reason, name)
        return is_answered

    async def _provided(
        self, provider: Provider, asked: _Asked, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str]
    ) -> bool:
        path, caller = scope["path"], cast(Caller, scope["state"]["caller"])
        if not asked.body.keys() <= PROVIDER_PATHS.get(path, frozenset()) or not caller.may_use(provider.name):
            return False
        limits = asked.state.limits.admission.limits
        most = next((asked.body[each] for each in _MOST_TOKENS if type(asked.body.get(each)) is int), 0)
        reservation = limits.reserve(caller.key, asked.num_chars // _CHARS_PER_TOKEN + max(0, most))
        used = 0

        async def count(usage: Mapping[str, int]) -> None:
            nonlocal used
            used = usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)
            await _record(asked, provider, caller, usage)

        out = ProviderAnswer(send, headers, count)
        try:
            async with asyncio.timeout(caller.timeout):
                await while_connected(receive, self._providers.answer(provider, path, asked.body, out))
        except (ProviderFailed, TimeoutError):
            if not out.has_begun:
                return False
            await out.break_off(provider.name)
        except ClientGone:
            if not out.has_begun:
                await Response(status_code=499)(scope, receive, send)
        finally:
            await out.close()
            limits.settle(reservation, used)
        return True


_MOST_TOKENS = ("max_completion_tokens", "max_tokens")


async def _record(asked: _Asked, provider: Provider, caller: Caller, usage: Mapping[str, int]) -> None:
    """Record a provider's answer in the log and the usage ledger."""
    facts = caller.facts
    facts.model, facts.stream = caller.told_model(provider.name), bool(asked.body.get("stream"))
    facts.prompt_tokens = usage.get("prompt_tokens")
    facts.generation = GenerationFacts(completion_tokens=usage.get("completion_tokens"))
    if (recorder := asked.state.stores.recorder) is None:
        return
    counts = (usage.get(name, 0) for name in ("prompt_tokens", "cached_tokens", "completion_tokens"))
    record = UsageRecord(uuid.uuid4().hex, time.time(), caller.key.name, ledger_model(asked.state, caller), *counts)
    await recorder.until_written(recorder.put(record))


class _Held:
    """ASGI ``send`` that holds back a response which reports that a model cannot answer.

    Args:
        headers: headers to add to a response that is not held back.
        fails_from: lowest status that counts as a failure; 0 if only the statuses of a failed server count.
    """

    def __init__(self, send: Send, headers: Mapping[str, str], fails_from: int = 0) -> None:
        self._send = send
        self._headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        self._fails_from = fails_from
        self._kept: list[Message] = []
        self._begun = False
        self._error: Exception | None = None

    @property
    def is_failed(self) -> bool:
        return self._error is not None or bool(self._kept)

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        """Run an application. An exception before its response counts as a failure."""
        try:
            await app(scope, receive, self._take)
        except Exception as error:
            if self._begun:
                raise
            self._error = error

    async def release(self) -> None:
        """Send the response that was held back, or raise the exception."""
        if self._error is not None and not self._kept:
            raise self._error
        for message in self._kept:
            await self._send(message)

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            status = message["status"]
            if status in _FAILED or (self._fails_from and status >= self._fails_from and status != 499):
                self._kept.append(message)
                return
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        elif self._kept:
            self._kept.append(message)
            return
        self._begun = True
        await self._send(message)


class _Replay:
    """ASGI ``receive`` that returns a body that was read already, and then the messages after it."""

    def __init__(self, data: bytes, receive: Receive) -> None:
        self._data: bytes | None = data
        self._receive = receive

    async def __call__(self) -> Message:
        if self._data is None:
            return await self._receive()
        data, self._data = self._data, None
        return {"type": "http.request", "body": data, "more_body": False}


async def _read(receive: Receive) -> bytes | None:
    """Return a request's body; None if its client has left."""
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        data += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(data)


def _with_length(scope: Scope, length: int) -> Scope:
    others = [each for each in scope["headers"] if each[0] != b"content-length"]
    return {**scope, "headers": [*others, (b"content-length", b"%d" % length)]}


def _priority(body: Mapping[str, Any], caller: Caller) -> Priority:
    name = body.get("priority")
    known = isinstance(name, str) and name.upper() in Priority.__members__
    return Priority[cast(str, name).upper()] if known else caller.key.priority


def _num_chars(body: Mapping[str, Any]) -> int:
    """Return the number of characters of all texts in a prompt."""
    return sum(len(text) for name in _TEXTS for text in _texts(body.get(name)))


def _texts(value: Any) -> Iterator[str]:
    waiting: list[Any] = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, Sequence):
            waiting += each
