"""``/v1/files``: upload, list, get, read and delete the input and output files of batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Annotated, BinaryIO, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from ...engine.errors import RequestError, quoted
from ..access.caller import Caller
from ..batches.batch_service import BatchService
from ..errors import HTTPError
from ..generate.envelope import json_response
from ..generate.server_state import ServerState
from ..protocol.batches import ExpiresAfter
from ..storage.disk_space import refusing_without_space
from ..storage.file_store import FORM_BYTES, StoredFile, Upload
from .dependencies import CallerOf, JsonRoute, State, page

MAX_LINES = 50_000
_CHUNK = 1 << 20
_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")

router = APIRouter(route_class=JsonRoute, tags=["batches"])


def batch_service_of(state: ServerState) -> BatchService:
    """Return the batch service. Raises RequestError if the server has no batch service."""
    if state.stores.batches is None:
        raise RequestError("This server does not store files or batches: start it with --batch-dir.")
    return state.stores.batches


def find_file(batch_service: BatchService, caller: Caller, file_id: str) -> StoredFile:
    """Return a file of the caller's tenant. Raises HTTPError 404 for another id."""
    file = batch_service.files.get(caller.key.tenant, file_id)
    if file is None:
        raise HTTPError(404, f"No such File object: {file_id[:128]}", code="file_not_found")
    return file


@router.post("/v1/files")
async def create_file(request: Request, state: State, caller: CallerOf) -> Response:
    """Store a file of requests, sent as ``multipart/form-data`` with the fields ``file`` and ``purpose``."""
    batch_service = batch_service_of(state)
    _check_kind(request.headers.get("content-type", ""))
    upload = batch_service.files.begin_upload(caller.key.tenant)
    with refusing_without_space("this file"), closing(upload):
        if (length := request.headers.get("content-length", "")).isdecimal():
            upload.expect(max(0, int(length) - FORM_BYTES))
        counted = Request(request.scope, _counted(request.receive, upload))
        try:
            form = await counted.form(max_files=1, max_fields=len(_FIELDS), max_part_size=1024)
        except HTTPException as error:
            if isinstance(error, HTTPError):
                raise
            raise RequestError(f"The form cannot be read: {error.detail}") from None
        try:
            return await _keep(batch_service, form, caller, upload, state.options.max_file_bytes)
        finally:
            await form.close()


def _check_kind(kind: str) -> None:
    """Raise HTTPError unless the body is a form in UTF-8. Other charset names could make Python run any codec."""
    if not kind.lower().startswith("multipart/form-data"):
        raise HTTPError(415, "The file must be sent as multipart/form-data.")
    charset = parse_options_header(kind)[1].get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8"):
        raise HTTPError(415, f"The form must be UTF-8, not {quoted(charset.decode('latin-1'))}.")


def _counted(receive: Receive, upload: Upload) -> Receive:
    """Return a ``receive`` that reserves space for the bytes of a body before it returns them."""

    async def counted() -> Message:
        message = await receive()
        upload.take(len(message.get("body", b"")))
        return message

    return counted


async def _keep(
    batch_service: BatchService, form: FormData, caller: Caller, upload: Upload, max_bytes: int
) -> Response:
    sent, expiry = _checked(form)
    size = sent.size or 0
    if size > max_bytes:
        raise RequestError(f"'file' must have at most {max_bytes} bytes, not {size}.", param="file")
    upload.settle(size)
    owner = caller.key.tenant
    lines = await batch_service.on_thread(owner, partial(_count_lines, sent.file))
    if not 1 <= lines <= MAX_LINES:
        raise RequestError(f"'file' must have 1 to {MAX_LINES} lines, not {lines}.", param="file")
    file = batch_service.files.new(owner, sent.filename or "upload", "batch", size, expiry)
    written = await batch_service.on_thread(owner, partial(batch_service.files.write, file, _chunks(sent.file)))
    batch_service.files.add(written)
    return json_response(written.body())


def _checked(form: FormData) -> tuple[UploadFile, int | None]:
    """Return the file of a form and the seconds until it expires. Raises RequestError for a malformed form."""
    for name in form:
        if name not in _FIELDS:
            raise RequestError(
                f"'{name[:64]}' is not a parameter of this request.", param=name[:64], code="unknown_parameter"
            )
    upload, purpose = form.get("file"), form.get("purpose")
    for name, value in (("file", upload), ("purpose", purpose)):
        if value is None:
            raise RequestError(f"'{name}' is required.", param=name, code="missing_required_parameter")
    if not isinstance(upload, UploadFile):
        raise RequestError("'file' must be a file with a name.", param="file", code="invalid_type")
    if purpose != "batch":
        raise RequestError("'purpose' must be 'batch': the server has no other use for files.", param="purpose")
    return upload, _expiry(form)


def _expiry(form: FormData) -> int | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    number = int(seconds) if isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 12 else seconds
    try:
        return ExpiresAfter.model_validate({"anchor": anchor, "seconds": number}).seconds
    except ValidationError as error:
        found = [{**each, "loc": ("body", "expires_after", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(found) from None


def _count_lines(file: BinaryIO) -> int:
    """Count the lines that are not empty. The file is read in pieces, because one line may be the whole file."""
    file.seek(0)
    count, is_empty = 0, True
    while piece := file.readline(_CHUNK):
        is_empty = is_empty and not piece.strip()
        if piece.endswith(b"\n"):
            count += not is_empty
            is_empty = True
    return count + (not is_empty)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while chunk := file.read(_CHUNK):
        yield chunk


@router.get("/v1/files")
async def list_files(
    state: State,
    caller: CallerOf,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> Response:
    """List the caller's files."""
    files = [file for file in batch_service_of(state).files.of(caller.key.tenant) if purpose in (None, file.purpose)]
    return json_response(page([file.body() for file in (files if order == "asc" else reversed(files))], after, limit))


@router.get("/v1/files/{file_id}")
async def get_file(file_id: str, state: State, caller: CallerOf) -> Response:
    """Get the description of a file."""
    return json_response(find_file(batch_service_of(state), caller, file_id).body())


@router.get("/v1/files/{file_id}/content")
async def get_file_content(file_id: str, state: State, caller: CallerOf) -> Response:
    """Get the content of a file. Headers keep browsers from showing it as a page, because a client wrote it."""
    batch_service = batch_service_of(state)
    return FileResponse(
        batch_service.files.path(find_file(batch_service, caller, file_id)),
        media_type="application/octet-stream",
        headers={"x-content-type-options": "nosniff", "content-disposition": "attachment"},
    )


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, state: State, caller: CallerOf) -> Response:
    """Delete a file that no running batch reads."""
    batch_service = batch_service_of(state)
    file = find_file(batch_service, caller, file_id)
    if (reader := batch_service.reader_of(file)) is not None:
        raise RequestError(f"The batch {reader.id} is reading this file: cancel the batch first.", code="file_in_use")
    batch_service.files.delete(file)
    return json_response({"id": file_id, "object": "file", "deleted": True})
