"""The server's state and who asks, as routes get them."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from api.caller import Caller
from api.state import ServerState


async def _state(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


async def _caller(request: Request) -> Caller:
    return cast(Caller, request.state.caller)


State = Annotated[ServerState, Depends(_state)]
CallerOf = Annotated[Caller, Depends(_caller)]
