"""Described vocabularies: those of adapters of whose tokens an engine has the bytes, and when it gives them up."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from ..errors import EngineDead
from ..messages import ForgetTokens, TokenTexts
from .adapter_tokenizers import ServedTokenizer

MOST_IDLE = 16
"""Vocabularies of loaded adapters whose bytes the engine keeps while no sequence uses them."""


class TokenReceiver(Protocol):
    """An engine, as far as it is told of vocabularies."""

    def describe_tokens(self, message: TokenTexts | ForgetTokens) -> None: ...


class DescribedVocabularies:
    """Sends the bytes of a vocabulary before the first sequence with a grammar over it.

    The engine drops these bytes (half a megabyte or more) once no sequence uses the vocabulary and no adapter that used
    it is loaded under its name any more. Beyond ``MOST_IDLE`` vocabularies, it drops the least recently used ones. The
    model's own vocabulary is kept.

    Args:
        engine: the engine in which sequences run.
    """

    def __init__(self, engine: TokenReceiver) -> None:
        self._engine = engine
        self._names: dict[str, set[str]] = {}  # names of adapters by vocabulary; the most recently used one is last
        self._users: dict[int, str] = {}  # vocabularies of sequences that have not ended

    def use(self, served: ServedTokenizer, adapters: Iterable[str], ids: Iterable[int]) -> None:
        """Note sequences with a grammar, before they are sent. Raises EngineDead.

        Args:
            served: tokenizer of the sequences.
            adapters: names of the sequences' adapters.
            ids: numbers of the sequences.
        """
        key = served.key
        if key not in self._names:
            self._engine.describe_tokens(served.texts())
            self._names[key] = set()
        if key:
            self._names[key] = self._names.pop(key).union(adapters)
            self._users.update(dict.fromkeys(ids, key))
            self._give_up()

    def end(self, ids: Iterable[int]) -> None:
        """Note that sequences have ended or were aborted."""
        ended = [number for number in ids if number in self._users]
        for number in ended:
            del self._users[number]
        if ended:
            self._give_up()

    def adapter_changed(self, name: str) -> None:
        """Note that an adapter's name was unloaded, or stands for another version."""
        for names in self._names.values():
            names.discard(name)
        self._give_up()

    def _give_up(self) -> None:
        in_use = {"", *self._users.values()}
        idle = [key for key in self._names if key not in in_use]
        kept = [key for key in idle if self._names[key]][-MOST_IDLE:]
        for key in idle:
            if key not in kept:
                del self._names[key]
                # An engine that has died holds no vocabulary any more.
                with suppress(EngineDead):
                    self._engine.describe_tokens(ForgetTokens(key))
