"""Tokens to text, as they come: only whole characters leave, and nothing that left is ever revised."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from .tokenizer import Tokenizer

_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence of tokens that goes on from a prompt.

    The texts that ``push`` and ``finish`` return, joined, are the UTF-8 text of the tokens' bytes, whatever way the
    tokens were split over the calls. Bytes that no later token could complete to a character become U+FFFD, one for
    each maximal ill-formed part; bytes that may still be completed are held back. Time is linear in the bytes.

    A space that stands at the very beginning is kept, unlike in ``Tokenizer.decode``: it separates the answer from
    the prompt.

    Args:
        skip_special_tokens: special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._join = tokenizer.join_bytes
        self._skip = skip_special_tokens
        self._decoder = _DECODER("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """The text that ``tokens`` make certain."""
        return self._decoder.decode(self._join(tokens, self._skip))

    def finish(self) -> str:
        """What was held back: an incomplete character becomes U+FFFD. The next ``push`` starts anew."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
