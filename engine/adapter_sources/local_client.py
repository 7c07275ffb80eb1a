"""Local client: adapters at ``file://`` URIs, in allowed folders after all links are resolved."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import AdapterNotFound, RequestError
from .remote_files import CONFIG, PICKLE, WEIGHTS, Body, RemoteAdapter, RemoteFile, SourceChanged, TransferBroken
from .source_uri import AdapterSource
from .web_client import no_weights

_CHUNK = 1 << 20


class LocalClient:
    """Client of a folder of this machine.

    Args:
        source: source of the adapter.
        folders: folders that must contain the files; None allows any folder.
    """

    def __init__(self, source: AdapterSource, folders: Sequence[str] | None) -> None:
        self._source = source
        self._folder = Path(source.location)
        self._allowed = None if folders is None else [Path(folder).resolve() for folder in folders]

    async def find(self) -> RemoteAdapter:
        """Return the files. Raises as ``SourceClient.find``."""
        config, weights = self._described(CONFIG), self._described(WEIGHTS)
        if config is None:
            raise AdapterNotFound(f"There is no {CONFIG} at {self._source}.")
        if weights is None:
            raise no_weights(str(self._source), has_pickle=self._described(PICKLE) is not None)
        return RemoteAdapter(config, weights)

    @asynccontextmanager
    async def open(self, file: RemoteFile, start: int) -> AsyncIterator[Body]:
        """Open a file at an offset. Raises as ``SourceClient.open``."""
        stream = self._opened(file.name)
        if stream is None:
            raise SourceChanged(f"{file.name} is gone")
        with stream:
            if _validator(os.fstat(stream.fileno())) != file.validator:
                raise SourceChanged(f"{file.name} was changed")
            stream.seek(start)
            yield Body(start, _chunks(stream))

    def _described(self, name: str) -> RemoteFile | None:
        stream = self._opened(name)
        if stream is None:
            return None
        with stream:
            found = os.fstat(stream.fileno())
        return RemoteFile(name, str(self._folder / name), found.st_size, _validator(found))

    def _opened(self, name: str) -> BinaryIO | None:
        """Open a regular file below an allowed folder; None if there is none.

        Its location is checked again after it was opened, as links may have been changed meanwhile.
        """
        path = self._folder / name
        try:
            self._check_lies_well(path)
            descriptor = os.open(path.resolve(strict=True), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError) as error:
            raise AdapterNotFound(f"{name} at {self._source} cannot be read.") from error
        stream = os.fdopen(descriptor, "rb")
        try:
            self._check_lies_well(path)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not os.path.samestat(
                os.fstat(descriptor), path.stat()
            ):
                raise RequestError(f"{name} at {self._source} is not a regular file.")
        except OSError as error:
            stream.close()
            raise TransferBroken(f"{name} at {self._source} was changed") from error
        except RequestError:
            stream.close()
            raise
        return stream

    def _check_lies_well(self, path: Path) -> None:
        place = path.resolve()
        if self._allowed is not None and not any(place.is_relative_to(folder) for folder in self._allowed):
            raise RequestError(
                f"{self._source} leads outside the folders that --adapter-sources lists.",
                code="adapter_source_not_allowed",
            )


async def _chunks(stream: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := stream.read(_CHUNK):
        yield chunk


def _validator(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns}-{found.st_size}-{found.st_ino}"
