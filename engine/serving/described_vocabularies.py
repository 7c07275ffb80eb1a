"""Described vocabularies: the adapters' vocabularies whose token bytes the engine has, and when it drops them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from ..errors import EngineDead
from ..messages import ForgetTokens, TokenTexts
from .adapter_tokenizers import ServedTokenizer

MOST_IDLE = 16
"""Number of loaded adapters' vocabularies whose token bytes the engine keeps while no sequence uses them."""


class TokenReceiver(Protocol):
    """Interface of an engine that receives the token bytes of vocabularies."""

    def describe_tokens(self, message: TokenTexts | ForgetTokens) -> None: ...


class DescribedVocabularies:
    """Sends the token bytes of a vocabulary to the engine before the first sequence with a grammar over that
    vocabulary.

    The engine drops these bytes (half a megabyte or more) when no sequence uses the vocabulary and no adapter that used
    the vocabulary is still loaded under the same name. Of more than ``MOST_IDLE`` unused vocabularies, the least
    recently used ones are dropped. The model's own vocabulary is never dropped.

    Args:
        engine: the engine in which the sequences run.
    """

    def __init__(self, engine: TokenReceiver) -> None:
        self._engine = engine
        # Names of adapters by vocabulary, the most recently used vocabulary last.
        self._names: dict[str, set[str]] = {}
        self._users: dict[int, str] = {}  # Vocabularies of the sequences that have not ended, by sequence id.

    def use(self, served: ServedTokenizer, adapters: Iterable[str], ids: Iterable[int]) -> None:
        """Record that sequences with a grammar use a vocabulary.

        Must be called before the sequences are sent. Raises EngineDead.

        Args:
            served: tokenizer of the sequences.
            adapters: names of the sequences' adapters.
            ids: ids of the sequences.
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
        """Record that sequences have ended or were aborted."""
        ended = [number for number in ids if number in self._users]
        for number in ended:
            del self._users[number]
        if ended:
            self._give_up()

    def adapter_changed(self, name: str) -> None:
        """Record that the adapter of this name was unloaded, or replaced by another version."""
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
                # The error does not matter, because an engine that has died holds no vocabulary.
                with suppress(EngineDead):
                    self._engine.describe_tokens(ForgetTokens(key))
