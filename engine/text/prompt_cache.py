"""Prompts to token ids, where the parts that prompts share are encoded once."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Final, NamedTuple

from .tokenizer import Tokenizer

_PART: Final = 256  # characters from which a part is kept: encoding it takes some twenty times as long as finding it
_MOST_CHARACTERS: Final = 1 << 23  # of all parts that are kept; their token ids take about as much memory again


class Owner(NamedTuple):
    """Who may notice, by the time that encoding takes, that a text was there before: as with KV, nobody else."""

    tenant: str = ""
    salt: str = ""


class PromptEncoder:
    """Keeps the tokens of what was encoded, the parts used last. Threads may share it.

    A text is cut before special tokens only, where tokenizers cut it too, so its tokens are those of its parts, joined.
    Conversations grow at their end, and parts are counted from their beginning: what one has in common with the last
    is cut alike.

    Args:
        most: characters of all parts together that are kept.
    """

    def __init__(self, tokenizer: Tokenizer, most: int = _MOST_CHARACTERS) -> None:
        self._tokenizer = tokenizer
        self._most = most
        self._size = 0
        self._kept: OrderedDict[tuple[Owner, str], Future[array[int]]] = OrderedDict()
        self._lock = Lock()

    def cut(self, text: str) -> list[str]:
        """The parts of a text, each but the last long enough to be kept."""
        parts, begin = [], 0
        for at in self._tokenizer.cuts(text):
            if at - begin >= _PART:
                parts.append(text[begin:at])
                begin = at
        return [*parts, text[begin:]]

    def num_missing(self, parts: Sequence[str], owner: Owner) -> int:
        """Characters of the parts whose tokens are not at hand."""
        with self._lock:
            found = [self._kept.get((owner, part)) for part in parts]
        return sum(len(part) for part, tokens in zip(parts, found, strict=True) if tokens is None or not tokens.done())

    def encode(self, parts: Sequence[str], owner: Owner) -> array[int]:
        """Token ids of a text by its parts, without special tokens around it.

        What another thread is encoding is waited for. Raises RequestError for a lone surrogate.
        """
        tokens: array[int] = array("i")
        for part in parts:
            tokens += self._tokens(owner, part) if len(part) >= _PART else self._tokenizer.encode(part, False)
        return tokens

    def _tokens(self, owner: Owner, part: str) -> array[int]:
        key = owner, part
        with self._lock:
            tokens = self._kept.get(key)
            if is_new := tokens is None:
                tokens = self._kept[key] = Future()
                self._size += len(part)
                self._drop()
            else:
                self._kept.move_to_end(key)
        if is_new:
            try:
                tokens.set_result(self._tokenizer.encode(part, False))
            except BaseException as error:
                tokens.set_exception(error)
                self._forget(key, tokens)
        return tokens.result()

    def _forget(self, key: tuple[Owner, str], tokens: Future[array[int]]) -> None:
        """Let a later call try again, unless the part was dropped already."""
        with self._lock:
            if self._kept.get(key) is tokens:
                del self._kept[key]
                self._size -= len(key[1])

    def _drop(self) -> None:
        """Keep no more than may be kept, and those that were used last."""
        while self._size > self._most:
            (_, part), _ = self._kept.popitem(last=False)
            self._size -= len(part)
