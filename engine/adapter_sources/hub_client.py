"""Hub client: adapters of the Hugging Face Hub, pinned to a commit by ``huggingface_hub``.

``huggingface_hub`` requests commit, size and hash of each file, with the user's token and endpoint (``HF_TOKEN``,
``HF_ENDPOINT``). ``CheckedHttp`` reads the bytes, so that their number is limited while they arrive and they come only
from allowed addresses, also after redirects of the Hub.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

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
_LIKE_A_COMMIT = re.compile(r"[0-9a-fA-F]{4,40}")
_SECONDS = 15
_MOST_COMMITS = 1000  # number of commits of branches and tags that are searched for a revision


class HubClient:
    """Client of one repository on the Hub.

    Args:
        source: source of the adapter.
        allows_address: returns whether connections to an IP address are allowed.
        checks_commits: whether a commit must be on a branch or tag. The repository also contains commits of pull
            requests, which anybody may open.
    """

    def __init__(
        self, source: AdapterSource, allows_address: Callable[[str], bool], *, checks_commits: bool = False
    ) -> None:
        from huggingface_hub import constants, get_token

        self._source = source
        self._checks_commits = checks_commits and source.revision not in ("", "main")
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
        """Return the files at the commit to which the revision points now. Raises as ``SourceClient.find``."""
        revision = self._source.revision or "main"
        config = await self._described(CONFIG, revision)
        if config is None:
            raise AdapterNotFound(f"{self._source} is not an adapter: it has no {CONFIG}.")
        commit, config_file = config
        if self._checks_commits:
            await self._check_on_branch(commit)
        weights = await self._described(WEIGHTS, commit)
        if weights is None:
            raise no_weights(str(self._source), has_pickle=await self._described(PICKLE, commit) is not None)
        return RemoteAdapter(config_file, weights[1], commit)

    @asynccontextmanager
    async def open(self, file: RemoteFile, start: int) -> AsyncIterator[Body]:
        """Open a file at an offset. Raises as ``SourceClient.open``."""
        async with open_range(self._http, file, start) as body:
            yield body

    async def _check_on_branch(self, commit: str) -> None:
        """Raise AdapterNotFound if the commit of the source's revision is on no branch and no tag."""
        try:
            is_on_one = await asyncio.to_thread(self._is_on_branch, commit)
        except Exception as error:
            found = _error_of(error, self._source)
            if isinstance(found, TransferBroken):
                raise found from error
            # The Hub has no answer: a revision that looks like a commit is treated as being on no branch.
            is_on_one = not _LIKE_A_COMMIT.fullmatch(self._source.revision)
        if not is_on_one:
            raise AdapterNotFound(
                f"hf://{self._source.location} has no commit {self._source.revision} among the last "
                f"{_MOST_COMMITS:,} commits of its branches and tags. Give one of these, or ask an administrator to "
                "load this commit."
            )

    def _is_on_branch(self, commit: str) -> bool:
        """Return whether the source's revision is a branch or tag, or the commit is among the last commits of one."""
        from huggingface_hub import HfApi
        from huggingface_hub.utils import build_hf_headers, paginate  # type: ignore[attr-defined]

        token: str | bool = self._token or False
        refs = HfApi(endpoint=self._endpoint, token=token).list_repo_refs(self._source.location)
        heads = {ref.name: ref.target_commit for ref in (*refs.branches, *refs.tags)}
        if self._source.revision in heads or commit in heads.values():
            return True
        headers, left = build_hf_headers(token=token), _MOST_COMMITS
        for name in heads:
            path = f"{self._endpoint}/api/models/{self._source.location}/commits/{quote(name, safe='')}"
            for item in islice(paginate(path, params={}, headers=headers, timeout=_SECONDS), left):
                left -= 1
                if item["id"] == commit:
                    return True
        return False

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
            raise TransferBroken(f"{urlsplit(self._endpoint).hostname} did not give a commit for {self._source}")
        # The address contains the commit, so that the file read is the file described.
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
    """Return our error for an error of ``huggingface_hub``."""
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
                "has access."
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
