"""Tree view: selects a limited number of nodes for the debug snapshot: leased nodes, then the last used ones."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count, islice

from .node import Node, upwards
from .tree import RadixTree

MOST_VISITS = 2048
"""Largest number of visited nodes, not counting leased nodes."""
MOST_SIBLINGS = 512
"""Largest number of visited children of one node."""


def tree_view(tree: RadixTree, ends: Iterable[Node], most: int) -> list[Node]:
    """Return up to ``most`` nodes, each after its parent: the paths to ``ends``, then the most recently used.

    Using a node counts as a use of every node above it, so a best-first walk from the root visits nodes by last use. At
    most ``MOST_SIBLINGS`` children of a node are returned. The root is left out because it holds no tokens.

    Args:
        ends: nodes at which leases end.
    """
    chosen = dict.fromkeys(islice(_paths(tree, ends), most))
    frontier = _Frontier()
    for node in (tree.root, *chosen):
        frontier.add_children(node, chosen)
    while len(chosen) < most and (newest := frontier.pop()):
        chosen[newest] = None
        frontier.add_children(newest, chosen)
    return list(chosen)


def _paths(tree: RadixTree, ends: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes of all paths, each node once and after its parent."""
    seen: set[Node] = {tree.root}
    for end in ends:
        path: list[Node] = []
        for node in upwards(end):
            if node in seen:
                break
            path.append(node)
        seen.update(path)
        yield from reversed(path)


class _Frontier:
    """Nodes whose parent has been chosen, the most recently used first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._serial = count()
        self._visits_left = MOST_VISITS

    def add_children(self, node: Node, chosen: Container[Node]) -> None:
        """Add the children of a node that are not chosen yet, up to the limit on visited nodes."""
        nodes = (child for siblings in node.children.values() for child in siblings.nodes)
        for child in islice(nodes, min(self._visits_left, MOST_SIBLINGS)):
            self._visits_left -= 1
            if child not in chosen:
                heappush(self._heap, (-child.last_use, next(self._serial), child))

    def pop(self) -> Node | None:
        return heappop(self._heap)[2] if self._heap else None
