"""Hot prefixes: which cached KV another replica has most use for. Called on the core's thread; reads no page."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping

from ...radix.namespace import Namespace, Path
from ...radix.node import Node, upwards
from ..kv_cache.block_keys import BlockScheme
from ..kv_cache.prefix_cache import PrefixCache
from ..messages import KvPrefix
from ..scheduling.session_pins import SessionPins

MOST_PREFIXES = 64
_MOST_NODES = 192


def hot_prefixes(
    cache: PrefixCache, scheme: BlockScheme, names: Mapping[str, str], most_pages: int
) -> tuple[KvPrefix, ...]:
    """Return the prefixes that were hit most often, the last used ones first among equals.

    Args:
        scheme: names of pages.
        names: of the adapters that are loaded, by digest; prefixes of others are left out, as are those of an adapter
            that begins in the middle.
        most_pages: of all that is returned.
    """
    nodes = sorted(cache.tree_view(_MOST_NODES), key=lambda node: -node.hits)
    return _within((each for node in nodes for each in _prefix_to(cache, node)), scheme, names, most_pages)


def session_prefixes(
    pins: SessionPins, scheme: BlockScheme, names: Mapping[str, str], most_pages: int
) -> tuple[KvPrefix, ...]:
    """Return what the sessions hold, the last used one first. Arguments as of ``hot_prefixes``."""
    held = (pins.find(*name) for name in reversed(pins.names))
    return _within((each for each in held if each is not None), scheme, names, most_pages)


def _prefix_to(cache: PrefixCache, node: Node) -> Iterator[tuple[Path, array[int]]]:
    """Yield the namespace and the tokens of the path that ends at a node; nothing if it has several namespaces."""
    namespaces: set[Namespace] = set()
    for each in upwards(node):
        if each.origin is not None:
            namespaces |= {each.origin.namespace, each.origin.before or each.origin.namespace}
    if len(namespaces) == 1:
        yield Path(namespaces.pop()), cache.tokens_to(node)


def _within(
    found: Iterable[tuple[Path, array[int]]], scheme: BlockScheme, names: Mapping[str, str], most_pages: int
) -> tuple[KvPrefix, ...]:
    """Return prefixes with the first page of each that none before it has, as far as there is room for their pages."""
    prefixes: list[KvPrefix] = []
    seen: set[bytes] = set()
    for path, tokens in found:
        adapter = path.namespace.adapter
        if adapter is not None and adapter not in names:
            continue
        keys: list[bytes] = []
        scheme.extend(keys, path, tokens.tobytes(), len(tokens) // scheme.page_size)
        first = next((index for index, key in enumerate(keys) if key not in seen), len(keys))
        if first == len(keys) or len(keys) - first > most_pages:
            continue
        most_pages -= len(keys) - first
        seen.update(keys)
        prefixes.append(KvPrefix(path, tokens, first, None if adapter is None else names[adapter]))
        if len(prefixes) == MOST_PREFIXES:
            break
    return tuple(prefixes)
