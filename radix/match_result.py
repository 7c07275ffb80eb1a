"""What the tree answers: where a prefix was found, and what became of pages that it was given."""

from __future__ import annotations

from dataclasses import dataclass

from .node import Node


@dataclass(frozen=True, slots=True)
class Match:
    """The longest reusable prefix.

    Attributes:
        node: where it ends; the root if no whole page was found.
        inside: pages of ``node``'s run that belong to it.
        pages: ids of its whole pages, in order.
        source: a page whose first ``num_copied`` cells go on where ``pages`` end; -1 if none.
    """

    node: Node
    inside: int
    pages: list[int]
    source: int
    num_copied: int


@dataclass(frozen=True, slots=True)
class Extension:
    """What became of pages given to ``RadixTree.extend``.

    Attributes:
        node: the node where they end now, locked in place of the one given.
        pages: the tree's pages for the same tokens.
        freed: pages no longer needed: duplicates of those given, and tails that they supersede.
    """

    node: Node
    pages: list[int]
    freed: list[int]
