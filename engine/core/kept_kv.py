"""Kept KV: creates prefix caches with the KV tiers of the options, and transfers KV. Called on the core's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ..config import EngineConfig
from ..kv_cache.block_codec import BlockCodec
from ..kv_cache.block_keys import BlockScheme
from ..kv_cache.kv_event_publisher import KvEventPublisher
from ..kv_cache.kv_events import KvEventLog, TierEventLog
from ..kv_cache.kv_tiers import KvTiers
from ..kv_cache.make_tiers import make_tiers, plain_scheme
from ..kv_cache.prefix_cache import PrefixCache
from ..messages import (
    CachedPrefixes,
    KvBlocks,
    ListPrefixes,
    Message,
    ReadKv,
    Submit,
)
from ..scheduling.session_pins import SessionPins
from ..sequence.sequence import Sequence
from .hot_prefixes import hot_prefixes, session_prefixes, within
from .kv_exports import KvExports
from .prefix_transfer import PrefixTransfer
from .session_transfer import SessionTransfer
from .step_worker import StepWorker

__all__ = ["KeptKv", "PrefixTransfer", "SessionTransfer"]


class KeptKv:
    """Creates the prefix caches of an engine core. The KV tiers outlive each cache.

    Attributes:
        tiers: the stores of KV outside of the device that the options configure; None without a store.

    Raises:
        ConfigError: the model or the device does not support the tiers, or the folder or the key cannot be used.
    """

    def __init__(self, config: EngineConfig, worker: StepWorker) -> None:
        self._config, self._worker = config, worker
        self._ended: list[Message] = []  # Replies to reads that ended because their cache was reset.
        of_tiers = TierEventLog() if config.kv_events.is_on else None
        self.tiers = make_tiers(config, worker.kv_pages, worker.num_pages, of_tiers)
        self._events, self._publisher = _events(config, worker, self.tiers, of_tiers)
        self._exports = KvExports(BlockCodec(self.tiers.scheme) if self.tiers else None, worker.kv_pages)

    def new_cache(self) -> PrefixCache:
        """Return an empty prefix cache, for a pool whose content is no longer valid."""
        if self.tiers:
            self.tiers.reset()
        self._ended += self._exports.clear()
        if self._events:
            self._events.clear()
        config, worker = self._config, self._worker
        return PrefixCache(
            worker.num_pages,
            config.block_size,
            sharing=config.enable_prefix_caching,
            states=worker.states,
            tiers=self.tiers,
            events=self._events,
        )

    def clear(self, cache: PrefixCache) -> None:
        """Remove all cached KV that no running sequence uses, from the pool and from all tiers."""
        cache.clear()
        if self.tiers:
            self.tiers.clear()
        if self._events and self._events.is_empty:
            self._events.clear()
        self.publish()

    def publish(self) -> None:
        """Publish the KV events since the last call. Events of the tiers also occur while no step is computed."""
        if self._events and self._publisher:
            self._publisher.publish(self._events.take())

    @property
    def has_work(self) -> bool:
        """Whether another replica's read of pages is not finished."""
        return self._exports.has_work or bool(self._ended)

    def take(self, message: ReadKv | KvBlocks) -> None:
        """Start to read pages for another replica, or store pages that another replica has sent."""
        if isinstance(message, ReadKv):
            self._exports.add(message)
        elif self.tiers and self.tiers.peers:
            self.tiers.peers.take(message)

    def list_prefixes(
        self, message: ListPrefixes, cache: PrefixCache, pins: SessionPins, names: Mapping[str, str]
    ) -> CachedPrefixes:
        """Return the prefixes that are most useful to another replica.

        Together they fill at most half of the other replica's tier ``peer`` (its store for KV of other replicas), if
        that tier is as large as this replica's.

        Args:
            names: names of the loaded adapters by digest.
        """
        if not (self.tiers and self.tiers.peers):
            return CachedPrefixes(message.id, ())
        scheme = self.tiers.scheme
        # The other half is left for the copies that waiting requests cause at the same time.
        most_pages = self.tiers.peers.store.capacity // 2 // scheme.page_bytes
        found = session_prefixes(pins) if message.of_sessions else hot_prefixes(cache)
        return CachedPrefixes(message.id, within(found, scheme, names, most_pages))

    def expect(self, submit: Submit) -> None:
        """Record that another replica may have the KV of a part of a prompt."""
        if submit.peer_tokens and self.tiers and self.tiers.peers:
            self.tiers.peers.expect(submit.id, submit.peer_tokens)

    def take_messages(
        self, cache: PrefixCache, sequence_of: Callable[[int], Sequence | None], is_open: Callable[[int], bool]
    ) -> list[Message]:
        """Return pages for other replicas, and requests for pages of other replicas.

        Also publishes the events of the step.

        See ``KvExports.poll`` for the arguments.
        """
        self.publish()
        ended, self._ended = self._ended, []
        pages = self._exports.poll(cache, sequence_of, is_open) if self._exports.has_work else []
        asked = self.tiers.peers.take_requests() if self.tiers and self.tiers.peers else []
        return [*ended, *pages, *asked]

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop what is stored about sequences that have ended."""
        if self.tiers and self.tiers.peers:
            self.tiers.peers.forget(numbers)

    def rest(self) -> None:
        """Have the tiers write the pages that they hold back while sequences are computed."""
        if self.tiers:
            self.tiers.rest()

    def transfer(self, cache: PrefixCache, *, sealed: bool = False) -> PrefixTransfer:
        """Return the object that saves and loads the KV of prompts, for use between two steps.

        Args:
            sealed: whether to encrypt with the key of ``--kv-disk-key-file``, if the option is set.

        Raises:
            ConfigError: the KV of this model cannot be stored outside of the pool.
        """
        key_of = self._config if sealed else None
        return PrefixTransfer(cache, self._worker.kv_pages, self._worker.base_digest, key_of)

    def sessions(self, cache: PrefixCache, pins: SessionPins, has_adapter: Callable[[str], bool]) -> SessionTransfer:
        """Return the object that releases, exports and imports sessions, for use between two steps."""
        open_transfer = partial(self.transfer, cache, sealed=True)
        return SessionTransfer(pins, open_transfer, self._worker.base_digest, has_adapter)

    def stats(self) -> dict[str, float]:
        """Return gauges and counters of the tiers by name."""
        return self.tiers.stats() if self.tiers else {}

    def close(self) -> None:
        """End the tiers' threads after they have written all blocks that they were given, and the events' thread."""
        if self.tiers:
            self.tiers.close()
        if self._publisher:
            self._publisher.close()


def _events(
    config: EngineConfig, worker: StepWorker, tiers: KvTiers | None, of_tiers: TierEventLog | None
) -> tuple[KvEventLog | None, KvEventPublisher | None]:
    """Return the objects that collect and publish KV events; None if the options request no events.

    Raises ConfigError.
    """
    if not config.kv_events.is_on:
        return None, None
    pages, size = worker.kv_pages, config.block_size
    plain = plain_scheme(pages, size) if pages else BlockScheme("", size, 0)
    return KvEventLog(tiers.scheme if tiers else plain, of_tiers), KvEventPublisher(config.kv_events)
