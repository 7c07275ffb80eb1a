"""Incremental detokenization: emits whole characters only and never revises emitted text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from .tokenizer import Tokenizer

_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Converts the tokens of one sequence, which continues a prompt, to text.

    The joined results of ``push`` and ``finish`` are the UTF-8 text of the tokens' bytes, however the tokens are split
    over calls. Bytes that no later token can complete to a character become U+FFFD, one for each maximal ill-formed
    part. Bytes that may still be completed are held back. The time is linear in the number of bytes.

    A leading space is kept, unlike in ``Tokenizer.decode``, because it separates the answer from the prompt.

    Args:
        skip_special_tokens: whether the text of special tokens is left out.
        shown: special tokens whose text is kept nevertheless.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        self._join = tokenizer.join_bytes
        self._skip = skip_special_tokens and not shown
        self._dropped = tokenizer.special_ids - shown if skip_special_tokens and shown else frozenset()
        self._decoder = _DECODER("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """Add tokens. Returns the text that is complete now."""
        if self._dropped:
            tokens = [token for token in tokens if token not in self._dropped]
        return self._decoder.decode(self._join(tokens, self._skip))

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character, and reset the state."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
