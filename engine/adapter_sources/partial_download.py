"""Partial download: downloads one file piece by piece within limits, and resumes after interruptions."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from ...lora.config import MOST_BYTES, read_config
from ...lora.errors import AdapterError
from ..errors import RequestError
from .remote_files import CONFIG, RemoteAdapter, RemoteFile, SourceChanged, SourceClient, TransferBroken
from .source_uri import AdapterSource

_FRUITLESS = 4  # interruptions in a row without a new byte after which a download fails
_FIRST_PAUSE = 0.25  # seconds before the second attempt; doubled for each further one
_LOG_SECONDS = 5
_MOST_HEADER_BYTES = 1 << 20  # bytes of a safetensors header, the limit of lora.safetensors_file

logger = logging.getLogger("rootgraft.adapters")


@dataclass(slots=True)
class DownloadProgress:
    """Progress of a fetch. Written by the fetch's thread.

    Attributes:
        state: description of the state in a few words.
        done: number of bytes of the weights that are downloaded.
        total: number of bytes of the weights; 0 until it is known.
    """

    state: str = "asking the source"
    done: int = 0
    total: int = 0

    @property
    def amount(self) -> str:
        """Number of downloaded bytes, in words: ``12.3 MB`` or ``4.5 of 12.3 MB``."""
        whole = f"{max(self.total, self.done) / 1e6:.1f} MB"
        return whole if self.done >= self.total else f"{self.done / 1e6:.1f} of {whole}"


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """Limits of one download.

    Attributes:
        most_bytes: largest size of the weights.
        seconds: largest number of seconds from begin to end.
    """

    most_bytes: int
    seconds: float

    def of(self, file: RemoteFile) -> int:
        """Return the largest number of bytes allowed for a file."""
        return MOST_BYTES if file.name == CONFIG else self.most_bytes

    def check_sizes(self, remote: RemoteAdapter) -> None:
        """Raise RequestError if a file is larger than the limit, by the size that its source reports."""
        for file in (remote.config, remote.weights):
            if file.size is not None and file.size > self.of(file):
                raise self.too_large(file, f"{file.size:,}")

    def bytes_of(self, remote: RemoteAdapter) -> int:
        """Return the bytes that an adapter needs on disk: the limit if its source reports no size."""
        return sum(self.of(file) if file.size is None else file.size for file in (remote.config, remote.weights))

    def too_large(self, file: RemoteFile, size: str) -> RequestError:
        """Return the error for a file with more bytes than allowed."""
        flag = "" if file.name == CONFIG else " (--max-adapter-bytes)"
        return RequestError(
            f"The adapter is too large: {file.name} has {size} bytes; at most {self.of(file):,} are downloaded{flag}.",
            code="adapter_too_large",
        )


async def download_file(
    client: SourceClient,
    file: RemoteFile,
    folder: Path,
    limits: DownloadLimits,
    progress: DownloadProgress,
    source: AdapterSource,
) -> None:
    """Download a file into a folder, from where an earlier download broke off, and check it.

    Raises:
        RequestError: the file is too large, or not a part of an adapter.
        SourceChanged: the file has changed at its source, or the downloaded part is damaged.
        TransferBroken: the source has broken off repeatedly.
    """
    path = folder / file.name
    path.touch(mode=0o600)
    transfer = _Transfer(file, path, limits, progress, source)
    fruitless = 0
    while not transfer.is_complete:
        before = path.stat().st_size
        try:
            await transfer.go_on(client)
        except TransferBroken as error:
            fruitless = 0 if path.stat().st_size > before else fruitless + 1
            if fruitless >= _FRUITLESS:
                raise
            logger.warning("%s: %s; resuming at byte %d", source, error, path.stat().st_size)
            await asyncio.sleep(_FIRST_PAUSE * 2**fruitless)
    if not file.is_whole(path):
        raise SourceChanged(f"{file.name} does not have the hash that its source gives")
    check = _check_config if file.name == CONFIG else _check_weights
    check(path, source)


class _Transfer:
    """The transfer of one file to disk."""

    def __init__(
        self,
        file: RemoteFile,
        path: Path,
        limits: DownloadLimits,
        progress: DownloadProgress,
        source: AdapterSource,
    ) -> None:
        self.is_complete = file.size is not None and path.stat().st_size == file.size
        self._file = file
        self._path = path
        self._limits = limits
        self._progress = progress
        self._source = source
        self._told = time.monotonic()
        self._is_weights = file.name != CONFIG
        if self._is_weights:
            progress.state, progress.total, progress.done = "downloading", file.size or 0, path.stat().st_size
            logger.info("%s: downloading, %s", source, progress.amount)

    async def go_on(self, client: SourceClient) -> None:
        """Read from the end of the part on disk to the end of the file. Raises as ``download_file``."""
        start = self._path.stat().st_size if self._file.can_resume else 0
        async with client.open(self._file, start) as body:
            with self._path.open("r+b") as out:
                out.truncate(body.start)
                out.seek(body.start)
                async for chunk in body.chunks:
                    self._check_chunk(chunk, out.tell())
                    out.write(chunk)
                    self._tell(out.tell())
        size = self._path.stat().st_size
        if self._file.size is not None and size < self._file.size:
            raise TransferBroken(
                f"the download of {self._file.name} stopped after {size:,} of {self._file.size:,} bytes"
            )
        self.is_complete = True

    def _check_chunk(self, chunk: bytes, at: int) -> None:
        end = at + len(chunk)
        if end > self._limits.of(self._file):
            raise self._limits.too_large(self._file, f"more than {end - 1:,}")
        if self._file.size is not None and end > self._file.size:
            raise SourceChanged(f"{self._file.name} has more bytes than its source stated")
        if self._is_weights and at == 0:
            _check_begin(chunk, self._source)

    def _tell(self, done: int) -> None:
        if not self._is_weights:
            return
        self._progress.done = done
        if time.monotonic() - self._told >= _LOG_SECONDS:
            self._told = time.monotonic()
            logger.info("%s: downloading, %s", self._source, self._progress.amount)


def _check_config(path: Path, source: AdapterSource) -> None:
    """Raise RequestError unless a file is the config of a supported adapter, before the weights are downloaded."""
    try:
        read_config(path.read_bytes())
    except AdapterError as error:
        raise RequestError(f"{source} cannot be served: {error}", code="adapter_not_supported") from error


def _check_begin(begin: bytes, source: AdapterSource) -> None:
    """Raise RequestError if the first bytes show that a file is not in safetensors format, before the rest arrives."""
    length = int.from_bytes(begin[:8], "little")
    if len(begin) > 8 and (not 2 <= length <= _MOST_HEADER_BYTES or begin[8:9] != b"{"):
        raise _no_weights(source)


def _check_weights(path: Path, source: AdapterSource) -> None:
    """Raise RequestError unless a file has the size that its header describes; the loader checks everything else."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= _MOST_HEADER_BYTES else b""
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = max(int(entry["data_offsets"][1]) for entry in entries.values())
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
        raise _no_weights(source) from None
    if path.stat().st_size != 8 + length + end:
        raise _no_weights(source)


def _no_weights(source: AdapterSource) -> RequestError:
    return RequestError(
        f"{source} is not an adapter: its weights are not in safetensors format, or are incomplete.",
        code="adapter_not_supported",
    )
