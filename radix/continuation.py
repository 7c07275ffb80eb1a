"""Tree continuation: takes draft tokens from the radix tree, namely those that followed the same tokens before."""

from __future__ import annotations

from .namespace import Path
from .node import TOKEN_BYTES, Node

# Largest number of children of a node that are considered.
_CHOICES = 8


def continuation(node: Node, path: Path, position: int, head: bytes, limit: int, page_size: int) -> bytes:
    """Return up to ``limit`` tokens (int32 as bytes) that followed ``head``, on the most recently used branch.

    Args:
        node: not dropped; ``path`` reaches its end after ``position`` tokens, a multiple of ``page_size``.
        path: the namespaces of the sequence.
        head: the sequence's tokens after ``node``, at most a page.
    """
    found = b""
    child = _newest(node, path, position, head, page_size)
    while child and len(found) < limit * TOKEN_BYTES:
        found += child.tokens[len(head) : len(head) + limit * TOKEN_BYTES - len(found)]
        position += len(child.pages) * page_size
        child, head = _newest(child, path, position, b"", page_size), b""
    return found


def _newest(node: Node, path: Path, position: int, head: bytes, page_size: int) -> Node | None:
    """Return the most recently used of the first few children whose tokens begin with ``head``."""
    siblings = node.children.get(path.origin(position, position + page_size)) if node.children else None
    return siblings.newest(head, _CHOICES) if siblings else None
