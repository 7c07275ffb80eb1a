"""``/v1/batches``: create, list, get and cancel batches."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from ...engine.errors import RequestError
from ..access.caller import Caller
from ..batches.batch_service import BatchService
from ..errors import HTTPError
from ..generate.envelope import json_response
from ..protocol.batches import BatchBody
from ..storage.batch_store import BatchRecord
from ..storage.disk_space import refusing_without_space
from .dependencies import CallerOf, JsonRoute, State, page
from .files import batch_service_of, find_file

router = APIRouter(route_class=JsonRoute, tags=["batches"])


@router.post("/v1/batches")
async def create_batch(body: BatchBody, state: State, caller: CallerOf) -> Response:
    """Create a batch. All requests of a file are answered within a day, in the lowest priority class."""
    batch_service = batch_service_of(state)
    state.engine.serving()
    source = find_file(batch_service, caller, body.input_file_id)
    if source.purpose != "batch":
        raise RequestError("'input_file_id' must be a file with the purpose 'batch'.", param="input_file_id")
    expiry = body.output_expires_after
    with refusing_without_space("this batch"):
        record = batch_service.create(
            caller,
            source,
            body.endpoint,
            metadata=body.metadata,
            output_expiry=None if expiry is None else expiry.seconds,
        )
    return json_response(record.body())


def _find(batch_service: BatchService, caller: Caller, batch_id: str) -> BatchRecord:
    record = batch_service.records.get(caller.key.tenant, batch_id)
    if record is None:
        raise HTTPError(404, f"No batch found with id '{batch_id[:128]}'.", code="batch_not_found")
    return record


@router.get("/v1/batches")
async def list_batches(
    state: State, caller: CallerOf, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Response:
    """List the caller's batches, the newest first."""
    records = batch_service_of(state).records.of(caller.key.tenant)
    return json_response(page([record.body() for record in records], after, limit))


@router.get("/v1/batches/{batch_id}")
async def get_batch(batch_id: str, state: State, caller: CallerOf) -> Response:
    """Get a batch."""
    return json_response(_find(batch_service_of(state), caller, batch_id).body())


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, state: State, caller: CallerOf) -> Response:
    """Cancel a batch. The answers so far are kept."""
    batch_service = batch_service_of(state)
    record = _find(batch_service, caller, batch_id)
    if record.has_ended and record.status != "cancelled":
        raise RequestError(f"Cannot cancel a batch with status '{record.status}'.")
    batch_service.cancel(record)
    return json_response(record.body())
