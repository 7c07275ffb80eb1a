"""What several routes need: the server's state, who asks, and how an adapter's path is told."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, cast

from fastapi import Depends, Request

from ...engine.types import AdapterInfo
from ..access.caller import Caller
from ..generate.server_state import ServerState


async def _state(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


async def _caller(request: Request) -> Caller:
    return cast(Caller, request.state.caller)


State = Annotated[ServerState, Depends(_state)]
CallerOf = Annotated[Caller, Depends(_caller)]


def shown_path(info: AdapterInfo) -> str:
    """An adapter's path as clients may see it: below ``--lora-dir``; of one from elsewhere the folder's name alone."""
    path = PurePath(info.path)
    return path.name if path.is_absolute() or ".." in path.parts else info.path
