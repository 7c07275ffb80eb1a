"""The server's state, as routes get it."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from api.state import ServerState


async def _state(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


State = Annotated[ServerState, Depends(_state)]
