"""Model versions: serves adapters of the catalogue, each version under a name of its own in the engine.

    add --> fetch, check digest --> load as NAME@DIGEST12 --> ready in the catalogue
    request for NAME --> version by weight --> NAME@DIGEST12, to its end

The content behind a name in the engine never changes, so no answer is a mixture of two versions. All versions that are
ready stay loaded; promote, canary and rollback only change the catalogue.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...engine.adapter_sources.source_uri import AdapterSource, parse_source
from ...engine.errors import (
    AdapterUnavailable,
    ConfigError,
    EngineDead,
    EngineError,
    RequestError,
    quoted,
)
from .model_catalog import ModelCatalog, ModelVersion, VersionState, check_name
from .traffic_split import pick_version, sticky_point

if TYPE_CHECKING:
    from ...engine.adapter_sources.adapter_fetcher import AdapterFetcher, FetchedAdapter
    from ...engine.serving.engine_like import EngineLike

UNLOAD_SECONDS = 60.0
"""Time for which a removed version stays loaded, for requests that have chosen it and are not in the engine yet."""

_KEEP_SECONDS = 0.05  # seconds between two checks whether a version is being added

logger = logging.getLogger("rootgraft.models")


def engine_name(name: str, digest: str) -> str:
    """Return the name of a version in the engine."""
    return f"{name}@{digest[:12]}"


class ModelVersions:
    """Adapters of the catalogue in one engine. To be used only on the server's event loop.

    Args:
        draw: returns a random number in [0, 1) for a request without a session.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        fetcher: AdapterFetcher,
        client: EngineLike,
        *,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.catalog = catalog
        self._fetcher = fetcher
        self._client = client
        self._draw = draw
        self._weights: dict[str, dict[str, int]] = {}
        self._public: dict[str, tuple[str, str]] = {}  # engine's name -> name and digest, of loaded versions
        self._fetched: dict[str, FetchedAdapter] = {}  # by engine's name
        self._adding: set[str] = set()
        self._is_kept = False
        self._unloads: dict[str, asyncio.Task[None]] = {}
        for name in catalog.names():
            self._weights[name] = catalog.weights(name)

    @property
    def served(self) -> Mapping[str, Mapping[str, int]]:
        """Public names for requests, with the weights of their digests."""
        return {name: weights for name, weights in self._weights.items() if weights}

    def public_name(self, adapter: str) -> str | None:
        """Return the public name of a version, by its name in the engine; None if the catalogue has no such version."""
        return self._public[adapter][0] if adapter in self._public else None

    def has_name(self, name: str) -> bool:
        """Return whether the catalogue has a name, served or not."""
        return name in self._weights

    def is_offered(self, adapter: str) -> bool:
        """Return whether requests may ask for a version by its name in the engine, until it is unloaded."""
        return adapter in self._public and adapter not in self._unloads

    def version_of(self, adapter: str | None) -> str | None:
        """Return the digest of a version by its name in the engine; None if the catalogue has no such version."""
        return None if adapter is None or adapter not in self._public else self._public[adapter][1]

    def pick(self, name: str, tenant: str, session: str | None) -> str:
        """Return the name in the engine of the version that answers a request.

        Requests of one session (``prompt_cache_key``) get the same version as long as the weights do not change,
        because their turns share a prefix and a user should not see the model change. For all other requests the
        version is drawn independently: if each API key had a fixed version, a few keys with much traffic would distort
        the shares.
        """
        point = self._draw() if session is None else sticky_point(name, tenant, session)
        return engine_name(name, pick_version(self._weights[name], point))

    async def restore(self, taken: Collection[str] = ()) -> None:
        """Load the catalogue's versions. A version that cannot be loaded is retired.

        Args:
            taken: names of the base model, which no catalogue name may equal.

        Raises:
            ConfigError: a version that gets requests cannot be loaded, or a name of the catalogue is already in use.
            EngineDead: the engine has ended.
        """
        for name in self.catalog.names():
            if name in taken or name in self._client.adapters:
                what = "the base model" if name in taken else "an adapter of --lora-modules"
                raise ConfigError(f"--model-catalog: {what} also has the name {name}: rename one of them.")
            for version in self.catalog.versions(name):
                try:
                    await self._load(version.name, version.digest, parse_source(version.source))
                except EngineDead:
                    raise
                except EngineError as error:
                    if version.weight:
                        raise ConfigError(
                            f"--model-catalog: the version {version.digest[:12]} of {name} gets requests but cannot "
                            f"be loaded: {error}"
                        ) from error
                    self.catalog.remove(name, version.digest)
                    self._refresh(name)
                    logger.warning("the version %s of %s is retired: %s", version.digest[:12], name, error)

    async def add(self, name: str, source: AdapterSource, digest: str | None = None) -> ModelVersion:
        """Download a version, check its content and load it. It gets no requests yet.

        Args:
            digest: SHA-256 that the content must have; None for any.

        Raises:
            RequestError: name or digest is malformed, the content has another digest, or the content is not an adapter
                for the model.
            AdapterUnavailable: the source does not answer, another version is being added to the name, or changes of
                the catalogue are refused.
        """
        self._check_changes()
        check_name(name)
        if name not in self._weights and name in self._client.adapters:
            raise RequestError(
                f"An adapter outside of the catalogue already has the name {quoted(name)}.", param="name"
            )
        if name in self._adding:
            raise AdapterUnavailable(f"A version of {quoted(name)} is being added: try again later.")
        self._adding.add(name)
        try:
            fetched = await asyncio.wrap_future(self._fetcher.begin(source).result)
            return await self._admit(name, fetched, digest)
        finally:
            self._adding.discard(name)

    async def _admit(self, name: str, fetched: FetchedAdapter, digest: str | None) -> ModelVersion:
        found = await self._digest_of(fetched)
        try:
            if digest is not None and digest != found:
                raise RequestError(
                    f"The content of {fetched.origin} has the SHA-256 {found}, not {quoted(digest)}.",
                    param="digest",
                    code="digest_mismatch",
                )
            taken = self._public.get(engine_name(name, found))
            if taken is not None and taken[1] != found:
                raise RequestError("Another version's digest begins with the same 12 digits.", param="source")
            is_new = self.catalog.begin(name, found, str(fetched.origin))
        except BaseException:
            await asyncio.to_thread(self._fetcher.release, fetched)
            raise
        if not is_new:
            await asyncio.to_thread(self._fetcher.release, fetched)
            return self.catalog.find(name, found)
        self._weights.setdefault(name, {})
        loaded = False
        try:
            await self._load_fetched(name, found, fetched)
            loaded = True
        finally:
            self.catalog.finish(name, found, verified=loaded)
            self._refresh(name)
        return self.catalog.find(name, found)

    async def _digest_of(self, fetched: FetchedAdapter) -> str:
        from ...engine.adapter_sources.remote_files import content_digest

        return fetched.origin.digest or await asyncio.to_thread(content_digest, fetched.folder)

    def promote(self, name: str, version: str, by: str) -> None:
        """Send all new requests to a version. Raises as ``ModelCatalog.promote``."""
        self._check_changes()
        self.catalog.promote(name, version, by)
        self._refresh(name)

    def canary(self, name: str, version: str, weight: int, by: str) -> None:
        """Send a share of new requests to a version. Raises as ``ModelCatalog.canary``."""
        self._check_changes()
        self.catalog.canary(name, version, weight, by)
        self._refresh(name)

    def rollback(self, name: str, by: str) -> None:
        """Undo the last promote or canary. Raises as ``ModelCatalog.rollback``."""
        self._check_changes()
        self.catalog.rollback(name, by)
        self._refresh(name)

    def remove(self, name: str, version: str | None, by: str) -> tuple[str, ...]:
        """Retire a version, or a name with all its versions. Returns the digests. Raises as ``ModelCatalog.remove``."""
        self._check_changes()
        gone = self.catalog.remove(name, version, by)
        self._refresh(name)
        for digest in gone:
            own = engine_name(name, digest)
            self._unloads[own] = asyncio.create_task(self._unload_later(own))
            # Not in the task itself, which never runs if it is cancelled before its first step.
            self._unloads[own].add_done_callback(partial(self._forget_unload, own))
        return gone

    async def keep(self) -> None:
        """Refuse all changes from now on, and wait for those in progress: another engine reads the catalogue."""
        self._is_kept = True
        while self._adding:
            await asyncio.sleep(_KEEP_SECONDS)

    def free(self) -> None:
        """Allow changes again after ``keep``."""
        self._is_kept = False

    def _check_changes(self) -> None:
        """Raise AdapterUnavailable while changes are refused."""
        if self._is_kept:
            raise AdapterUnavailable("The base model is being replaced: try again later.")

    def close(self) -> None:
        """Cancel operations in progress; versions are unloaded with the engine."""
        for task in self._unloads.values():
            task.cancel()

    async def _load(self, name: str, digest: str, source: AdapterSource) -> None:
        fetched = await asyncio.wrap_future(self._fetcher.begin(source, trusted=True).result)
        if await self._digest_of(fetched) != digest:
            await asyncio.to_thread(self._fetcher.release, fetched)
            raise RequestError(f"The content of {source} has changed.", code="digest_mismatch")
        await self._load_fetched(name, digest, fetched)

    async def _load_fetched(self, name: str, digest: str, fetched: FetchedAdapter) -> None:
        own = engine_name(name, digest)
        if (unload := self._unloads.get(own)) is not None:
            if own in self._public:
                # The version was removed, but the engine has not unloaded it yet: keep it loaded.
                unload.cancel()
            await asyncio.wait({unload})
        try:
            if own not in self._public:
                if own in self._client.adapters:
                    raise RequestError(
                        f"An adapter outside of the catalogue already has the name {quoted(own)}.", param="name"
                    )
                await self._client.load_adapter(own, str(fetched.folder), trusted=True)
        except BaseException:
            await asyncio.to_thread(self._fetcher.release, fetched)
            raise
        before = self._fetched.get(own)
        self._public[own], self._fetched[own] = (name, digest), fetched
        if before is not None:
            await asyncio.to_thread(self._fetcher.release, before)

    async def _unload_later(self, own: str) -> None:
        await asyncio.sleep(UNLOAD_SECONDS)
        del self._public[own]
        fetched = self._fetched.pop(own)
        try:
            await self._client.unload_adapter(own)
        except EngineError as error:
            logger.warning("%s was not unloaded: %s", own, error)
        await asyncio.to_thread(self._fetcher.release, fetched)

    def _forget_unload(self, own: str, _: asyncio.Task[None]) -> None:
        del self._unloads[own]

    def _refresh(self, name: str) -> None:
        """Read the versions to which a name points; new requests follow them."""
        self._weights[name] = self.catalog.weights(name)
        if not any(each.state is not VersionState.RETIRED for each in self.catalog.versions(name)):
            del self._weights[name]
