"""Tokenization cache: encodes prompts to token ids. A part that several prompts share is encoded only once."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Final, NamedTuple

from .tokenizer import Tokenizer

# Fewest characters of a cached part. Encoding a part of this length takes about twenty times as long as a lookup.
_PART: Final = 256
# Limit on the characters of all cached parts. Their token ids take about as much memory again.
_MOST_CHARACTERS: Final = 1 << 23


class Owner(NamedTuple):
    """Scope of cached texts.

    As with cached KV, another tenant or salt cannot learn from response times that a text is cached.
    """

    tenant: str = ""
    salt: str = ""


class _Key(NamedTuple):
    """Cache key of a part of a text: the tokenizer, the owner and the text."""

    tokenizer: str
    owner: Owner
    part: str


class PromptCache:
    """LRU cache of the token ids of parts of texts, shared by all tokenizers. Thread-safe.

    Args:
        most: largest number of characters of all cached parts.
    """

    def __init__(self, most: int = _MOST_CHARACTERS) -> None:
        self._most = most
        self._size = 0
        self._parts: OrderedDict[_Key, Future[array[int]]] = OrderedDict()
        self._lock = Lock()

    def num_new(self, keys: Iterable[_Key]) -> int:
        """Return the number of characters of the parts whose tokens are not in the cache yet."""
        with self._lock:
            known = [(key, self._parts.get(key)) for key in keys]
        return sum(len(key.part) for key, tokens in known if tokens is None or not tokens.done())

    def tokens(self, key: _Key, encode: Callable[[str], array[int]]) -> array[int]:
        """Return the token ids of a part from the cache, from another thread that is encoding it, or by encoding it."""
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
        """Remove a part whose encoding failed, unless the part has been evicted already."""
        with self._lock:
            if self._parts.get(key) is tokens:
                del self._parts[key]
                self._size -= len(key.part)

    def _evict(self) -> None:
        while self._size > self._most:
            key, _ = self._parts.popitem(last=False)
            self._size -= len(key.part)


class PromptEncoder:
    """Encodes texts with one tokenizer. Parts that several texts share are encoded only once.

    A text is cut only before special tokens, where tokenizers split it too. So the tokens of a text are the joined
    tokens of its parts. The cut positions depend only on the text before them. So a conversation to which turns are
    appended keeps its parts.

    Args:
        cache: cache of the parts; None for a cache that only this encoder uses.
        name: name of the tokenizer in the cache.
    """

    def __init__(self, tokenizer: Tokenizer, cache: PromptCache | None = None, name: str = "") -> None:
        self._tokenizer = tokenizer
        self._cache = PromptCache() if cache is None else cache
        self._name = name

    def cut(self, text: str) -> list[str]:
        """Return the parts of a text. All parts except the last are long enough to be cached."""
        parts, begin = [], 0
        for at in self._tokenizer.cuts(text):
            if at - begin >= _PART:
                parts.append(text[begin:at])
                begin = at
        return [*parts, text[begin:]]

    def num_new(self, parts: Sequence[str], owner: Owner) -> int:
        """Return the number of characters of the parts whose tokens are not in the cache yet."""
        return self._cache.num_new(_Key(self._name, owner, part) for part in parts)

    def encode(self, parts: Sequence[str], owner: Owner) -> array[int]:
        """Return the joined token ids of a text's parts, without special tokens around them.

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
