"""Block keys: names of KV pages that cover everything their bytes depend on, so that equal keys mean equal KV.

A key is a hash of the previous page's key, of the page's namespaces and of its tokens; the first key is derived from
the form of the pool. So a key depends on every token up to the page's end, on base model, adapter, salt and tenant at
each position, and on the number format, shape and arithmetic of the KV::

    root = H(format version, form, page size)      key 0 = H(root, origin 0, tokens 0)      key 1 = H(key 0, ...)

In a model with recurrent states, the state after the last token of a page is a block of its own. Its key is a hash of
the page's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b

from ...radix.namespace import Namespace, Origin, Path
from ...radix.node import TOKEN_BYTES

FORMAT_VERSION = 1
KEY_BYTES = 24
MOST_SECRET_BYTES = 64


@dataclass(frozen=True, slots=True)
class BlockId:
    """One page of KV, or one recurrent state, that a tier may hold.

    Attributes:
        key: name of the block.
        parent: key of the previous page, or the root; for a state, the key of its page.
        origin: namespaces of its cells.
        position: position of its first token.
        tokens: int32 tokens of the page as bytes.
        is_state: whether it is the recurrent state after the page's last token, and not the page's KV.
    """

    key: bytes
    parent: bytes
    origin: Origin
    position: int
    tokens: bytes
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class BlockScheme:
    """The naming scheme of the pages of one KV pool.

    Attributes:
        form: number format, shape and arithmetic of the KV, as the pool reports them.
        page_size: tokens in a page.
        page_bytes: bytes of a page.
        secret: key of the hashes, without which names do not reveal the stored tokens; empty for no key.
        state_bytes: bytes of a recurrent state; 0 for a model without recurrent states.
    """

    form: str
    page_size: int
    page_bytes: int
    secret: bytes = b""
    state_bytes: int = 0

    @property
    def root(self) -> bytes:
        """The key before the first page."""
        return _hash(self.secret, b"rootgraft kv", FORMAT_VERSION.to_bytes(4, "little"), self.form.encode(),
                     self.page_size.to_bytes(4, "little"))  # fmt: skip

    def extend(self, keys: list[bytes], path: Path, tokens: bytes, num_pages: int) -> None:
        """Append the keys of the pages from ``len(keys)`` up to ``num_pages`` of a sequence.

        Args:
            path: the namespaces of the sequence.
            tokens: its tokens from the first one on, int32 as bytes.
        """
        size = self.page_size * TOKEN_BYTES
        before = keys[-1] if keys else self.root
        for index in range(len(keys), num_pages):
            start = index * self.page_size
            before = self.key(before, path.origin(start, start + self.page_size), tokens[index * size :][:size])
            keys.append(before)

    def key(self, parent: bytes, origin: Origin, tokens: bytes) -> bytes:
        """Return the key of a page after the one named ``parent``."""
        return _hash(self.secret, parent, _origin_bytes(origin), tokens)

    def state_key(self, page: bytes) -> bytes:
        """Return the key of the recurrent state after the page of a key."""
        return _hash(self.secret, page, b"state")

    def state(self, page: BlockId) -> BlockId:
        """Return the recurrent state after a page."""
        return replace(page, key=self.state_key(page.key), parent=page.key, is_state=True)

    def payload_bytes(self, block: BlockId) -> int:
        """Return the bytes of a page or of a state."""
        return self.state_bytes if block.is_state else self.page_bytes

    def names(self, block: BlockId) -> bool:
        """Return whether a block's key follows from its other fields."""
        if block.is_state:
            return bool(self.state_bytes) and block.key == self.state_key(block.parent)
        return block.key == self.key(block.parent, block.origin, block.tokens)

    def blocks(self, keys: Sequence[bytes], path: Path, tokens: bytes, start: int, end: int) -> list[BlockId]:
        """Return the pages ``start`` to ``end`` of a sequence, whose keys are known."""
        size = self.page_size * TOKEN_BYTES
        return [
            BlockId(
                keys[index],
                keys[index - 1] if index else self.root,
                path.origin(index * self.page_size, (index + 1) * self.page_size),
                index * self.page_size,
                tokens[index * size : (index + 1) * size],
            )
            for index in range(start, end)
        ]


def _hash(secret: bytes, *parts: bytes) -> bytes:
    """Hash parts with their lengths, so that no two lists of parts are taken for each other."""
    digest = blake2b(digest_size=KEY_BYTES, key=secret)
    digest.update(b"".join([len(part).to_bytes(4, "little") + part for part in parts]))
    return digest.digest()


@lru_cache(maxsize=1024)
def _origin_bytes(origin: Origin) -> bytes:
    parts = [*_namespace_parts(origin.namespace), str(origin.switch)]
    if origin.before is not None:
        parts += _namespace_parts(origin.before)
    texts = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def _namespace_parts(namespace: Namespace) -> list[str]:
    adapter = "base" if namespace.adapter is None else f"adapter {namespace.adapter}"
    return [namespace.base, adapter, namespace.salt, namespace.tenant, str(namespace.is_long)]
