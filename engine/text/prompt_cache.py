"""Tokenization cache: encodes prompts to token ids, with shared parts encoded once."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Final, NamedTuple

from .tokenizer import Tokenizer

_PART: Final = 256  # least characters of a cached part; encoding it takes about twenty times as long as a lookup
_MOST_CHARACTERS: Final = 1 << 23  # of all cached parts; their token ids take about as much memory again


class Owner(NamedTuple):
    """Scope of cached texts. As with KV, no other tenant or salt can tell from timing that a text is cached."""

    tenant: str = ""
    salt: str = ""


class PromptEncoder:
    """LRU cache of the tokens of text parts. Thread-safe.

    A text is cut before special tokens only, where tokenizers cut it too, so its tokens are those of its parts, joined.
    Cuts depend on the text before them alone, so a conversation that grows at its end keeps its parts.

    Args:
        most: characters of all cached parts together.
    """

    def __init__(self, tokenizer: Tokenizer, most: int = _MOST_CHARACTERS) -> None:
        self._tokenizer = tokenizer
        self._most = most
        self._size = 0
        self._parts: OrderedDict[tuple[Owner, str], Future[array[int]]] = OrderedDict()
        self._lock = Lock()

    def cut(self, text: str) -> list[str]:
        """Return the parts of a text, each but the last long enough for the cache."""
        parts, begin = [], 0
        for at in self._tokenizer.cuts(text):
            if at - begin >= _PART:
                parts.append(text[begin:at])
                begin = at
        return [*parts, text[begin:]]

    def num_new(self, parts: Sequence[str], owner: Owner) -> int:
        """Return the characters of the parts whose tokens are not known, or not yet."""
        with self._lock:
            known = [self._parts.get((owner, part)) for part in parts]
        return sum(len(part) for part, tokens in zip(parts, known, strict=True) if tokens is None or not tokens.done())

    def encode(self, parts: Sequence[str], owner: Owner) -> array[int]:
        """Return the token ids of a text's parts, without special tokens around it.

        Waits for parts that another thread is encoding. Raises RequestError for a lone surrogate.
        """
        tokens: array[int] = array("i")
        for part in parts:
            tokens += self._tokens(owner, part) if len(part) >= _PART else self._tokenizer.encode(part, False)
        return tokens

    def _tokens(self, owner: Owner, part: str) -> array[int]:
        key = owner, part
        with self._lock:
            tokens = self._parts.get(key)
            if is_new := tokens is None:
                tokens = self._parts[key] = Future()
                self._size += len(part)
                self._evict()
            else:
                self._parts.move_to_end(key)
        if is_new:
            try:
                tokens.set_result(self._tokenizer.encode(part, False))
            except BaseException as error:
                tokens.set_exception(error)
                self._forget(key, tokens)
        return tokens.result()

    def _forget(self, key: tuple[Owner, str], tokens: Future[array[int]]) -> None:
        """Remove a part whose encoding failed, unless it was evicted already."""
        with self._lock:
            if self._parts.get(key) is tokens:
                del self._parts[key]
                self._size -= len(key[1])

    def _evict(self) -> None:
        while self._size > self._most:
            (_, part), _ = self._parts.popitem(last=False)
            self._size -= len(part)
