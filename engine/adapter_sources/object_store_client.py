"""Object store client: adapters in buckets (``s3://``), read through ``checkpoint.bucket_files``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ..checkpoint.bucket_files import open_buckets
from ..errors import AdapterNotFound, RequestError
from .remote_files import CONFIG, PICKLE, WEIGHTS, Body, RemoteAdapter, RemoteFile, SourceChanged, TransferBroken
from .source_uri import AdapterSource
from .web_client import no_weights

NEEDS_EXTRA = "Adapters at s3:// need the package s3fs: install the extra s3 (pip install 'rootgraft[s3]')."
_PART = 4 << 20  # bytes of one request


class ObjectStoreClient:
    """Client of an adapter's folder in a bucket.

    Args:
        source: source of the adapter.

    Raises:
        RequestError: the package for such buckets is not installed.
    """

    def __init__(self, source: AdapterSource) -> None:
        self._source = source
        self._files = _file_system()

    async def find(self) -> RemoteAdapter:
        """Return the files. Raises as ``SourceClient.find``."""
        config = await self._described(CONFIG)
        if config is None:
            raise AdapterNotFound(
                f"There is no {CONFIG} at s3://{self._source.location}, or the bucket does not exist."
            )
        weights = await self._described(WEIGHTS)
        if weights is None:
            pickle = await self._described(PICKLE)
            raise no_weights(f"s3://{self._source.location}", has_pickle=pickle is not None)
        return RemoteAdapter(config, weights)

    @asynccontextmanager
    async def open(self, file: RemoteFile, start: int) -> AsyncIterator[Body]:
        """Open a file at an offset. Raises as ``SourceClient.open``."""
        yield Body(start, self._chunks(file, start))

    async def _chunks(self, file: RemoteFile, start: int) -> AsyncIterator[bytes]:
        """Yield parts of a file, all of one version: fsspec requests the ETag that it saw at opening."""
        with await self._asked(self._opened, file) as stream:
            if stream.details.get("ETag") != file.validator:
                raise SourceChanged(f"{file.name} has another ETag now")
            stream.seek(start)
            while chunk := await self._asked(stream.read, _PART):
                yield chunk

    def _opened(self, file: RemoteFile) -> Any:
        return self._files.open(file.address, "rb", cache_type="none")

    async def _described(self, name: str) -> RemoteFile | None:
        address = f"{self._source.location}/{name}"
        try:
            found = await self._asked(self._files.info, address)
        except FileNotFoundError:
            return None
        if found.get("type") != "file":
            return None
        return RemoteFile(name, address, int(found["size"]), str(found.get("ETag", "")))

    async def _asked(self, call: Any, *arguments: Any) -> Any:
        """Run a blocking call of fsspec on another thread, and return its result."""
        from botocore.exceptions import NoCredentialsError

        place = f"s3://{self._source.location}"
        try:
            return await asyncio.to_thread(call, *arguments)
        except FileNotFoundError:
            raise
        except PermissionError as error:
            raise AdapterNotFound(f"{place} may not be read with the server's credentials.") from error
        except NoCredentialsError as error:
            raise AdapterNotFound(
                f"{place} may not be read without credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "FSSPEC_S3_ANON=true for a public bucket."
            ) from error
        except Exception as error:  # those of fsspec, botocore and its HTTP client have no common base class
            if "PreconditionFailed" in str(error) or type(error).__name__ == "FileExpired":
                raise SourceChanged(f"an object of {place} has another ETag now") from error
            raise TransferBroken(f"the object store does not answer for {place} ({type(error).__name__})") from error


def _file_system() -> Any:
    try:
        return open_buckets()
    except ImportError as error:
        raise RequestError(NEEDS_EXTRA) from error
