"""Dependencies: parts that all routes share, such as strict JSON bodies, the server's state and the caller."""

from __future__ import annotations

import codecs
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints

from fastapi import Depends, Request, Response, params
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from ...engine.errors import RequestError
from ...engine.serving.request import TextRequest
from ...engine.types import AdapterInfo
from ..access.caller import Caller
from ..errors import MOST_FAULTS, HTTPError, faults_of, lacks_memory
from ..exact_json import loads_exact
from ..generate.model_router import ModelRouter
from ..generate.remote_adapters import RemoteAdapters
from ..generate.server_state import ServerState
from ..large_bodies import LARGE_BODY, beside_loop, note_body
from ..protocol.base import StrictModel
from .unknown_fields import IGNORED_HEADER, LEFT_OUT_HEADER, IgnoredFields, drop_field, named

PICKED_STATE = "server"
"""Key in a request's state. If there are several models, its value is the server state of the requested model."""
_JSON = "application/json"
_UNDECLARED = ("", "application/x-www-form-urlencoded")
_LEFT_OUT_STATE = "left_out"
# Largest number of rounds in which unknown fields are dropped. Several are needed, because pydantic reports the unknown
# fields of a part only when the part is otherwise valid.
_MOST_ROUNDS = 8
# Largest number of errors that are collected if unknown fields are ignored. It exceeds the number for refused bodies,
# because the errors name the fields to drop. Bodies of at least ``_MOST_SMALL_IGNORING`` bytes, for which this takes a
# millisecond, are validated off the event loop.
_MOST_IGNORED = 1 << 15
_MOST_SMALL_IGNORING = 4 << 10

_Body = TypeVar("_Body")

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


async def _models(request: Request) -> ModelRouter:
    return cast(ModelRouter, request.app.state.models)


async def _state(request: Request) -> ServerState:
    """Return the state of the model named in the body; for a request without a body, in the query."""
    models: ModelRouter = request.app.state.models
    if models.is_single:
        return models.main
    picked = getattr(request.state, PICKED_STATE, None)
    return models.of(request.query_params.get("model")) if picked is None else cast(ServerState, picked)


async def _caller(request: Request) -> Caller:
    return cast(Caller, request.state.caller)


async def _itself(request: Request) -> Request:
    return request


Models = Annotated[ModelRouter, Depends(_models)]
State = Annotated[ServerState, Depends(_state)]
CallerOf = Annotated[Caller, Depends(_caller)]


def set_facts(caller: Caller, requests: Sequence[TextRequest], *, model: str, stream: bool, response_id: str) -> None:
    """Record the facts about a generation that the access log needs before the generation runs."""
    facts = caller.facts
    facts.model, facts.stream, facts.response_id = caller.told_model(model), stream, response_id
    facts.prompt_tokens, facts.n = sum(len(request.tokens) for request in requests), requests[0].n


def shown_path(info: AdapterInfo, remote: RemoteAdapters | None = None, *, to_all: bool = False) -> str:
    """Return where an adapter comes from, in a form that clients may see.

    The result is its pinned source, its path relative to ``--lora-dir``, or the last part of a path outside of it.

    Args:
        to_all: whether clients with any key see the result. Then buckets and hosts are left out.
    """
    origin = None if remote is None else remote.origin(info)
    if origin is not None:
        return origin.last_part if origin.scheme == "file" or (to_all and origin.scheme != "hf") else str(origin)
    path = PurePath(info.path)
    return path.name if path.is_absolute() or ".." in path.parts else info.path


