"""Some nodes of a tree, for a picture of it: those in use, then those used last, at a cost that is bounded."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count, islice

from .node import Node, upwards
from .tree import RadixTree

MOST_LOOKS = 2048
"""Nodes that are looked at, besides those in use."""
MOST_SIBLINGS = 512
"""Children of one node that are looked at."""


def tree_view(tree: RadixTree, ends: Iterable[Node], most: int) -> list[Node]:
    """At most ``most`` nodes, each after its parent: the paths to ``ends``, then what was used last.

    A node is used whenever one below it is, so going on from the one used last finds the next one used last, and no
    others need be looked at. Where a node has more than ``MOST_SIBLINGS`` children, the others are left out.

    Args:
        tree: the tree; its root, which holds no tokens, is not among the nodes.
        ends: where leases end.
        most: nodes in the answer.
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
    """The nodes of all paths, each once and after its parent."""
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
    """Nodes whose parent is chosen, the one used last first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._serial = count()
        self._left = MOST_LOOKS

    def add_children(self, node: Node, chosen: Container[Node]) -> None:
        """Look at the children of a node that are not chosen, as far as looks are left."""
        nodes = (child for siblings in node.children.values() for child in siblings.nodes)
        for child in islice(nodes, min(self._left, MOST_SIBLINGS)):
            self._left -= 1
            if child not in chosen:
                heappush(self._heap, (-child.last_use, next(self._serial), child))

    def pop(self) -> Node | None:
        """The node used last; None if there is none."""
        return heappop(self._heap)[2] if self._heap else None
