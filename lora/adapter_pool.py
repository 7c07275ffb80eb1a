"""Adapter pool: all adapters of an engine, with their names and versions, background loads, host cache and device
slots.

    disk ---- background ----> host cache ---- install ----> slot

The engine's thread calls every method, and no method reads a file. Background threads read files: some threads read new
adapters, and a tenant may use at most as many of them as it leaves free for others. Other threads read evicted adapters
again, so that a slot does not wait for many new loads. ``poll`` returns the results once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Semaphore
from typing import TypeVar

from ..kernels.device_memory import DeviceMemoryError, is_out_of_memory, on_device
from ..tenancy.tenant_shares import TenantShares
from ..tenancy.tenant_threads import TenantThreads
from ..tenancy.thread_calls import NoThread
from .device_slots import SlotPool
from .errors import AdapterError, AdapterLimit
from .host_cache import HostCache
from .lora_step import AdapterBank
from .prepare_factors import PreparedAdapter
from .read_adapter import AdapterReader
from .registry import AdapterRegistry, AdapterVersion
from .safe_paths import check_name
from .sum_parts import SumPart

T = TypeVar("T")

# Largest number of concurrent loads that read files.
_MOST_LOADS = 2
# Largest number of concurrent reads of evicted adapters.
_MOST_FETCHES = 4
# Largest number of loaded adapters that wait for ``poll``. Later loads are held back, which limits memory.
_MOST_UNPOLLED = 4


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a ``load``: the new version, or the error."""

    name: str
    version: AdapterVersion | None
    error: AdapterError | None


@dataclass(frozen=True, slots=True)
class Broken:
    """A version whose files could not be read again. The sequences of the version must end with this error."""

    version: AdapterVersion
    error: AdapterError


AdapterCheck = Callable[[PreparedAdapter], str]
"""Returns the identity of an adapter's tokenizer; raises AdapterError if the adapter must not be served."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load in progress. ``wanted`` is true until the load's name is unloaded."""

    name: str
    path: str
    trusted: bool
    public: str
    tenant: str
    check: AdapterCheck
    parts: tuple[SumPart, ...] = ()
    future: Future[tuple[PreparedAdapter, str]] = field(default_factory=Future)
    wanted: bool = True