class _StrictRequest(Request):
    """A request whose body is parsed strictly, and can be read again without its unknown fields.

    Attributes:
        is_ignoring: whether to drop unknown fields.
        ignored: the fields that were dropped from the body.
    """

    def __init__(self, scope: Scope, receive: Receive, *, is_ignoring: bool) -> None:
        super().__init__(scope, receive)
        self.is_ignoring = is_ignoring
        self.ignored = IgnoredFields()
        self._pruned: Any = None
        self._model: Any = None

    async def json(self) -> Any:
        """Parse the body, without NaN, infinities or lone surrogates. Of repeated keys the last one counts.

        Integers of any length are exact. A byte order mark before the body is skipped, as some programs write one into
        files (RFC 8259, 8.1).
        """
        if self._model is not None:
            return self._model
        if self._pruned is not None:
            return self._pruned
        body = (await self.body()).removeprefix(codecs.BOM_UTF8)
        note_body(len(body), _MOST_SMALL_IGNORING if self.is_ignoring else LARGE_BODY)
        return await beside_loop(partial(loads_exact, body))

    async def validate(self, validate: Callable[[Any], Any]) -> None:
        """Validate the body. ``json`` then returns it as a model, which the framework uses without further validation.

        The framework would validate on the event loop, and would list every error, of which there may be millions. A
        body that is not JSON is left to the framework, which reports it.

        Raises:
            RequestValidationError: the body is not valid.
        """
        if (value := await self.parsed()) is not None:
            self._model = await beside_loop(partial(_validated, validate, value))

    def declare_json(self) -> None:
        """Set the content type to JSON for the code that reads the request next."""
        others = [(name, value) for name, value in self.scope["headers"] if name != b"content-type"]
        self.scope["headers"] = [*others, (b"content-type", _JSON.encode())]
        self._headers = Headers(scope=self.scope)

    async def parsed(self) -> Any:
        """Return the result of ``json``; None if the body is not JSON. The route then refuses the request."""
        try:
            return await self.json()
        except ValueError:
            return None

    async def drop_unknown(self, errors: Sequence[Mapping[str, Any]]) -> bool:
        """Remove the fields that these errors call unknown from the body. Returns whether any field was removed."""
        unknown = [error["loc"][1:] for error in errors if error["type"] == "extra_forbidden"]
        # If the body is not JSON, the errors name no fields.
        if not unknown:
            return False
        self._pruned = pruned = await self.json()
        dropped = await beside_loop(lambda: [path for path in unknown if drop_field(pruned, path)])
        self.ignored.add(dropped)
        if dropped:
            self.state.caller.facts.ignored_fields = str(self.ignored)
        return bool(dropped)


class JsonRoute(APIRoute):
    """A route whose body must be declared as JSON. With ``--unknown-fields ignore``, it removes unknown fields."""

    def get_route_handler(self) -> Handler:
        """Return the direct handler, or else the framework's handler, which gets requests with the strict parser."""
        return self.direct_handler() or self._on_strict_request(super().get_route_handler(), self._body_validator())

    def direct_handler(self) -> Handler | None:
        """Return a handler that does not use the framework; None if the endpoint has parameters other than a body."""
        handle = _body_handler(self.endpoint)
        return None if handle is None else self._on_strict_request(handle)

    def _body_validator(self) -> Callable[[Any], Any] | None:
        """Return the body's validator for an endpoint that the framework calls; None for an endpoint without body."""
        if self.body_field is None:
            return None
        kind: TypeAdapter[Any] = TypeAdapter(get_type_hints(self.endpoint, include_extras=True)["body"])
        return partial(kind.validate_python, from_attributes=True)

    def _on_strict_request(self, handle: Handler, validate: Callable[[Any], Any] | None = None) -> Handler:
        async def handle_strictly(request: Request) -> Response:
            models: ModelRouter = request.app.state.models
            is_ignoring = models.main.options.unknown_fields == "ignore"
            strict = _StrictRequest(request.scope, request.receive, is_ignoring=is_ignoring)
            if self.body_field is not None and not await _is_json(strict):
                raise HTTPError(415, "The body must be JSON: send it with Content-Type: application/json.")
            if self.body_field is not None and not models.is_single:
                setattr(strict.state, PICKED_STATE, models.of_body(await strict.parsed()))
            rounds = 0
            if is_ignoring:
                rounds = _MOST_ROUNDS
                MOST_FAULTS.set(_MOST_IGNORED)
            while True:
                try:
                    if validate is not None:
                        await strict.validate(validate)
                    response = await handle(strict)
                except RequestValidationError as error:
                    if not rounds or not await strict.drop_unknown(error.errors()):
                        raise
                    rounds -= 1
                else:
                    break
            if strict.ignored:
                response.headers[IGNORED_HEADER] = str(strict.ignored)
            if left_out := getattr(strict.state, _LEFT_OUT_STATE, ()):
                response.headers[LEFT_OUT_HEADER] = named(left_out)
            return response

        return handle_strictly


