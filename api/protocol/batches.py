"""Request body of ``/v1/batches``, and ``expires_after`` of uploads to ``/v1/files``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from .base import StrictModel
from .responses import check_metadata

MIN_EXPIRY = 3600
MAX_EXPIRY = 30 * 86400


class ExpiresAfter(StrictModel):
    """Expiry of a file, in seconds after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY, le=MAX_EXPIRY)]


class BatchBody(StrictModel):
    """The body of ``POST /v1/batches``."""

    input_file_id: Annotated[str, Field(max_length=128)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/decisions"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], AfterValidator(check_metadata)] | None = None
    output_expires_after: ExpiresAfter | None = None
