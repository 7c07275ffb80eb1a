"""Dependencies that routes share: the server's state, the caller and its log facts, an adapter's public path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, cast

from fastapi import Depends, Request

from ...engine.serving.request import TextRequest
from ...engine.types import AdapterInfo
from ..access.caller import Caller
from ..generate.server_state import ServerState


async def _state(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


async def _caller(request: Request) -> Caller:
    return cast(Caller, request.state.caller)


State = Annotated[ServerState, Depends(_state)]
CallerOf = Annotated[Caller, Depends(_caller)]


def set_facts(caller: Caller, requests: Sequence[TextRequest], *, model: str, stream: bool, response_id: str) -> None:
    """Set what the access log says of a generation before it runs."""
    facts = caller.facts
    facts.model, facts.stream, facts.response_id = model, stream, response_id
    facts.prompt_tokens, facts.n = sum(len(request.tokens) for request in requests), requests[0].n


def shown_path(info: AdapterInfo) -> str:
    """Return an adapter's path for clients: relative to ``--lora-dir``, or the folder's name if it lies elsewhere."""
    path = PurePath(info.path)
    return path.name if path.is_absolute() or ".." in path.parts else info.path
