"""Remote files: the data of a source's client about an adapter's two files, and the errors of reading them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
_CHUNK = 1 << 20


class TransferBroken(Exception):
    """A source that did not answer, or whose answer broke off; another attempt may resume the download."""


class SourceChanged(Exception):
    """A file that differs from the file found before."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of an adapter at its source.

    Attributes:
        name: name of the file on this machine.
        address: address by which the source's client reads the file.
        size: number of bytes; None if the source does not report it.
        validator: ETag or another text that differs for other content; empty if the source gives none.
        sha256: SHA-256 of the content, if the source publishes it.
        git_blob: Git's hash of the content, if the source reports it.
    """

    name: str
    address: str
    size: int | None
    validator: str = ""
    sha256: str = ""
    git_blob: str = ""

    @property
    def can_resume(self) -> bool:
        """Whether a part that was read before can be distinguished from a part of other content."""
        return bool(self.validator or self.sha256 or self.git_blob)

    def is_whole(self, path: Path) -> bool:
        """Return whether a file on this machine has the hashes that the source reports."""
        size = path.stat().st_size
        if self.size is not None and size != self.size:
            return False
        if self.sha256 and _hash_of(path, "sha256") != self.sha256:
            return False
        return not self.git_blob or _hash_of(path, "sha1", b"blob %d\0" % size) == self.git_blob


@dataclass(frozen=True, slots=True)
class RemoteAdapter:
    """The two files of an adapter.

    Attributes:
        revision: commit on the Hub; empty for other sources.
    """

    config: RemoteFile
    weights: RemoteFile
    revision: str = ""

    @property
    def version(self) -> str:
        """Text that differs for other content at the same source; empty if the source gives no validators."""
        if self.revision:
            return self.revision
        parts = [f"{file.validator} {file.size}" for file in (self.config, self.weights)]
        return "; ".join(parts) if self.config.validator and self.weights.validator else ""


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes of a file from ``start`` on; ``start`` is 0 if the source does not resume at the requested offset."""

    start: int
    chunks: AsyncIterator[bytes]


class SourceClient(Protocol):
    """Client of one kind of source."""

    async def find(self) -> RemoteAdapter:
        """Return the adapter's files.

        Raises:
            AdapterNotFound, RequestError: the file does not exist, or may not be read.
            TransferBroken: the source does not answer.
        """

    def open(self, file: RemoteFile, start: int) -> AbstractAsyncContextManager[Body]:
        """Open a file at an offset.

        Raises:
            TransferBroken: the source does not answer; also while chunks are read.
            SourceChanged: the file is a different one now.
        """


def content_digest(folder: Path) -> str:
    """Return the SHA-256 of an adapter: of the config's bytes followed by the weights' bytes."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        _feed(digest, folder / name)
    return digest.hexdigest()


def _hash_of(path: Path, kind: str, prefix: bytes = b"") -> str:
    digest = hashlib.new(kind, prefix, usedforsecurity=False)
    _feed(digest, path)
    return digest.hexdigest()


def _feed(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
