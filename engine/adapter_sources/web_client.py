"""Web client: adapters at ``https://`` URLs, and files of any HTTP source read from an offset on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from ..errors import AdapterNotFound, RequestError
from .checked_http import CheckedHttp, read_chunks
from .remote_files import CONFIG, PICKLE, WEIGHTS, Body, RemoteAdapter, RemoteFile, SourceChanged, TransferBroken
from .source_uri import AdapterSource

_REFUSED = frozenset({401, 403})
_GONE = frozenset({404, 410})
_NO_HEAD = frozenset({405, 501})


class WebClient:
    """Client of an adapter's folder at an ``https://`` URL.

    Args:
        http: rules for requests.
        source: the adapter.
    """

    def __init__(self, http: CheckedHttp, source: AdapterSource) -> None:
        self._http = http
        self._url = f"https://{source.location}"

    async def find(self) -> RemoteAdapter:
        """Return the files, as their headers describe them. Raises as ``SourceClient.find``."""
        config = await self._described(CONFIG)
        if config is None:
            raise AdapterNotFound(f"There is no {CONFIG} at {self._url}.")
        weights = await self._described(WEIGHTS)
        if weights is None:
            raise no_weights(self._url, has_pickle=await self._described(PICKLE) is not None)
        return RemoteAdapter(config, weights)

    @asynccontextmanager
    async def open(self, file: RemoteFile, start: int) -> AsyncIterator[Body]:
        """Open a file at an offset. Raises as ``SourceClient.open``."""
        async with open_range(self._http, file, start) as body:
            yield body

    async def _described(self, name: str) -> RemoteFile | None:
        """Return a file's size and ETag; None if there is no such file."""
        url = f"{self._url}/{name}"
        async with self._http.request("HEAD", url) as response:
            if response.status in _GONE:
                return None
            if response.status in _NO_HEAD:
                return RemoteFile(name, url, None)
            check_status(response, url)
            length = response.headers.get("Content-Length", "")
            return RemoteFile(name, url, int(length) if length.isdecimal() else None, _validator(response))


@asynccontextmanager
async def open_range(http: CheckedHttp, file: RemoteFile, start: int) -> AsyncIterator[Body]:
    """Open a file by HTTP at an offset, or at its beginning if the server does not resume."""
    headers = {"Range": f"bytes={start}-"} if start else {}
    headers |= {"If-Range": file.validator} if start and file.validator else {}
    async with http.request("GET", file.address, headers) as response:
        if response.status == 416:
            raise SourceChanged(f"{file.name} has become shorter")
        check_status(response, file.address)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestError(f"The server sends {file.name} compressed, though it was asked not to.")
        if file.validator and _validator(response) not in ("", file.validator):
            raise SourceChanged(f"{file.name} has another ETag now")
        yield Body(_first_byte(response, start), read_chunks(response))


def no_weights(place: str, *, has_pickle: bool) -> RequestError:
    """Return the error of a folder that has no weights in safetensors, but perhaps a pickle."""
    if has_pickle:
        return RequestError(
            f"{place} has only {PICKLE}, a pickle, which can run any code when it is loaded. Save the adapter as "
            f"{WEIGHTS}."
        )
    return AdapterNotFound(f"There is no {WEIGHTS} at {place}.")


def check_status(response: aiohttp.ClientResponse, url: str) -> None:
    """Raise the error for a status, if it is an error."""
    status, place = response.status, url.partition("?")[0]
    if status in (200, 206):
        return
    if status in _REFUSED:
        raise AdapterNotFound(f"{place} may not be read: the server answers {status}.")
    if status in _GONE:
        raise AdapterNotFound(f"There is nothing at {place}: the server answers {status}.")
    if status == 429 or status >= 500:
        raise TransferBroken(f"the server answers {status} for {place}")
    raise RequestError(f"The server answers {status} for {place}.")


def _first_byte(response: aiohttp.ClientResponse, start: int) -> int:
    if response.status != 206:
        return 0
    given = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    if given != str(start):
        raise TransferBroken(f"the server sent the bytes from {given[:20]} on, not those from {start}")
    return start


def _validator(response: aiohttp.ClientResponse) -> str:
    """Return the strong ETag, or else the time of the last change; either may be sent in If-Range.

    Bytes that are not ASCII cannot be sent back, so a text with them is not a validator.
    """
    tag, changed = response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")
    found = tag if tag and not tag.startswith("W/") else changed
    return found if found.isascii() else ""
