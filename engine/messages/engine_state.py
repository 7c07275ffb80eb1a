"""Messages about the engine as a whole: its start, its gauges and counters, its debug snapshot, its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..snapshot import EngineSnapshot
from ..types import AdapterInfo, Pooler


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is ready, with its derived limits.

    Attributes:
        summary: lines for the log: device, dtype, pool size, threads.
        adapters: adapters that were loaded at the start.
        base_digest: digest of the base model. A replica can continue the sequences of another one if both have the same
            digest.
        pooler: kinds of results other than tokens that the model has.
    """

    max_model_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    summary: tuple[str, ...]
    adapters: tuple[AdapterInfo, ...] = ()
    base_digest: str = ""
    pooler: Pooler = field(default_factory=Pooler)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Gauges and counters, sent between two steps, at least twice a second while steps are short.

    A heartbeat is also sent before a step that computes a sequence named in ``waiting``. So no step has computed the
    sequences that the last heartbeat names.

    Attributes:
        stats: name -> number, names as in ``EngineStats``.
        histograms: name -> observations since the last heartbeat.
        adapters: names of adapters that have running and that have waiting sequences, in order.
        waiting: sequences in the queue, and those whose grammar is being compiled.
    """

    stats: dict[str, float]
    histograms: dict[str, list[float]]
    adapters: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Remove all cached KV that no running sequence uses, from the pool and from all tiers; a ``Reply`` follows."""

    id: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Take a debug snapshot."""

    id: int


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """Result of ``TakeSnapshot``."""

    id: int
    snapshot: EngineSnapshot


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the step loop after the running step; live sequences get ``Failed``."""
