"""Tokenization cache: encodes prompts to token ids, with shared parts encoded once."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Final, NamedTuple

from .tokenizer import Tokenizer

_PART: Final = 256  # least characters of a cached part; encoding it takes about twenty times as long as a lookup
_MOST_CHARACTERS: Final = 1 << 23  # characters of all cached parts; their token ids take about as much memory again


class Owner(NamedTuple):
    """Scope of cached texts. As with KV, no other tenant or salt can tell from timing that a text is cached."""

    tenant: str = ""
    salt: str = ""


class _Key(NamedTuple):
    """A part of a text, by tokenizer and owner."""

    tokenizer: str
    owner: Owner
    part: str


class PromptCache:
    """LRU cache of the tokens of text parts, of all tokenizers together. Thread-safe.

    Args:
        most: characters of all cached parts.
    """

    def __init__(self, most: int = _MOST_CHARACTERS) -> None:
        self._most = most
        self._size = 0
        self._parts: OrderedDict[_Key, Future[array[int]]] = OrderedDict()
        self._lock = Lock()

    def num_new(self, keys: Iterable[_Key]) -> int:
        """Return the characters of the parts whose tokens are not known, or not yet."""
        with self._lock:
            known = [(key, self._parts.get(key)) for key in keys]
        return sum(len(key.part) for key, tokens in known if tokens is None or not tokens.done())

    def tokens(self, key: _Key, encode: Callable[[str], array[int]]) -> array[int]:
        """Return the tokens of a part, which is encoded if need be. Waits where another thread is encoding it."""
        with self._lock:
            tokens = self._parts.get(key)
            if is_new := tokens is None:
                tokens = self._parts[key] = Future()
                self._size += len(key.part)
                self._evict()
            else:
                self._parts.move_to_end(key)
        if is_new:
            try:
                tokens.set_result(encode(key.part))
            except BaseException as error:
                tokens.set_exception(error)
                self._forget(key, tokens)
        return tokens.result()

    def _forget(self, key: _Key, tokens: Future[array[int]]) -> None:
        """Remove a part whose encoding failed, unless it was evicted already."""
        with self._lock:
            if self._parts.get(key) is tokens:
                del self._parts[key]
                self._size -= len(key.part)

    def _evict(self) -> None:
        while self._size > self._most:
            key, _ = self._parts.popitem(last=False)
            self._size -= len(key.part)


class PromptEncoder:
    """Encodes texts with one tokenizer, their shared parts once.

    A text is cut before special tokens only, where tokenizers cut it too, so its tokens are those of its parts, joined.
    Cuts depend on the text before them alone, so a conversation that grows at its end keeps its parts.

    Args:
        cache: cache of the parts; None for a cache of the encoder's own.
        name: name of the tokenizer in the cache.
    """

    def __init__(self, tokenizer: Tokenizer, cache: PromptCache | None = None, name: str = "") -> None:
        self._tokenizer = tokenizer
        self._cache = PromptCache() if cache is None else cache
        self._name = name

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
        return self._cache.num_new(_Key(self._name, owner, part) for part in parts)

    def encode(self, parts: Sequence[str], owner: Owner) -> array[int]:
        """Return the token ids of a text's parts, without special tokens around it.

        Waits for parts that another thread is encoding. Raises RequestError for a lone surrogate.
        """
        tokens: array[int] = array("i")
        for part in parts:
            is_kept = len(part) >= _PART
            key = _Key(self._name, owner, part)
            tokens += self._cache.tokens(key, self._encode) if is_kept else self._encode(part)
        return tokens

    def _encode(self, part: str) -> array[int]:
        return self._tokenizer.encode(part, False)
