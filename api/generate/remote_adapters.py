"""Remote adapters: loads adapters from remote sources under a name, when an admin or a request asks for one.

    model: org/name ---> bring ---+
                                  +--> one download for each source --> engine --> the name can be used
    load_lora_adapter --> load ---+

An adapter that a request has loaded may be unloaded to make room for others, fairly among tenants. Adapters that the
operator or an admin has loaded are never unloaded for this. A request never changes the adapter to which a name refers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine.adapter_sources.download_cache import CacheFull
from ...engine.adapter_sources.named_sources import adapter_names, is_adapter
from ...engine.adapter_sources.source_uri import AdapterSource, has_scheme, is_hub_name, parse_source
from ...engine.errors import AdapterUnavailable, DeadlineExceeded, EngineError, RequestError, UnknownModel
from ...engine.serving.request_threads import on_request_thread
from ...engine.types import AdapterInfo
from ...tenancy.tenant_shares import TenantShares

if TYPE_CHECKING:
    from ...engine.adapter_sources.adapter_fetcher import AdapterFetcher, Download, FetchedAdapter
    from ...engine.serving.engine_like import EngineLike

WAIT_SECONDS = 60.0
"""Longest time in seconds that a request waits for its adapter."""
REMEMBERED_SECONDS = 30.0
"""Seconds for which requests get the error of a failed download without a new attempt."""
MOST_LOADS = 4
"""Largest number of downloads of one tenant at a time, provided that as many are left to other tenants."""
MOST_WAITING = 256
"""Largest number of requests of one tenant that wait for adapters."""
# Largest number of names that one load may unload to make room in the cache on disk.
_MOST_EVICTIONS = 8

logger = logging.getLogger("rootgraft.adapters")


class _Passing(AdapterUnavailable):
    """Raised if there is no room now, or the name is being loaded.

    This may change at once, so the error is not remembered.
    """


class RemoteAdapters:
    """Loads and unloads the adapters of one engine that come from remote sources. Belongs to the server's event loop.

    Args:
        fetcher: downloads adapters to this machine.
        client: client of the engine.
        lora_dir: ``--lora-dir``; its folders take precedence over names on the Hub.
        most_names: largest number of adapters that requests may load; beyond it, the least recently used one is
            unloaded.
        most_adapters: largest number of adapters of the engine, including those of the operator and of admins.
        named: adapters of ``--lora-modules`` that were downloaded at the start.
        clock: returns monotonic time in seconds.
    """

    def __init__(
        self,
        fetcher: AdapterFetcher,
        client: EngineLike,
        *,
        lora_dir: str | None = None,
        most_names: int = 1,
        most_adapters: int = 1,
        named: Mapping[str, FetchedAdapter] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetcher = fetcher
        self._client = client
        self._root = None if lora_dir is None else Path(lora_dir)
        self._most_names, self._most_adapters = most_names, most_adapters
        self._clock = clock
        self._fetched = {str(each.folder): each for each in (named or {}).values()}
        self._downloads: dict[str, tuple[AdapterSource, Download]] = {}  # Source and download in progress, by name.
        # The loads for which requests wait, by name.
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._loading = TenantShares(most_names)
        self._waiting_for: Counter[str] = Counter()
        self._failures: dict[str, tuple[float, EngineError]] = {}
        # The tenant that loaded each name by a request; the most recently used name is the last one.
        self._brought: OrderedDict[str, str] = OrderedDict()

    def source_of(self, path: str) -> AdapterSource | None:
        """Return the source that ``lora_path`` of a request names; None for a folder in ``--lora-dir``.

        Raises:
            RequestError: the source is malformed, or ``--adapter-sources`` does not list it.
        """
        if has_scheme(path):
            source = parse_source(path, "lora_path")
            self._fetcher.policy.check(source, "lora_path")
            return source
        return parse_source(path) if self.may_name(path) else None

    def folder_names(self) -> list[str]:
        """Return the names of the folders in ``--lora-dir``. Reads the disk, so it must be called on a thread."""
        return [] if self._root is None else adapter_names(self._root)

    async def has_folder(self, name: str) -> bool:
        """Return whether there is a folder of this name below ``--lora-dir``."""
        return self._root is not None and await on_request_thread(partial(is_adapter, self._root, name))

    def may_name(self, name: str) -> bool:
        """Return whether a request may load an adapter of this name: an allowed Hub name ``org/name@revision``."""
        return is_hub_name(name) and self._fetcher.policy.allows(parse_source(name)) and not self._is_folder(name)

    def origin(self, info: AdapterInfo) -> AdapterSource | None:
        """Return the source and revision of an adapter; None if it was loaded from a folder."""
        found = self._fetched.get(info.path)
        return None if found is None else found.origin

    def downloads(self) -> list[dict[str, object]]:
        """Return the downloads in progress, as ``/v1/adapters`` lists them."""
        rows = []
        for name, (source, download) in self._downloads.items():
            place = source.last_part if source.scheme == "file" else str(source)
            info = AdapterInfo(name, place, "downloading", "source", bytes=download.progress.total)
            rows.append({**asdict(info), "bytes_here": download.progress.done})
        return rows

    async def load(self, name: str, source: AdapterSource, *, replace: bool) -> None:
        """Load an adapter under a name, for an admin.

        Raises:
            RequestError: the adapter cannot be loaded, or the name is in use and ``replace`` is not set.
            AdapterUnavailable: the adapter's source does not answer, or another call is loading the adapter.
            EngineDead: the engine has ended.
        """
        if not replace and name in self._client.adapters:
            raise RequestError(
                f"The adapter {name!r} is already loaded: unload it, or ask to replace it.", param="name"
            )
        await self._load(name, source, replace=replace)
        self.forget(name)

    def forget(self, name: str) -> None:
        """Record that an admin has loaded or unloaded a name, so that requests do not unload it.

        Also forgets the name's error.
        """
        self._brought.pop(name, None)
        self._failures.pop(name, None)

    def touch(self, name: str) -> None:
        """Record that a request uses a loaded adapter, so that the adapter is unloaded later than others."""
        if name in self._brought:
            self._brought.move_to_end(name)

    async def bring(self, name: str, tenant: str, timeout: float | None) -> None:
        """Load the adapter that a request names.

        Other requests that name it in the meantime wait for the same download.

        Args:
            timeout: remaining seconds of the request; None for no limit.

        Raises:
            UnknownModel: there is no such adapter, or this server may not read it.
            RequestError: the adapter is too large, is not an adapter, or belongs to another base model.
            AdapterUnavailable: the adapter is still being downloaded, or its source does not answer.
            DeadlineExceeded: the request has no time left.
        """
        self._raise_remembered(name)
        task = self._loads.get(name) or self._begin(name, tenant)
        if self._waiting_for[tenant] >= MOST_WAITING:
            raise AdapterUnavailable(f"{MOST_WAITING} requests already wait for adapters: try again later.")
        self._waiting_for[tenant] += 1
        try:
            limit = WAIT_SECONDS if timeout is None else min(WAIT_SECONDS, timeout)
            await asyncio.wait({task}, timeout=limit)
        finally:
            self._waiting_for[tenant] -= 1
        if task.cancelled():
            raise AdapterUnavailable("The server is shutting down.")
        if task.done():
            return task.result()
        if timeout is not None and timeout <= WAIT_SECONDS:
            raise DeadlineExceeded(f"The adapter was not loaded within the request's timeout of {timeout:g} seconds.")
        raise AdapterUnavailable(f"The adapter {name!r} is being loaded: {self._state(name)}. Try again later.")

    async def release_unused(self) -> None:
        """Release the files of adapters that the engine does not have any more."""
        if not self._fetched:
            return
        known = dict(self._fetched)
        used = {info.path for info in await self._client.list_adapters()}
        for folder, fetched in known.items():
            if folder not in used and self._fetched.pop(folder, None) is not None:
                await asyncio.to_thread(self._fetcher.release, fetched)

    def _begin(self, name: str, tenant: str) -> asyncio.Task[None]:
        own = self._loading.held(tenant)
        if own >= MOST_LOADS or (own and self._loading.left_for(tenant) < 1):
            raise AdapterUnavailable(f"{own} adapters are already being downloaded: try again later.")
        self._loading.take(tenant)
        task = self._loads[name] = asyncio.create_task(self._bring(name, tenant))
        # The task's error is read here, because asyncio logs unread errors and there may be no request that waits.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    async def _bring(self, name: str, tenant: str) -> None:
        try:
            # This load is already included in the count.
            if len(self._loads) > self._most_names:
                raise _Passing(
                    f"{self._most_names} adapters named by requests are already being loaded, half of "
                    "--max-adapters: try again later."
                )
            while self._brought and (len(self._brought) + len(self._loads) > self._most_names or self._is_full()):
                await self._unload(_next_to_unload(self._brought))
            # The request is refused before anything is downloaded.
            if self._is_full():
                raise _Passing(
                    f"{self._most_adapters} adapters are loaded or being loaded, which is the limit "
                    "(--max-adapters): unload one first."
                )
            await self._load_with_room(name)
            self._brought[name] = tenant
        except EngineError as error:
            if isinstance(error, RequestError) and error.param is None:
                error.param = "model"
            if not isinstance(error, CacheFull | _Passing):
                self._remember(name, error)
            raise
        finally:
            del self._loads[name]
            self._loading.give_back(tenant)

    def _is_full(self) -> bool:
        """Return whether the engine has room for no further adapter."""
        names = {*self._client.adapters, *self._downloads}
        return len(names) >= self._most_adapters

    async def _load_with_room(self, name: str) -> None:
        """Load an adapter. If the disk cache is full, unload adapters that requests loaded, if that frees enough."""
        evictions = _MOST_EVICTIONS
        while True:
            try:
                return await self._load(name, parse_source(name), replace=False, for_request=True)
            except CacheFull as error:
                victims = await self._enough_for(error.missing, evictions)
                if not victims:
                    raise
                evictions -= len(victims)
                for victim in victims:
                    await self._unload(victim)

    async def _enough_for(self, num_bytes: int, most: int) -> list[str]:
        """Return the first names to unload that free ``num_bytes`` on disk; empty if all of them free too little."""
        infos = await self._client.list_adapters()
        idle = {info.name: info.path for info in infos if info.state == "ready" and not info.pins}
        left = OrderedDict((name, owner) for name, owner in self._brought.items() if name in idle)
        victims: list[str] = []
        while left and len(victims) < most:
            victims.append(_next_to_unload(left))
            del left[victims[-1]]
            fetched = [self._fetched[idle[each]] for each in victims if idle[each] in self._fetched]
            if await asyncio.to_thread(self._fetcher.bytes_freed, fetched) >= num_bytes:
                return victims
        return []

    async def _load(self, name: str, source: AdapterSource, *, replace: bool, for_request: bool = False) -> None:
        await self.release_unused()
        if name in self._downloads:
            raise _Passing(f"An adapter with the name {name!r} is already being downloaded: {self._state(name)}.")
        self._downloads[name] = source, self._fetcher.begin(source, for_request=for_request)
        try:
            fetched = await asyncio.wrap_future(self._downloads[name][1].result)
            try:
                await self._client.load_adapter(name, str(fetched.folder), replace=replace, trusted=True)
            except BaseException as error:
                await asyncio.to_thread(self._fetcher.release, fetched)
                if isinstance(error, AdapterUnavailable):
                    raise _Passing(str(error)) from None
                if isinstance(error, RequestError) and error.param != "name":
                    raise RequestError(
                        f"{fetched.origin} cannot be served: {error}", param="model", code="adapter_not_supported"
                    ) from None
                raise
            self._fetched[str(fetched.folder)] = fetched
        finally:
            del self._downloads[name]

    async def _unload(self, name: str) -> None:
        """Unload an adapter, if a request has loaded it and no admin has taken it over."""
        if self._brought.pop(name, None) is None:
            return
        logger.info("unloading %s, the least recently used, for another adapter", name)
        with contextlib.suppress(UnknownModel):
            await self._client.unload_adapter(name)
        await self.release_unused()

    def _is_folder(self, name: str) -> bool:
        try:
            return self._root is not None and (self._root / name).is_dir()
        except OSError:
            return False

    def _state(self, name: str) -> str:
        """Return the state of a load as text."""
        if name not in self._downloads:
            return "waiting for its turn"
        progress = self._downloads[name][1].progress
        return f"{progress.state}, {progress.amount}" if progress.total else progress.state

    def _remember(self, name: str, error: EngineError) -> None:
        now = self._clock()
        self._failures = {key: found for key, found in self._failures.items() if found[0] > now}
        self._failures[name] = now + REMEMBERED_SECONDS, error
        logger.warning("%s: %s", name, error)

    def _raise_remembered(self, name: str) -> None:
        until, error = self._failures.get(name, (0.0, None))
        if error is not None and self._clock() < until:
            raise error.with_traceback(None)


def _next_to_unload(brought: Mapping[str, str]) -> str:
    """Return the least recently used name of the tenant that has loaded the most names."""
    tenant = Counter(brought.values()).most_common(1)[0][0]
    return next(name for name, owner in brought.items() if owner == tenant)
