"""Session bodies: request bodies of the routes for sessions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ...engine.types import MAX_SESSION_NAME
from .adapter_parts import ModelName
from .base import StrictModel

_Name = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_NAME)]


class ReleaseSessionRequest(StrictModel):
    """Names a session of the caller."""

    model: ModelName | None = None
    prompt_cache_key: _Name


class ExportSessionRequest(ReleaseSessionRequest):
    """Names a session of any tenant. The tenant is "" on a server without tenants."""

    tenant: Annotated[str, Field(max_length=MAX_SESSION_NAME)] = ""
