"""Debug snapshot: the state of cache, sequences and adapters between two steps.

Its size is limited; it takes a millisecond.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice

from ...radix.namespace import Namespace
from ...radix.node import TOKEN_BYTES, Node
from ..kv_cache.prefix_cache import PrefixCache
from ..scheduling.scheduler import Scheduler
from ..sequence.sequence import Sequence
from ..snapshot import EngineSnapshot, NamespaceView, NodeView, SequenceView
from .adapter_manager import AdapterManager

MOST_NODES = 192
MOST_SEQUENCES = 64
MOST_ADAPTERS = 64

_ROOT, _HIDDEN = -1, -2


def take_snapshot(
    cache: PrefixCache, scheduler: Scheduler, adapter_manager: AdapterManager | None, stats: dict[str, float]
) -> EngineSnapshot:
    """Take a snapshot of the engine without changing the engine. ``stats`` are the engine's gauges and counters."""
    nodes = cache.tree_view(MOST_NODES)
    indices = {node: index for index, node in enumerate(nodes)}
    digests = adapter_manager.names() if adapter_manager else {}
    namespaces: dict[NamespaceView, int] = {}  # Index of each namespace in the snapshot.
    views = [_node(node, indices, _namespace_index(node, digests, namespaces), cache.num_uses) for node in nodes]
    shown = islice(scheduler.running, MOST_SEQUENCES)
    return EngineSnapshot(
        page_size=cache.page_size,
        stats=stats,
        namespaces=tuple(namespaces),
        nodes=tuple(views),
        hidden_tokens=(cache.num_cached - sum(len(node.pages) for node in nodes)) * cache.page_size,
        sequences=tuple(_sequence(sequence, indices, cache.page_size, adapter_manager) for sequence in shown),
        adapters=adapter_manager.busiest(MOST_ADAPTERS) if adapter_manager else (),
        slots=adapter_manager.slots() if adapter_manager else (),
    )


def _namespace_index(node: Node, digests: Mapping[str, str], namespaces: dict[NamespaceView, int]) -> int:
    """Return the index of a node's namespace. A new namespace is added."""
    namespace = node.namespace
    assert namespace is not None  # The root is not part of a snapshot.
    return namespaces.setdefault(_namespace(namespace, digests), len(namespaces))


def _namespace(namespace: Namespace, digests: Mapping[str, str]) -> NamespaceView:
    """Return the view of a namespace, with its adapter's name, or its digest's beginning if it was just unloaded."""
    digest = namespace.adapter
    name = None if digest is None else digests.get(digest, digest[:8])
    return NamespaceView(name, namespace.tenant, bool(namespace.salt))


def _node(node: Node, indices: Mapping[Node, int], namespace: int, num_uses: int) -> NodeView:
    return NodeView(
        id=node.pages[0],
        parent=indices.get(node.parent, _ROOT) if node.parent else _ROOT,
        namespace=namespace,
        tokens=len(node.tokens) // TOKEN_BYTES,
        hits=node.hits,
        leases=node.lock,
        age=num_uses - node.last_use,
        pinned=node.pinned,
    )


def _sequence(
    sequence: Sequence, indices: Mapping[Node, int], page_size: int, adapter_manager: AdapterManager | None
) -> SequenceView:
    lease = sequence.lease
    # Every running sequence has a lease.
    assert lease is not None
    return SequenceView(
        id=sequence.id,
        node=indices.get(lease.node, _HIDDEN) if lease.num_shared else _ROOT,
        shared=lease.num_shared * page_size,
        tokens=sequence.num_tokens,
        computed=sequence.num_computed,
        prompt=sequence.num_prompt,
        cached=max(0, sequence.counts.num_cached),
        generated=sequence.num_generated,
        drafted=sequence.counts.num_drafted,
        forced=sequence.counts.num_forced,
        adapter=adapter_manager.name(sequence.spec.adapter) if adapter_manager else None,
        tenant=sequence.spec.tenant,
        structured=sequence.matcher is not None,
        seconds=time.monotonic() - sequence.spec.arrival,
        preempted=sequence.counts.num_preempted,
    )
