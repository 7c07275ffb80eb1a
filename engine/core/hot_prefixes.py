"""Hot prefixes: the cached prefixes that are most useful to another replica.

Called on the core's thread; reads no KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping

from ...radix.namespace import Namespace, Path
from ...radix.node import Node, upwards
from ..kv_cache.block_keys import BlockScheme
from ..kv_cache.prefix_cache import PrefixCache
from ..scheduling.session_pins import SessionPins
from ..types import KvPrefix

MOST_PREFIXES = 64
"""Largest number of prefixes in one list."""
_MOST_NODES = 192  # Largest number of tree nodes that are ranked: leased nodes, and the most recently used ones.


def hot_prefixes(cache: PrefixCache) -> Iterator[tuple[Path, array[int]]]:
    """Yield the namespaces and tokens of the prefixes that requests have hit, the most often hit prefix first.

    Prefixes in which an adapter begins in the middle (activated LoRA) are left out.
    """
    nodes = (node for node in cache.tree_view(_MOST_NODES) if node.hits)
    for node in sorted(nodes, key=lambda each: -each.hits):
        namespaces = _namespaces(node)
        if len(namespaces) == 1:
            yield Path(namespaces.pop()), cache.tokens_to(node)


def session_prefixes(pins: SessionPins) -> Iterator[tuple[Path, array[int]]]:
    """Yield the namespaces and tokens of the prefixes that sessions hold, the most recently used session first."""
    held = (pins.find(*name) for name in reversed(pins.names))
    return (each for each in held if each is not None)


def within(
    found: Iterable[tuple[Path, array[int]]], scheme: BlockScheme, names: Mapping[str, str], most_pages: int
) -> tuple[KvPrefix, ...]:
    """Select prefixes in the given order: at most ``MOST_PREFIXES``, with at most ``most_pages`` pages in total.

    A prefix that does not fit is skipped. A page that several prefixes share counts once.

    Args:
        found: namespaces and tokens of prefixes, the most useful prefix first.
        scheme: block scheme that gives pages their keys.
        names: names of the loaded adapters by digest. Prefixes of other adapters are left out.
    """
    prefixes: list[KvPrefix] = []
    seen: set[bytes] = set()
    for path, tokens in found:
        if len(prefixes) == MOST_PREFIXES:
            break
        adapter = path.namespace.adapter
        if adapter is not None and adapter not in names:
            continue
        keys: list[bytes] = []
        scheme.extend(keys, path, tokens.tobytes(), len(tokens) // scheme.page_size)
        first = next((index for index, key in enumerate(keys) if key not in seen), len(keys))
        if not 0 < len(keys) - first <= most_pages:
            continue
        most_pages -= len(keys) - first
        seen.update(keys)
        prefixes.append(KvPrefix(path, tokens, first, None if adapter is None else names[adapter]))
    return tuple(prefixes)


def _namespaces(node: Node) -> set[Namespace]:
    """Return the namespaces on the path from the root to a node."""
    origins = [each.origin for each in upwards(node) if each.origin is not None]
    return {space for each in origins for space in (each.namespace, each.before) if space is not None}
