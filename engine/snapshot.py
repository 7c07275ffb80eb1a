"""Snapshot types: bounded views of tree, sequences and adapter slots, taken by ``engine.core.debug_snapshot``."""

from __future__ import annotations

from dataclasses import dataclass

from .types import AdapterInfo


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """A namespace of KV.

    Attributes:
        adapter: name of the adapter; None for the base model.
        tenant: name of the tenant; "" if there are no keys, or if keys share their prefixes.
        salted: whether the namespace has a salt.
    """

    adapter: str | None
    tenant: str
    salted: bool


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of the radix tree.

    Attributes:
        id: id of its first page, which is unique among nodes.
        parent: index in ``nodes``, lower than its own; -1 for the first nodes of sequences.
        namespace: index in ``namespaces``.
        tokens: number of tokens in its pages.
        hits: prefix hits that included it.
        leases: running sequences that share it.
        age: number of uses of the tree since the node was last used; a use is the start or the end of a sequence.
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
        shared: number of tokens in shared pages.
        tokens: number of all tokens.
        computed: number of tokens with KV.
        prompt: number of tokens of the prompt.
        cached: number of tokens of the prefix hit at admission.
        generated, drafted, forced: see ``types.Usage``.
        adapter: name of the adapter; None for the base model.
        structured: whether its output follows a grammar.
        seconds: seconds since its arrival.
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
        adapter: name of the adapter that is in the slot or is being loaded into it; None if the slot is empty.
        ready: whether the adapter is loaded.
        running: number of sequences that use it.
        closing: whether the slot takes no new sequences because another adapter gets it next.
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
        hidden_tokens: number of tokens for which the tree's pages that are not shown have room.
        sequences: running sequences in the order of admission.
        adapters: the adapters with the most sequences.
    """

    page_size: int
    stats: dict[str, float]
    namespaces: tuple[NamespaceView, ...]
    nodes: tuple[NodeView, ...]
    hidden_tokens: int
    sequences: tuple[SequenceView, ...]
    adapters: tuple[AdapterInfo, ...] = ()
    slots: tuple[SlotView, ...] = ()
