"""What came next when these tokens were last in the tree: a guess at how a sequence goes on, read off its own path."""

from __future__ import annotations

from .namespace import Path
from .node import TOKEN_BYTES, Node

_CHOICES = 8  # branches that are looked at where several go on from one place


def continuation(node: Node, path: Path, position: int, head: bytes, limit: int, page_size: int) -> bytes:
    """Up to ``limit`` tokens that once came after ``head``, int32 as memory; those used last, where there are several.

    Args:
        node: not dropped; ``path`` reaches its end after ``position`` tokens, a multiple of ``page_size``.
        path: the namespaces of the sequence.
        head: its tokens behind ``node``, at most a page.
    """
    found = b""
    child = _newest(node, path, position, head, page_size)
    while child and len(found) < limit * TOKEN_BYTES:
        found += child.tokens[len(head) : len(head) + limit * TOKEN_BYTES - len(found)]
        position += len(child.pages) * page_size
        child, head = _newest(child, path, position, b"", page_size), b""
    return found


def _newest(node: Node, path: Path, position: int, head: bytes, page_size: int) -> Node | None:
    """The child used last of the first few whose tokens begin with ``head``."""
    siblings = node.children.get(path.origin(position, position + page_size)) if node.children else None
    return siblings.newest(head, _CHOICES) if siblings else None
