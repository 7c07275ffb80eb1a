"""Snapshot types: bounded views of tree, sequences and adapter slots, taken by ``engine.core.debug_snapshot``."""

from __future__ import annotations

from dataclasses import dataclass

from .types import AdapterInfo


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """A namespace of KV.

    Attributes:
        adapter: name; None for the base model.
        tenant: "" without keys, or where keys share.
        salted: whether it has a salt.
    """

    adapter: str | None
    tenant: str
    salted: bool


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of the radix tree.

    Attributes:
        id: its first page, unique among nodes.
        parent: index in ``nodes``, lower than its own; -1 for the first nodes of sequences.
        namespace: index in ``namespaces``.
        tokens: number of tokens in its pages.
        hits: prefix hits that included it.
        leases: running sequences that share it.
        age: uses of the tree since its last one; a use is the start or the end of a sequence.
        pinned: whether a request has pinned it.
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
    """A running sequence.

    Attributes:
        node: index of the node at which its shared pages end; -1 without shared pages, -2 if the node is not shown.
        shared: tokens in shared pages.
        tokens: all tokens.
        computed: tokens with KV.
        prompt: tokens of the prompt.
        cached: prefix hit at admission in tokens.
        generated, drafted, forced: see ``types.Usage``.
        adapter: name, None for the base model.
        structured: whether its output follows a grammar.
        seconds: since its arrival.
        preempted: number of preemptions.
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
    """A device slot for an adapter.

    Attributes:
        adapter: name of the adapter in it or on its way; None if it is empty.
        ready: whether the adapter is loaded.
        running: sequences that use it.
        closing: whether it takes no more sequences, as another adapter gets it next.
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
        namespaces: namespaces of the nodes.
        nodes: nodes of the radix tree, leased ones first.
        hidden_tokens: capacity of the tree's pages that are not shown.
        sequences: running ones in order of admission.
        adapters: the busiest ones.
    """

    page_size: int
    stats: dict[str, float]
    namespaces: tuple[NamespaceView, ...]
    nodes: tuple[NodeView, ...]
    hidden_tokens: int
    sequences: tuple[SequenceView, ...]
    adapters: tuple[AdapterInfo, ...] = ()
    slots: tuple[SlotView, ...] = ()