class AdapterPool:
    """Names, versions, memory and slots of all adapters.

    Loads of one name end in the order of the requests; loads of different names end as their files arrive.

    Args:
        reader: reader of adapters for this base model.
        max_loras: number of device slots.
        max_adapters: largest number of names, and of loads in progress.
        max_cpu_bytes: limit on the bytes of adapters in host memory.
        patience: number of steps that an adapter waits before a slot is closed to new sequences of other adapters.
        max_own: number of slots for adapters with an embedding or a head of their own; None for all slots.
        bank: moves adapters into slots; None to create one for the reader's layout.

    Attributes:
        registry: names and versions. Callers may read, pin and unpin versions.
        slots: slots for the scheduler: ``acquire``, ``release`` and ``prefetch`` take load ids and slots.
        bank: the factors in the slots, for the model runner.
        cache: adapters in host memory.
    """

    def __init__(
        self,
        reader: AdapterReader,
        *,
        max_loras: int,
        max_adapters: int,
        max_cpu_bytes: int,
        patience: int,
        max_own: int | None = None,
        bank: AdapterBank | None = None,
    ) -> None:
        self.registry = AdapterRegistry(max_adapters)
        self.bank = AdapterBank(reader.layout, max_loras) if bank is None else bank
        self.cache = HostCache(max_cpu_bytes)
        self.slots = SlotPool(
            max_loras,
            patience,
            self._fetch,
            self._install,
            self._clear,
            max_own,
            lambda load_id: self._version(load_id).own.has_matrix,
        )
        self._reader = reader
        self._max_own = max_loras if max_own is None else max_own
        self._loader = TenantThreads(_MOST_LOADS, "adapter-loads")
        self._shares = TenantShares(max_adapters)
        self._fetcher = TenantThreads(_MOST_FETCHES, "adapter-fetches")
        self._room = Semaphore(_MOST_UNPOLLED)
        # Loads are kept in the order of their requests.
        self._loads: list[_Load] = []
        self._fetches: dict[int, Future[PreparedAdapter]] = {}
        # Adapters that are being copied from host memory to the device, by load id. Their slots wait.
        self._arriving: dict[int, PreparedAdapter] = {}
        self._broken: list[Broken] = []
        # Maps a slot to the digest of its adapter.
        self._pinned: dict[int, str] = {}

    @property
    def loading(self) -> list[str]:
        """Names of the loads in progress, in the order of their requests."""
        return [load.name for load in self._loads]

    def load(
        self,
        name: str,
        path: str,
        check: AdapterCheck = lambda adapter: "",
        *,
        trusted: bool = False,
        public: str = "",
        tenant: str = "",
    ) -> None:
        """Start loading the adapter in a folder under a new or used name; ``poll`` returns the result.

        Until the load succeeds, the name keeps its current version.

        Args:
            check: checks the adapter, on the thread that has read it.
            trusted: whether the path may lead outside the folder of adapters.
            public: name that counts towards the limit of names; "" for ``name``.
            tenant: tenant whose share of the loads is used.

        Raises:
            AdapterError: the name is invalid.
            AdapterLimit: the limit on loaded and loading adapters is reached, in total or for the tenant.
        """
        check_name(name)
        self.registry.check_room(name, public)
        self._add(_Load(name, path, trusted, public, tenant, check))

    def load_sum(self, name: str, parts: tuple[SumPart, ...], tokenizer: str, *, tenant: str = "") -> None:
        """Start loading a weighted sum of loaded adapters under a separate name. ``poll`` returns the result.

        Args:
            tokenizer: identity of the tokenizer of all parts.
            tenant: tenant whose share of loads and of sums is used.

        Raises:
            AdapterLimit: too many adapters are being loaded, in total or for the tenant.
        """
        self._add(_Load(name, name, False, "", tenant, lambda adapter: tokenizer, parts))

    def _add(self, load: _Load) -> None:
        if self._shares.left_for(load.tenant) < 1:
            raise AdapterLimit(f"{len(self._loads)} adapters are being loaded: try again later.")
        self._shares.take(load.tenant)
        is_next = load.name not in self.loading
        self._loads.append(load)
        # Loads of one name end in order. A load that waits for another load uses neither a thread nor memory.
        if is_next:
            self._begin(load)

    def unload(self, name: str) -> None:
        """Remove a name. Sequences that use its version continue; loads of the name in progress are discarded.

        Raises:
            AdapterError: no such name is loaded or being loaded.
        """
        running = [load for load in self._loads if load.name == name and load.wanted]
        for load in running:
            load.wanted = False
        if self.registry.get(name) is not None or not running:
            self.registry.remove(name)

    def poll(self) -> list[LoadResult]:
        """Process the results of the background threads. Call this once at the beginning of each step."""
        self.slots.tick()
        for load_id in [load_id for load_id, future in self._fetches.items() if future.done()]:
            self._finish_fetch(load_id, self._fetches.pop(load_id))
        for load_id in list(self._arriving):
            self._finish_arrival(load_id)
        results = []
        for load in [load for load in self._loads if load.future.done()]:
            self._loads.remove(load)
            results.append(self._finish_load(load))
            if (later := next((each for each in self._loads if each.name == load.name), None)) is not None:
                self._begin(later)
        return results

    def take_broken(self) -> list[Broken]:
        """Return the versions that broke since the last call. Their names are removed."""
        broken, self._broken = self._broken, []
        return broken

    def take_ended(self) -> list[str]:
        """Return the digests whose last version has ended since the last call, so that their KV can be dropped."""
        ended = self.registry.take_ended()
        for version in ended:
            self.slots.drop(version.load_id)
            if version.load_id in self._arriving:
                self._finish_arrival(version.load_id)
        dead = dict.fromkeys(version.digest for version in ended if not self.registry.is_alive(version.digest))
        for digest in dead:
            self.cache.drop(digest)
        return list(dead)

    def close(self) -> None:
        """Stop the background threads after their current jobs."""
        self._room.release(len(self._loads) + _MOST_LOADS)
        self._loader.shutdown()
        self._fetcher.shutdown()

    def _begin(self, load: _Load) -> None:
        """Read an adapter as soon as it is its tenant's turn."""
        load.future = self._loader.submit(load.tenant, partial(self._read, load))

    def _read(self, load: _Load) -> tuple[PreparedAdapter, str]:
        self._room.acquire()
        if load.parts:
            adapter = self._reader.read_sum(load.parts)
        else:
            adapter = self._reader.read(load.path, trusted=load.trusted)
        return adapter, load.check(adapter)

    def _finish_load(self, load: _Load) -> LoadResult:
        self._room.release()
        self._shares.give_back(load.tenant)
        try:
            adapter, tokenizer = _outcome(load.future)
            if adapter.has_matrix and not self._max_own:
                raise AdapterError(
                    "The adapter has an embedding or a head of its own, and no memory is reserved for such adapters: "
                    "start the server with a higher --max-lora-embeddings."
                )
            if not load.wanted:
                raise AdapterError(f"The adapter {load.name!r} was unloaded while it was being loaded.", "name")
            version = self._enter(load, adapter, tokenizer)
        except AdapterError as error:
            return LoadResult(load.name, None, error)
        self.cache.put(adapter)
        return LoadResult(load.name, version, None)

    def _enter(self, load: _Load, adapter: PreparedAdapter, tokenizer: str) -> AdapterVersion:
        if load.parts:
            return self.registry.add_sum(load.name, adapter, load.parts, tokenizer=tokenizer, tenant=load.tenant)
        return self.registry.add(
            load.name, load.path, adapter, trusted=load.trusted, tokenizer=tokenizer, public=load.public
        )

    def _fetch(self, load_id: int, tenant: str) -> None:
        """Load a version into the host cache for a waiting slot, as soon as it is the tenant's turn."""
        version = self._version(load_id)
        if load_id in self._arriving:
            return
        if (adapter := self.cache.get(version.digest)) is not None:
            self._fill_slot(load_id, version, adapter)
        elif load_id not in self._fetches:
            read = partial(self._reader.read_again, version.path, version.digest, trusted=version.trusted)
            if version.parts:
                read = partial(self._reader.read_sum, version.parts)
            self._fetches[load_id] = self._fetcher.submit(tenant, read)

    def _finish_fetch(self, load_id: int, future: Future[PreparedAdapter]) -> None:
        version = self.registry.version(load_id)
        try:
            adapter = _outcome(future)
        except AdapterError as error:
            self.slots.failed(load_id)
            if version is not None:
                self._break(version, error)
            return
        if version is not None:
            self.cache.put(adapter)
            if self.slots.is_loading(load_id):
                self._fill_slot(load_id, version, adapter)

    def _finish_arrival(self, load_id: int) -> None:
        """Install an adapter that has arrived on the device, if its slot still waits for the adapter."""
        adapter = self._arriving.pop(load_id)
        version = self.registry.version(load_id)
        try:
            if version is not None and self.slots.is_loading(load_id):
                self._fill_slot(load_id, version, adapter)
            else:
                self.bank.forget(adapter.digest)
        finally:
            self.cache.unpin(adapter.digest)

    def _fill_slot(self, load_id: int, version: AdapterVersion, adapter: PreparedAdapter) -> None:
        """Copy a version from host memory to the device. When it has arrived, install it in a slot.

        If the device has no memory for the adapter, only this adapter fails.
        """
        try:
            if not on_device(self.bank.bring, adapter):
                self.cache.pin(adapter.digest)
                self._arriving[load_id] = adapter
                return
            self.slots.loaded(load_id)
        except DeviceMemoryError:
            self.bank.forget(adapter.digest)
            self.slots.failed(load_id)
            self._break(version, AdapterError("The device has no memory for the adapter. Try again later."))

    def _break(self, version: AdapterVersion, error: AdapterError) -> None:
        self._broken.append(Broken(version, error))
        if not version.retired:
            self.registry.remove(version.name)

    def _install(self, slot: int, load_id: int) -> None:
        digest = self._version(load_id).digest
        adapter = self.cache.get(digest)
        assert adapter is not None, f"adapter {load_id} is installed without being in host memory"
        try:
            on_device(self.bank.install, slot, adapter)
        except DeviceMemoryError:
            # The adapter is not pinned yet, so clearing the slot suffices.
            self.bank.clear(slot)
            raise
        self.cache.pin(digest)
        self._pinned[slot] = digest

    def _clear(self, slot: int, _load_id: int) -> None:
        self.bank.clear(slot)
        self.cache.unpin(self._pinned.pop(slot))

    def _version(self, load_id: int) -> AdapterVersion:
        version = self.registry.version(load_id)
        if version is None:
            raise KeyError(f"version {load_id} has ended")
        return version


def _outcome(future: Future[T]) -> T:
    """Return the result of a background thread. Any exception is converted to an AdapterError of this adapter."""
    try:
        return future.result()
    except AdapterError:
        raise
    except Exception as error:
        if isinstance(error, NoThread) or is_out_of_memory(error):
            raise AdapterLimit("The server has no memory to load the adapter now: try again later.") from None
        raise AdapterError(f"The adapter cannot be loaded: {type(error).__name__}.") from error