async def _is_json(request: _StrictRequest) -> bool:
    """Return whether the body is declared as JSON, or is undeclared JSON from a client that is not a browser.

    curl declares the body of ``-d`` as a form. Any web page can make a browser send forms, plain text and bodies
    without a type, even to a server behind the user's firewall. But it cannot send bodies that are declared as JSON
    without the server's consent (CORS). Browsers are recognized by headers that a page cannot leave out.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == _JSON:
        return True
    if kind not in _UNDECLARED or _is_of_browser(request) or not isinstance(await request.parsed(), dict):
        return False
    request.declare_json()
    return True


def _is_of_browser(request: Request) -> bool:
    names = request.headers.keys()
    is_of_page = any(name in ("origin", "referer") or name.startswith("sec-") for name in names)
    return is_of_page or "mozilla/" in request.headers.get("user-agent", "").lower()


def _body_handler(endpoint: Callable[..., Coroutine[Any, Any, Response]]) -> Handler | None:
    """Return a handler that validates the body and calls the endpoint; None if the endpoint has other parameters.

    FastAPI's own handler takes a quarter of the time from the arrival of a chat request's bytes to the engine, because
    it resolves a tree of dependencies and parses path, query, headers and cookies for each of them.
    """
    hints = get_type_hints(endpoint, include_extras=True)
    if hints.pop("return") is not Response:
        return None
    find: dict[str, Callable[[Request], Awaitable[Any]]] = {}
    for name, hint in hints.items():
        depends = next((part for part in get_args(hint)[1:] if isinstance(part, params.Depends)), None)
        if hint is Request:
            find[name] = _itself
        elif depends is not None and depends.dependency is not None:
            find[name] = depends.dependency
        elif isinstance(hint, type) and issubclass(hint, StrictModel):
            find[name] = partial(_validated_body, hint)
        else:
            return None

    async def handle(request: Request) -> Response:
        return await endpoint(**{name: await value(request) for name, value in find.items()})

    return handle


async def _validated_body(model: type[StrictModel], request: Request) -> StrictModel:
    """Return the body as a model.

    Raises:
        RequestValidationError: the body is empty, not JSON, or not valid.
        HTTPException: the body cannot be read.
        Exception: there is not enough memory for the body.
    """
    try:
        if not await request.body():
            raise RequestValidationError([{"type": "missing", "loc": ("body",)}])
        value = await request.json()
    except json.JSONDecodeError as error:
        if lacks_memory(error):
            raise
        fault = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([fault]) from error
    except (HTTPException, RequestValidationError, ClientDisconnect):
        raise
    except Exception as error:
        if lacks_memory(error):
            raise
        raise HTTPException(400, "There was an error parsing the body") from error
    body, left_out = await beside_loop(partial(_read_body, model, value))
    if left_out:
        setattr(request.state, _LEFT_OUT_STATE, left_out)
    return body


def _read_body(model: type[StrictModel], value: Any) -> tuple[StrictModel, Sequence[str]]:
    """Validate a parsed body. Returns the model and the parts that are left out. Raises RequestValidationError."""
    body = _validated(partial(model.model_validate, from_attributes=True), value)
    return body, body.left_out


def _validated(validate: Callable[[Any], _Body], value: Any) -> _Body:
    """Validate a parsed body. Raises RequestValidationError with at most a certain number of errors."""
    try:
        return validate(value)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in faults_of(error)]
        raise RequestValidationError(faults) from error


def page(items: list[dict[str, Any]], after: str | None, limit: int, kind: str = "list") -> dict[str, Any]:
    """Return one page of a list in OpenAI's format. Raises RequestError if ``after`` is not the id of an item."""
    if after is not None:
        found = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if found is None:
            raise RequestError(f"'after' must be the id of an item in this {kind}, not '{after[:128]}'.", param="after")
        items = items[found + 1 :]
    shown = items[:limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": len(items) > limit}
