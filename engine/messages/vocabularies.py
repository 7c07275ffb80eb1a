"""Messages about grammars and the vocabularies that they are compiled over."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """A vocabulary as bytes, for grammars. Sent once, before the first ``Submit`` with a grammar over it.

    Attributes:
        lengths: bytes of each token, ``array('i')``.
        data: the bytes of all tokens, one after the other.
        special: ids of special tokens, which do not represent text.
        vocabulary: key of the tokenizer of an adapter, "" for the model's own.
        ends: tokens that end an answer, in addition to the model's end tokens.
    """

    lengths: array[int]
    data: bytes
    special: tuple[int, ...]
    vocabulary: str = ""
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ForgetTokens:
    """Give up the bytes of a vocabulary that no later ``Submit`` uses before they are sent again."""

    vocabulary: str


@dataclass(frozen=True, slots=True)
class PrepareGrammar:
    """Compile a grammar in advance. The engine sends no answer, and ignores the message if too many grammars wait.

    Attributes:
        tenant: tenant whose share of the compiles it uses.
    """

    kind: str
    content: bytes
    vocabulary: str = ""
    tenant: str = ""
