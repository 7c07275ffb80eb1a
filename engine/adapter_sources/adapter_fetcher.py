"""Adapter fetcher: downloads adapters on separate threads, checks them, and keeps them in the cache on disk.

    source --find--> version --known?--> content in the cache
                        |                     ^
                        +-- download, check --+ publish

If a source is pinned and its content is cached, the source is not asked. If a source does not answer, the version that
was seen last is used.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import shlex
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import SplitResult

from ...tenancy.current_tenant import CURRENT_TENANT
from ..config import EngineConfig
from ..errors import AdapterUnavailable, ConfigError, EngineError, RequestError
from .cached_adapters import adapter_cache_folder
from .checked_http import CheckedHttp
from .daemon_thread_loop import DaemonThreadLoop, settle
from .download_cache import UNCHECKED, DownloadCache
from .download_slots import DownloadSlots
from .hub_client import HubClient
from .local_client import LocalClient
from .object_store_client import NEEDS_EXTRA, ObjectStoreClient
from .partial_download import DownloadLimits, DownloadProgress, download_file
from .remote_files import RemoteAdapter, SourceChanged, SourceClient, TransferBroken, content_digest
from .source_policy import SourcePolicy
from .source_uri import AdapterSource, location_of
from .web_client import WebClient

_MOST_DOWNLOADS = 8  # most downloads that read from their sources at one time
# Number of the concurrent downloads that are reserved for the operator and admins.
_RESERVED_DOWNLOADS = 2
_CLOSE_SECONDS = 5.0  # seconds for which ``close`` waits for downloads
_TRIES = 2  # attempts of a download whose source changes meanwhile, or whose earlier part is damaged
_POLL_SECONDS = 0.1

logger = logging.getLogger("rootgraft.adapters")


@dataclass(frozen=True, slots=True)
class FetchedAdapter:
    """An adapter on this machine.

    Attributes:
        folder: folder with the adapter's two files, which is kept until it is released.
        origin: source of the adapter, pinned to the version found there.
    """

    folder: Path
    origin: AdapterSource


@dataclass(frozen=True, slots=True)
class Download:
    """A fetch in progress.

    Attributes:
        result: result of the fetch; awaiting it raises the errors of ``AdapterFetcher.fetch``.
        progress: progress of the fetch, which any thread may read.
    """

    result: Future[FetchedAdapter]
    progress: DownloadProgress


class AdapterFetcher:
    """Fetches adapters. Its methods may be called from any thread.

    Args:
        policy: rules for which sources may be loaded, and to which hosts downloads may connect.
        root: folder of the cache, made when the first adapter is fetched.
        most_cache_bytes: largest size of the cache.
        limits: limits of one download.
    """

    def __init__(self, policy: SourcePolicy, root: Path, most_cache_bytes: int, limits: DownloadLimits) -> None:
        self.policy = policy
        self._root = root
        self._most_cache_bytes = most_cache_bytes
        self._limits = limits
        self._lock = threading.Lock()
        self._cache: DownloadCache | None = None
        self._running: dict[asyncio.AbstractEventLoop, asyncio.Task[FetchedAdapter]] = {}
        self._closed = False
        self._slots = DownloadSlots(_MOST_DOWNLOADS, _RESERVED_DOWNLOADS)
        self._threads: set[threading.Thread] = set()

    @classmethod
    def of(cls, config: EngineConfig) -> AdapterFetcher:
        """Return the fetcher that the options describe.

        Raises:
            ConfigError: an entry of ``--adapter-sources`` is malformed or needs a package that is missing, or the
                adapters that requests will ask for cannot be stored.
        """
        policy = SourcePolicy(config.adapter_sources)
        if policy.names_buckets and find_spec("s3fs") is None:
            raise ConfigError(f"--adapter-sources: {NEEDS_EXTRA}")
        root = adapter_cache_folder(config.adapter_cache_dir)
        limits = DownloadLimits(config.max_adapter_bytes, config.adapter_download_timeout)
        fetcher = cls(policy, root, config.max_adapter_cache_bytes, limits)
        if config.adapter_sources:
            try:
                fetcher._opened_cache()
            except AdapterUnavailable as error:
                raise ConfigError(f"{error} Try: ls -ld {shlex.quote(str(root))}") from error
        return fetcher

    def begin(self, source: AdapterSource, *, trusted: bool = False, for_request: bool = False) -> Download:
        """Begin to fetch an adapter.

        Args:
            trusted: whether the operator has named the source, so that its host and folder need not be listed.
            for_request: whether a client's request has named the source. Such a download leaves slots free: for admins,
                and those of the current tenant for other tenants.
        """
        progress, result = DownloadProgress(), Future[FetchedAdapter]()
        result.set_running_or_notify_cancel()
        call = (result, self._run, source, _Standing(trusted, for_request, CURRENT_TENANT.get()), progress)
        thread = threading.Thread(target=settle, args=call, name="adapter-download", daemon=True)
        with self._lock:
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}
            thread.start()
        return Download(result, progress)

    def fetch(self, source: AdapterSource, *, trusted: bool = False) -> FetchedAdapter:
        """Fetch an adapter, and wait for it.

        Raises:
            AdapterNotFound: the adapter does not exist, or may not be read.
            RequestError: the source is not allowed, or its content is too large, damaged or not an adapter.
            AdapterUnavailable: the source does not answer, time is up, or the cache is full or cannot be written.
        """
        return self.begin(source, trusted=trusted).result.result()

    def release(self, fetched: FetchedAdapter) -> None:
        """Release an adapter that nobody reads any more."""
        self._opened_cache().release(fetched.folder)

    def bytes_freed(self, fetched: Iterable[FetchedAdapter]) -> int:
        """Return the bytes of the cache that would be unused after the release of these adapters."""
        return self._opened_cache().bytes_freed(each.folder for each in fetched)

    def stop(self) -> None:
        """Begin to end all downloads, and begin no others. Downloaded parts stay in the cache."""
        with self._lock:
            self._closed = True
            for loop, task in self._running.items():
                loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """End all downloads, wait for them for a few seconds, and release all adapters."""
        self.stop()
        until = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._cache is not None:
            self._cache.close()

    def _opened_cache(self) -> DownloadCache:
        with self._lock:
            if self._cache is None:
                self._cache = DownloadCache(self._root, self._most_cache_bytes)
            return self._cache

    def _run(self, source: AdapterSource, standing: _Standing, progress: DownloadProgress) -> FetchedAdapter:
        """Fetch on an event loop of this thread."""
        try:
            with asyncio.Runner(loop_factory=DaemonThreadLoop) as runner:
                return runner.run(self._watched(source, standing, progress))
        except EngineError:
            raise
        except asyncio.CancelledError:
            raise AdapterUnavailable("The server is shutting down.") from None
        except TimeoutError:
            raise AdapterUnavailable(
                f"{source} was not downloaded within {self._limits.seconds:g} seconds (--adapter-download-timeout). "
                "The part that was downloaded is kept, and the next attempt resumes there."
            ) from None
        except TransferBroken as error:
            raise AdapterUnavailable(f"{source} cannot be downloaded now: {error}.") from error
        except OSError as error:
            logger.error("the cache of adapters cannot be written: %s", error)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk of the cache is full" if full else "the cache cannot be written"
            raise AdapterUnavailable(f"{source} cannot be downloaded: {reason}.") from error
        except Exception as error:
            logger.exception("%s cannot be downloaded", source)
            raise AdapterUnavailable(f"{source} cannot be downloaded: {type(error).__name__}; see the log.") from error

    async def _watched(self, source: AdapterSource, standing: _Standing, progress: DownloadProgress) -> FetchedAdapter:
        """Fetch within the time limit, as a task that ``close`` can cancel."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        with self._lock:
            if self._closed:
                raise AdapterUnavailable("The server is shutting down.")
            self._running[loop] = task
        try:
            async with asyncio.timeout(self._limits.seconds):
                place = self._opened_cache(), self._slots
                return await _Fetch(*place, self.policy, self._limits, source, standing, progress).run()
        finally:
            with self._lock:
                del self._running[loop]


