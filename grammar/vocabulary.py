"""Vocabulary: a tokenizer's tokens as bytes, tokenization of closing texts, and the libraries' forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import llguidance

from .sized_cache import SizedCache

T = TypeVar("T")

# How llguidance writes a special token among forced bytes.
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")
_ONE = (1,)
# Words as tokenizers split them before merging: one leading space belongs to a word, more white space is a word.
_WORDS = re.compile(rb"\s+(?=\s\S)| ?\S+|\s+")
MAX_WORD = 200  # merging takes quadratic time; longer words are tokenized greedily
# What grammars of the vocabulary compute along answers: masks of strings, ends, groups of tokens, words.
CACHE_BYTES = 64 << 20
# Token sets precomputed per vocabulary, from which llguidance composes the masks inside of strings.
_SLICES = [rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (10, 30)] + [r'[^"\\\x00-\x1F\x7F]+']


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of every token, and the tokens that are not text.

    Attributes:
        tokens: the bytes of each token id; a special token's bytes are its name.
        special: ids of tokens that are never produced as text.
        eos: ids that end an answer, at least one.
        size: width of the logits; ids beyond `tokens` are never allowed.
        cache: results that matchers over this vocabulary compute during answers and share.
    """

    tokens: tuple[bytes, ...]
    special: frozenset[int]
    eos: tuple[int, ...]
    size: int = 0
    cache: SizedCache = field(default_factory=lambda: SizedCache(CACHE_BYTES), init=False, repr=False)
    _by_bytes: dict[bytes, int] = field(init=False, repr=False)
    _derived: dict[Callable[[Vocabulary], Any], Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.eos or not all(0 <= token < len(self.tokens) for token in self.eos):
            raise ValueError(f"end tokens must be ids below {len(self.tokens)}, not {self.eos}")
        object.__setattr__(self, "size", max(self.size, len(self.tokens)))
        text = {t: i for i, t in reversed(list(enumerate(self.tokens))) if i not in self.special and t}
        object.__setattr__(self, "_by_bytes", text)

    @property
    def num_words(self) -> int:
        """32-bit words in one row of a mask."""
        return (self.size + 31) // 32

    def derived(self, compute: Callable[[Vocabulary], T]) -> T:
        """Return the result of a function of all tokens, computed once and cached as long as the vocabulary lives."""
        found: T | None = self._derived.get(compute)
        return self._derived.setdefault(compute, compute(self)) if found is None else found

    def tokenize(self, text: bytes) -> list[int]:
        """Tokenize a text greedily, longest token first. The tokens may differ from those of the model's tokenizer.

        Raises:
            ValueError: a byte has no token.
        """
        tokens = []
        at = 0
        lengths, by_bytes = self._lengths, self._by_bytes
        while at < len(text):
            for length in lengths.get(text[at : at + 2], _ONE):
                token = by_bytes.get(text[at : at + length])
                if token is not None:
                    tokens.append(token)
                    at += length
                    break
            else:
                raise ValueError(f"the vocabulary has no token for the byte {text[at]}")
        return tokens

    def fewest(self, text: bytes) -> list[int]:
        """Tokenize a text into as few tokens as possible.

        Raises:
            ValueError: as `tokenize`.
        """
        counts = self.fewest_counts(text)
        return self.tokenize(text) if counts[0] > len(text) else self._cut(text, counts, 0)

    def fewest_rests(self, text: bytes, offsets: Sequence[int]) -> list[list[int]]:
        """Tokenize the rests of a text behind some offsets into as few tokens as possible, where that is possible."""
        counts = self.fewest_counts(text)
        return [self._cut(text, counts, at) for at in offsets if counts[at] <= len(text)]

    def _cut(self, text: bytes, counts: list[int], at: int) -> list[int]:
        """Tokenize the rest of a text by the fewest tokens of each rest."""
        tokens = list[int]()
        while at < len(text):
            lengths = self._lengths.get(text[at : at + 2], _ONE)
            at, token = next(
                (at + length, token)
                for length in lengths
                if at + length <= len(text)
                and counts[at + length] == counts[at] - 1
                and (token := self._by_bytes.get(text[at : at + length])) is not None
            )
            tokens.append(token)
        return tokens

    def fewest_counts(self, text: bytes) -> list[int]:
        """Return for each offset in a text the fewest tokens of the rest, beyond its length where there are none."""
        lengths, by_bytes, end = self._lengths, self._by_bytes, len(text)
        counts = [*[end + 1] * end, 0]
        for at in range(end - 1, -1, -1):
            for length in lengths.get(text[at : at + 2], _ONE):
                if at + length <= end and counts[at + length] + 1 < counts[at] and text[at : at + length] in by_bytes:
                    counts[at] = counts[at + length] + 1
        return counts

    def recut(self, tokens: Sequence[int]) -> list[int]:
        """Return the same text in as few tokens as possible, special tokens in their places."""
        found: list[int] = []
        text = b""
        for token in tokens:
            if token in self.special:
                found += [*self.fewest(text), token]
                text = b""
            else:
                text += self.tokens[token]
        return found + self.fewest(text)

    def tokenize_bpe(self, text: bytes) -> list[int]:
        """Tokenize a text as a BPE tokenizer probably does (Sennrich et al. 2016).

        In all known vocabularies token ids are in the order of the merges. So within a word the pair of neighbours
        that forms the token of the lowest id is merged first. Words with a byte that is not a token: as `tokenize`.

        Raises:
            ValueError: as `tokenize`.
        """
        return [token for word in _WORDS.findall(text) for token in self._bpe_word(word)]

    def _bpe_word(self, word: bytes) -> tuple[int, ...]:
        known: tuple[int, ...] | None = self.cache.get(word)
        if known is None:
            known = tuple(self._merge(word))
            self.cache.put(word, known, 8 * len(known) + len(word))
        return known

    def _merge(self, word: bytes) -> list[int]:
        by_bytes = self._by_bytes
        parts = [word] if word in by_bytes else [word[at : at + 1] for at in range(len(word))]
        if len(word) > MAX_WORD or not all(part in by_bytes for part in parts):
            return self.tokenize(word)
        while len(parts) > 1:
            found, at = min((by_bytes.get(a + b, self.size), at) for at, (a, b) in enumerate(pairwise(parts)))
            if found == self.size:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [by_bytes[part] for part in parts]

    @cached_property
    def _lengths(self) -> dict[bytes, tuple[int, ...]]:
        """Lengths of the tokens that begin with two given bytes, longest first, down to one byte."""
        found: dict[bytes, set[int]] = {}
        for text in self._by_bytes:
            found.setdefault(text[:2], {1}).add(len(text))
        return {start: tuple(sorted(lengths, reverse=True)) for start, lengths in found.items()}

    def tokenize_forced(self, data: bytes, *, bpe: bool = False) -> list[int]:
        """Tokenize like `tokenize` or `tokenize_bpe`, but bytes ``\\xff[5]`` are token 5."""
        cut = self.tokenize_bpe if bpe else self.tokenize
        parts = _SPECIAL.split(data)
        tokens = cut(parts[0])
        for number, text in zip(parts[1::2], parts[2::2], strict=True):
            tokens += [int(number), *cut(text)]
        return tokens

    def tokenize_named(self, text: str, *, bpe: bool = False) -> list[int]:
        """Tokenize like `tokenize` or `tokenize_bpe`, but the names of special tokens in the text are those tokens."""
        cut = self.tokenize_bpe if bpe else self.tokenize
        parts = self.named_parts(text)
        return [t for part in parts for t in ([part] if isinstance(part, int) else cut(part.encode()))]

    def token_of(self, text: bytes) -> int | None:
        """Return the token with these bytes that is not special; None if there is none."""
        return self._by_bytes.get(text)

    def named_parts(self, text: str) -> list[str | int]:
        """Split a text into plain parts, none empty, and the ids of the special tokens that it names."""
        parts = self._names.split(text) if self._names else [text]
        return [self._specials.get(part, part) for part in parts if part]

    @cached_property
    def _specials(self) -> dict[str, int]:
        return {self.tokens[token].decode(errors="replace"): token for token in self.special if self.tokens[token]}

    @cached_property
    def _names(self) -> re.Pattern[str] | None:
        # The longer of two names that match counts.
        names = sorted(self._specials, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    @cached_property
    def llguidance(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(_Wrapper(self), eos_token=list(self.eos), slices=_SLICES)

    @cached_property
    def xgrammar(self) -> Any:
        """The vocabulary for XGrammar, a ``TokenizerInfo``; imported on first use, which takes seconds."""
        import xgrammar

        words = [b"" if i in self.special else token for i, token in enumerate(self.tokens)]
        return xgrammar.TokenizerInfo(words, vocab_size=self.size, stop_token_ids=list(self.eos))


class _Wrapper(llguidance.TokenizerWrapper):
    """The tokenizer interface of llguidance."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.eos_token_id = vocabulary.eos[0]
        # The library's masks are as wide as its tokens are many, whatever it is told of the logits' width.
        missing = vocabulary.size - len(vocabulary.tokens)
        self.tokens: Sequence[bytes] = [
            *(token if token or i in vocabulary.special else b"<empty>" for i, token in enumerate(vocabulary.tokens)),
            *[b"<empty>"] * missing,
        ]
        self.special_token_ids = sorted({*vocabulary.special, *vocabulary.eos, *self._blank(vocabulary)})
        self._tokenize = vocabulary.tokenize

    @staticmethod
    def _blank(vocabulary: Vocabulary) -> list[int]:
        """Return the ids without a token: those that have no text, and those of logits beyond the tokens."""
        blank = [i for i, token in enumerate(vocabulary.tokens) if not token]
        return [*blank, *range(len(vocabulary.tokens), vocabulary.size)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenize(text.encode() if isinstance(text, str) else text)
