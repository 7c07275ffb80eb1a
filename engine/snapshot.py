"""What the engine shows of itself to who watches it: counts, sizes and names, never a token.

A snapshot is bounded, however large tree, queue and registry are: see ``engine.core.debug_snapshot``, which takes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .types import AdapterInfo


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """Who computed the KV of some nodes, and for whom.

    Attributes:
        adapter: its name; None for the base model.
        tenant: "" where keys are not in use, or share.
        salted: whether the tenant has set it apart.
    """

    adapter: str | None
    tenant: str
    salted: bool


@dataclass(frozen=True, slots=True)
class NodeView:
    """One run of pages in the prefix tree.

    Attributes:
        id: its first page, which no other node has at the same time.
        parent: its place among the nodes, always before this one; -1 if it begins sequences.
        namespace: the place of its namespace among the namespaces.
        tokens: in its pages.
        hits: times that a sequence was found to begin with it, since the node is there.
        leases: running sequences that go through it.
        age: how many uses of the tree ago it was last used; a use is the start or the end of a sequence.
        pinned: whether a request has asked to keep it, so that it is evicted last.
    """

    id: int
    parent: int
    namespace: int
    tokens: int
    hits: int
    leases: int
    age: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One running sequence.

    Attributes:
        node: the place of the node where its pages in the tree end; -1 if none of them is in the tree, -2 if the
            node is not among those shown.
        shared: tokens in those pages.
        tokens: all that it has now; those above ``shared`` are its own.
        computed: those of them whose KV is there.
        prompt: tokens of its prompt.
        cached: those of them that were found in the tree when it was admitted.
        generated: tokens of its answer.
        drafted, forced: see ``types.Usage``.
        adapter: its name, None for the base model.
        structured: whether its answer follows a grammar.
        seconds: since it came.
        preempted: how often it gave way to others.
    """

    id: int
    node: int
    shared: int
    tokens: int
    computed: int
    prompt: int
    cached: int
    generated: int
    drafted: int
    forced: int
    adapter: str | None
    tenant: str
    structured: bool
    seconds: float
    preempted: int


@dataclass(frozen=True, slots=True)
class SlotView:
    """One place for an adapter on the device.

    Attributes:
        adapter: name of the one that it holds or waits for; None if it is empty.
        ready: whether the adapter is there.
        running: sequences that use it.
        closing: whether it takes no more of them, since another adapter is to have it.
    """

    adapter: str | None
    ready: bool
    running: int
    closing: bool


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine between two steps.

    Attributes:
        stats: gauges and counters as in ``Heartbeat``.
        namespaces: of the nodes.
        nodes: of the prefix tree, those in use first.
        hidden_tokens: room of the pages in the tree that are in no node shown.
        sequences: those that run, in order of admission, as far as they are shown.
        adapters: the busiest ones, as far as they are shown.
        slots: all of them.
    """

    page_size: int
    stats: dict[str, float]
    namespaces: tuple[NamespaceView, ...]
    nodes: tuple[NodeView, ...]
    hidden_tokens: int
    sequences: tuple[SequenceView, ...]
    adapters: tuple[AdapterInfo, ...] = ()
    slots: tuple[SlotView, ...] = ()
