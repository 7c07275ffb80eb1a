"""Where a walk down the tree stands: a position on a path, and the tokens from there on."""

from __future__ import annotations

from dataclasses import dataclass

from .namespace import Namespace, Origin, Path
from .node import TOKEN_BYTES, Node, common_pages


@dataclass(slots=True)
class Cursor:
    """Moves by whole pages.

    Attributes:
        path: the namespaces of the sequence.
        tokens: its tokens, int32 as memory, perhaps from some page on.
        position: where it stands in the sequence, a multiple of ``page_size``.
        start: the byte of ``tokens`` that ``position`` begins at.
    """

    path: Path
    tokens: bytes
    page_size: int
    position: int = 0
    start: int = 0

    @property
    def page(self) -> bytes:
        """The tokens of the page that begins here, fewer where they end."""
        return self.tokens[self.start : self.start + self.page_size * TOKEN_BYTES]

    @property
    def num_pages(self) -> int:
        """Whole pages left."""
        return (len(self.tokens) - self.start) // (self.page_size * TOKEN_BYTES)

    @property
    def origin(self) -> Origin:
        """Who computes a whole page here."""
        return self.path.origin(self.position, self.position + self.page_size)

    @property
    def run_pages(self) -> int:
        """Whole pages left that may be one node's run: up to the page that holds the switch."""
        _, zone_end = self.path.zone(self.position)
        return min(self.num_pages, (zone_end - self.position) // self.page_size or self.num_pages)

    @property
    def pure(self) -> tuple[Namespace, bytes]:
        """The namespace here, and as many tokens of ``page`` as belong to it."""
        namespace, zone_end = self.path.zone(self.position)
        return namespace, self.page[: (zone_end - self.position) * TOKEN_BYTES]

    def agreeing(self, node: Node) -> int:
        """How many first pages of ``node``'s run lie on the path here, given that the first one does."""
        most = min(len(node.pages), self.run_pages)
        return common_pages(self.tokens, self.start, node.tokens, most, self.page_size * TOKEN_BYTES)

    def advance(self, num_pages: int) -> None:
        """Go on by ``num_pages``."""
        self.position += num_pages * self.page_size
        self.start += num_pages * self.page_size * TOKEN_BYTES
