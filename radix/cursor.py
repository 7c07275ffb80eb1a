"""Tree walk: the cursor that moves down a path, and the two results: a match, or an extension with new pages."""

from __future__ import annotations

from dataclasses import dataclass

from .namespace import Namespace, Origin, Path
from .node import TOKEN_BYTES, Node, common_pages


@dataclass(slots=True)
class Cursor:
    """A position on a path, and the tokens from this position on. The cursor moves by full pages.

    Attributes:
        path: the namespaces of the sequence.
        tokens: int32 tokens as bytes, from the first page of the walk on.
        position: number of the sequence's tokens before the cursor, a multiple of ``page_size``.
        start: the byte offset of ``position`` in ``tokens``.
    """

    path: Path
    tokens: bytes
    page_size: int
    position: int = 0
    start: int = 0

    @property
    def page(self) -> bytes:
        return self.tokens[self.start : self.start + self.page_size * TOKEN_BYTES]

    @property
    def num_pages(self) -> int:
        return (len(self.tokens) - self.start) // (self.page_size * TOKEN_BYTES)

    @property
    def origin(self) -> Origin:
        return self.path.origin(self.position, self.position + self.page_size)

    @property
    def run_pages(self) -> int:
        """Number of full pages left that fit in one node, up to the page that contains the namespace switch."""
        _, zone_end = self.path.zone(self.position)
        return min(self.num_pages, (zone_end - self.position) // self.page_size or self.num_pages)

    @property
    def pure(self) -> tuple[Namespace, bytes]:
        """The namespace at the cursor, and the tokens of ``page`` that belong to this namespace."""
        namespace, zone_end = self.path.zone(self.position)
        return namespace, self.page[: (zone_end - self.position) * TOKEN_BYTES]

    def agreeing(self, node: Node) -> int:
        """Return how many leading pages of ``node`` match the path. The caller knows that the first page matches."""
        most = min(len(node.pages), self.run_pages)
        return common_pages(self.tokens, self.start, node.tokens, most, self.page_size * TOKEN_BYTES)

    def advance(self, num_pages: int) -> None:
        self.position += num_pages * self.page_size
        self.start += num_pages * self.page_size * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Match:
    """The longest reusable prefix of a sequence.

    Attributes:
        node: the node at which the prefix ends; the root if no full page matches.
        inside: number of pages of ``node`` that belong to the prefix.
        pages: ids of the prefix's full pages, in order.
        source: id of a page whose first ``num_copied`` slots contain the KV that follows ``pages``; -1 if there is
            none.
    """

    node: Node
    inside: int
    pages: list[int]
    source: int
    num_copied: int


@dataclass(frozen=True, slots=True)
class Extension:
    """The result of ``RadixTree.extend``.

    Attributes:
        node: the node at which the lease ends now.
        pages: the tree's pages for the tokens.
        freed: pages that are no longer needed: given pages whose tokens the tree has already, and tails that given
            pages replace.
    """

    node: Node
    pages: list[int]
    freed: list[int]