@dataclass(frozen=True, slots=True)
class _Standing:
    """The party that has named a source: the operator (trusted), an admin, or a client's request of a tenant."""

    trusted: bool
    for_request: bool
    tenant: str


class _Fetch:
    """One fetch, on one thread."""

    def __init__(
        self,
        cache: DownloadCache,
        slots: DownloadSlots,
        policy: SourcePolicy,
        limits: DownloadLimits,
        source: AdapterSource,
        standing: _Standing,
        progress: DownloadProgress,
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._limits = limits
        self._source = source
        self._progress = progress
        self._standing = standing
        self._client = None if self._is_at_hand() else _client_of(source, policy, standing)

    async def run(self) -> FetchedAdapter:
        """Return the adapter, from the cache or downloaded."""
        if self._client is None:
            found = self._from_cache(None)
            if found is not None:
                return found
            raise AdapterUnavailable(f"{self._source} has just been removed from the cache: try again.")
        for _ in range(_TRIES):
            try:
                remote = await self._client.find()
            except TransferBroken as error:
                found = self._from_cache(None)
                if found is None:
                    raise
                logger.warning("%s: %s; using the cached copy, %s", self._source, error, found.origin)
                return found
            try:
                return self._from_cache(remote.version) or await self._downloaded(remote)
            except SourceChanged as error:
                logger.warning("%s: %s; downloading it again", self._source, error)
        raise AdapterUnavailable(f"{self._source} changed during the download, {_TRIES} times in a row: try again.")

    def _is_at_hand(self) -> bool:
        """Return whether the source is pinned and its content is cached, so that the source need not be asked."""
        return self._source.is_pinned and self._known(None) is not None

    def _known(self, version: str | None) -> tuple[str, str] | None:
        """Return digest and version of the source's content, if it is in the cache.

        Args:
            version: version reported by the source; None for the version seen last, for a request only a version that
                requests may name.
        """
        digest = self._source.digest
        if digest:
            return (digest, "") if self._cache.holds(digest) else None
        if version == "":
            return None
        name, is_checked = self._name_of(version), version is not None or not self._standing.for_request
        found = self._cache.find(name, version)
        return self._cache.find(f"{name}{UNCHECKED}", version) if found is None and is_checked else found

    def _name_of(self, version: str | None) -> str:
        """Return the cache's name for a version: a commit of the Hub has the same name on every branch."""
        is_commit = self._source.scheme == "hf" and version
        return str(self._source.pinned(version, "") if is_commit and version else self._source)

    def _from_cache(self, version: str | None) -> FetchedAdapter | None:
        known = self._known(version)
        folder = None if known is None else self._cache.use(known[0])
        if known is None or folder is None:
            return None
        fetched = self._noted(folder, known[0], known[1])
        logger.info("%s: in the cache", fetched.origin)
        return fetched

    def _noted(self, folder: Path, digest: str, version: str) -> FetchedAdapter:
        """Return cached content as an adapter, and record to which version of its source it belongs."""
        if version:
            may_be_foreign = self._source.scheme == "hf" and self._source.revision not in ("", "main")
            is_unchecked = may_be_foreign and not self._standing.for_request
            for name in {str(self._source), self._name_of(version)}:
                self._cache.note(f"{name}{UNCHECKED}" if is_unchecked else name, version, digest)
        return FetchedAdapter(folder, self._source.pinned(version if self._source.scheme == "hf" else "", digest))

    async def _downloaded(self, remote: RemoteAdapter) -> FetchedAdapter:
        """Download into a folder that no other download uses, in this process or another."""
        self._limits.check_sizes(remote)
        resumable = remote.version and remote.config.can_resume and remote.weights.can_resume
        text = f"{self._source.scheme}://{self._source.location} {remote.version}" if resumable else uuid.uuid4().hex
        key = hashlib.sha256(text.encode()).hexdigest()
        while True:
            self._progress.state = "waiting for other downloads"
            # The slot is acquired first: so a task that waits for a slot does not block others that want the same
            # content.
            async with self._slots.slot(self._standing.tenant, for_request=self._standing.for_request):
                with self._cache.partial(key) as partial:
                    if partial is not None:
                        found = self._from_cache(remote.version)
                        return found or await self._downloaded_to(partial, remote, keep=bool(resumable))
            self._progress.state = "waiting for another download"
            await asyncio.sleep(_POLL_SECONDS)

    async def _downloaded_to(self, partial: Path, remote: RemoteAdapter, *, keep: bool) -> FetchedAdapter:
        assert self._client is not None
        began, keeps_part = time.monotonic(), False
        try:
            self._cache.reserve(partial, self._limits.bytes_of(remote))
            for file in (remote.config, remote.weights):
                await download_file(self._client, file, partial, self._limits, self._progress, self._source)
            digest = content_digest(partial)
            if self._source.digest not in ("", digest):
                raise RequestError(
                    f"{self._source} has other content: its SHA-256 is {digest}. Give that digest, or find out who "
                    "changed the files.",
                    code="adapter_digest_mismatch",
                )
            folder = self._cache.publish(partial, digest)
        except (TransferBroken, TimeoutError, asyncio.CancelledError):
            # After any other error, resuming from the downloaded part would fail again.
            keeps_part = keep
            raise
        finally:
            if not keeps_part:
                shutil.rmtree(partial, ignore_errors=True)
        fetched = self._noted(folder, digest, remote.version)
        logger.info("%s: downloaded, %s in %.1f s", fetched.origin, self._progress.amount, time.monotonic() - began)
        return fetched


def _client_of(source: AdapterSource, policy: SourcePolicy, standing: _Standing) -> SourceClient:
    """Return the client of a source, under the rules for the party that has named the source."""
    match source.scheme:
        case "hf":
            return HubClient(source, policy.allows_address, checks_commits=standing.for_request)
        case "s3":
            return ObjectStoreClient(source)
        case "file":
            return LocalClient(source, None if standing.trusted else policy.folders)
    return WebClient(_web_rules(source, policy, standing.trusted), source)


def _web_rules(source: AdapterSource, policy: SourcePolicy, trusted: bool) -> CheckedHttp:
    host, _, port = source.location.partition("/")[0].rpartition(":")
    named = (host.strip("[]"), int(port)) if host and port.isdecimal() else (source.location.partition("/")[0], 443)
    own = source.location if trusted else None
    return CheckedHttp(policy.allows_address, _listed_by(policy, own), trusted=frozenset({named} if trusted else ()))


def _listed_by(policy: SourcePolicy, own: str | None) -> Callable[[SplitResult], bool]:
    """Return the rule for redirects of web servers: only to listed places, and below the operator's own source."""

    def may_follow(target: SplitResult) -> bool:
        place = location_of("https", target.netloc + target.path) if target.scheme == "https" else None
        if place is None:
            return False
        return policy.lists("https", place) or (own is not None and place.startswith(f"{own}/"))

    return may_follow
