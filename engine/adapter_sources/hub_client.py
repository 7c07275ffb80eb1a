"""Hub client: adapters of the Hugging Face Hub, pinned to a commit by ``huggingface_hub``.

``huggingface_hub`` asks for commit, size and hash of each file, with the user's token and endpoint (``HF_TOKEN``,
``HF_ENDPOINT``). The bytes come by ``CheckedHttp``, so that they are bounded while they arrive and come from allowed
addresses alone, wherever the Hub redirects to.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..errors import AdapterNotFound
from .checked_http import CheckedHttp
from .remote_files import CONFIG, PICKLE, WEIGHTS, Body, RemoteAdapter, RemoteFile, TransferBroken
from .source_uri import AdapterSource
from .web_client import no_weights, open_range

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_BLOB = re.compile(r"[0-9a-f]{40}")
_COMMIT = _GIT_BLOB
_SECONDS = 15


class HubClient:
    """Client of one repository on the Hub.

    Args:
        source: the adapter.
        allows_address: whether an IP address may be connected to.
    """

    def __init__(self, source: AdapterSource, allows_address: Callable[[str], bool]) -> None:
        from huggingface_hub import constants, get_token

        self._source = source
        self._endpoint = constants.ENDPOINT
        self._token = get_token()
        parts = urlsplit(self._endpoint)
        port = parts.port or (80 if parts.scheme == "http" else 443)
        self._http = CheckedHttp(
            allows_address,
            may_follow=lambda target: target.scheme == "https" or parts.scheme == "http",
            trusted=frozenset({((parts.hostname or "").lower(), port)}),
            plain=parts.scheme == "http",
            secrets={"Authorization": f"Bearer {self._token}"} if self._token else {},
        )

    async def find(self) -> RemoteAdapter:
        """Return the files at the commit that the revision stands for now. Raises as ``SourceClient.find``."""
        revision = self._source.revision or "main"
        config = await self._described(CONFIG, revision)
        if config is None:
            raise AdapterNotFound(f"{self._source} is no adapter: it has no {CONFIG}.")
        commit, config_file = config
        weights = await self._described(WEIGHTS, commit)
        if weights is None:
            raise no_weights(str(self._source), has_pickle=await self._described(PICKLE, commit) is not None)
        return RemoteAdapter(config_file, weights[1], commit)

    @asynccontextmanager
    async def open(self, file: RemoteFile, start: int) -> AsyncIterator[Body]:
        """Open a file at an offset. Raises as ``SourceClient.open``."""
        async with open_range(self._http, file, start) as body:
            yield body

    async def _described(self, name: str, revision: str) -> tuple[str, RemoteFile] | None:
        """Return the commit and a file's size and hash; None if the repository has no such file."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self._source.location, name, revision=revision, endpoint=self._endpoint)
        try:
            found = await asyncio.to_thread(
                get_hf_file_metadata, url, token=self._token or False, timeout=_SECONDS, endpoint=self._endpoint
            )
        except Exception as error:  # the client's exceptions have no common base class
            if _is_missing_file(error):
                return None
            raise _error_of(error, self._source) from error
        commit = found.commit_hash
        if commit is None or not _COMMIT.fullmatch(commit):
            raise TransferBroken(f"{urlsplit(self._endpoint).hostname} names no commit for {self._source}")
        # By its commit, so that the file read is the one described.
        address = hf_hub_url(self._source.location, name, revision=commit, endpoint=self._endpoint)
        return commit, _file(name, address, found)


def _file(name: str, address: str, found: HfFileMetadata) -> RemoteFile:
    tag = found.etag or ""
    return RemoteFile(
        name,
        address,
        found.size,
        sha256=tag if _SHA256.fullmatch(tag) else "",
        git_blob=tag if _GIT_BLOB.fullmatch(tag) else "",
    )


def _is_missing_file(error: Exception) -> bool:
    from huggingface_hub.errors import EntryNotFoundError

    return isinstance(error, EntryNotFoundError)


def _error_of(error: Exception, source: AdapterSource) -> Exception:
    """Return our error for one of ``huggingface_hub``."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = f"hf://{source.location}"
    match error:
        case GatedRepoError():
            return AdapterNotFound(
                f"{name} is gated: ask for access on its page, and start the server with HF_TOKEN of an account that "
                "has it."
            )
        case RepositoryNotFoundError():
            return AdapterNotFound(
                f"The Hub has no repository {name}, or it is private and the server's HF_TOKEN may not read it."
            )
        case RevisionNotFoundError():
            return AdapterNotFound(f"{name} has no revision {source.revision}.")
        case OfflineModeIsEnabled():
            return TransferBroken("HF_HUB_OFFLINE is set")
        case HfHubHTTPError() if error.response.status_code in (401, 403, 404):
            return AdapterNotFound(f"{name} may not be read: the Hub answers {error.response.status_code}.")
        case HfHubHTTPError():
            return TransferBroken(f"the Hub answers {error.response.status_code} for {name}")
    return TransferBroken(f"the Hub does not answer ({type(error).__name__})")
