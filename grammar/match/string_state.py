"""String state: follows strings with large automata by string rules of our own, all else in the grammar library.

The library's lexer has a state for each pair of a place in a pattern and a length, and fails beyond about 100,000
states. So for a string of the schema with many places and lengths, the library's grammar admits any JSON string, and a
`StringRule` determines which tokens are allowed. A mask is the intersection of the library's mask and the rule's.

Only the library knows which rule applies to a string. To pass this on, the grammar has a second spelling of such a
value that no text can contain: `PROBE` and the rule's number. The numbers that the grammar admits before an opening
quote name the rules that may begin there. If several rules may begin (``anyOf``), all are followed at once. If only
some of them match at the closing quote, a list of their numbers (`MATCHED`) tells the library so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..emit.string_rules import MATCHED, PROBE, matched_text, probe_text
from ..vocabulary import Vocabulary
from .backends import BackendState, Row
from .closing_texts import ESCAPED, INSIDE, OUTSIDE
from .json_chars import BACKSLASH, QUOTE
from .string_masks import StringRule

# Characters after which a string may begin: those that separate JSON values, and last characters of values, as another
# value may follow in a sequence.
_BEFORE_STRINGS = frozenset(b':,[}]"0123456789el')
_Thread = tuple[int, tuple[int, int, int]]  # Number of a rule, and the position in its string.


@dataclass(frozen=True, slots=True)
class _Place:
    """The data kept for one place in the answer.

    Attributes:
        lexical: lexical state: outside or inside of a JSON string, or after a backslash in one.
        opened: the rules that may have begun at the opening quote of the string; empty for other strings.
        threads: one entry for each rule that still matches the string.
    """

    lexical: int = OUTSIDE
    opened: tuple[int, ...] = ()
    threads: tuple[_Thread, ...] = ()


@dataclass(frozen=True, slots=True)
class _Link:
    """An element of a linked list with the place after each accepted token.

    Attributes:
        place: the place.
        before: the link of the place before the last token; None at the beginning.
        num_taken: number of tokens by which the library was advanced for the last token: more than one if the end of a
            string in it had to be marked for the library (`MATCHED`).
        probed: for each text tried from here, the rules that may begin after it.
    """

    place: _Place
    before: _Link | None = None
    num_taken: int = 0
    probed: dict[bytes, tuple[int, ...]] = field(default_factory=dict, compare=False)


_Cut = tuple[int, tuple[int, ...]]  # Offset in a token, and the rules that match the string that ends there.


class StringState:
    """A state of a grammar with string rules.

    Args:
        lead_ins: last characters of the texts outside of JSON; empty if the answer is JSON only. A quote in such texts
            need not begin a JSON string. So the library is asked about each quote that may begin one.
    """

    def __init__(
        self, inner: BackendState, rules: Sequence[StringRule], vocabulary: Vocabulary, lead_ins: str = ""
    ) -> None:
        self._inner = inner
        self._rules = rules
        self._vocabulary = vocabulary
        self._lead_ins = lead_ins
        self._tokens = _special_tokens(vocabulary)
        self._link = _Link(_Place())

    def fill(self, row: Row) -> None:
        """Write the intersection of the library's bitmask and the masks of the rules that the string follows."""
        self._inner.fill(row)
        if self._inner.failure() is not None:
            return
        place = self._link.place
        bits = row.view(np.uint32)
        if place.threads:
            allowed: NDArray[np.bool_] | None = None
            for number, position in place.threads:
                found = self._rules[number].allowed(position)
                allowed = found if allowed is None else allowed | found
            assert allowed is not None
            bits &= _packed(allowed, len(bits))
        else:
            bits &= self._tokens.no_marker
        openers = (self._tokens.both if len(place.opened) > 1 else self._tokens.openers)[place.lexical]
        some = openers[(bits[openers >> 5] >> (openers & 31).astype(np.uint32)) & 1 > 0]
        if len(some):
            self._check_each(bits, some.tolist())

    def _check_each(self, bits: NDArray[np.uint32], tokens: list[int]) -> None:
        """Clear the bits of those ``tokens`` that open or close a string and that the rules or the library refuse."""
        probed: dict[bytes, tuple[int, ...]] = {}
        if not self._link.place.opened:
            # There are hundreds of such tokens, but the texts before their quotes are few.
            before = _before_quotes(self._vocabulary, self._lead_ins)
            texts = {text for token in tokens for text in before[token]}
            begun = {text for text in texts if self._beginning(text, [], probed)}
            tokens = [token for token in tokens if not begun.isdisjoint(before[token])]
        tried: dict[tuple[tuple[int, ...], bytes], bool] = {}
        for token in tokens:
            text = self._vocabulary.tokens[token]
            cuts: list[_Cut] = []
            place = self._follow(text, cuts, probed)
            good = place is not None
            if good and cuts:
                # The contents of the string are left out of the key, as they do not matter to the library.
                key = cuts[0][1], text[cuts[0][0] - 1 :] if self._link.place.opened else text
                if len(cuts) > 1 or key not in tried:
                    num_taken = self._take(token, cuts)
                    self._inner.rollback(num_taken)
                    tried[key] = num_taken > 0
                good = tried[key]
            if not good:
                bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)

    def accept(self, token: int) -> bool:
        """Advance by a token, if it is allowed."""
        if token in self._tokens.markers or not 0 <= token < len(self._vocabulary.tokens):
            return False
        if not self._link.place.opened:
            # A search of an end tries thousands of tokens. The library refuses most of them, and many have no quote. So
            # the library is asked first.
            if not self._inner.accept(token):
                return False
            if token in self._tokens.plain and self._link.place.lexical != ESCAPED:
                self._link = _Link(self._link.place, self._link, 1)
                return True
            self._inner.rollback(1)
        cuts: list[_Cut] = []
        is_text = token not in self._vocabulary.special
        place = self._follow(self._vocabulary.tokens[token], cuts, self._link.probed) if is_text else self._link.place
        if place is None:
            return False
        num_taken = self._take(token, cuts)
        if not num_taken:
            return False
        self._link = _Link(place, self._link, num_taken)
        return True

    def advance(self, tokens: Sequence[int]) -> int:
        return next((count for count, token in enumerate(tokens) if not self.accept(token)), len(tokens))

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens. Raises ValueError if fewer were accepted."""
        taken = 0
        for _ in range(count):
            taken += self._link.num_taken
            if self._link.before is None:
                raise ValueError(f"cannot take back {count} tokens")
            self._link = self._link.before
        self._inner.rollback(taken)

    def copy(self) -> StringState:
        """Return an independent state at the same position."""
        other = StringState(self._inner.copy(), self._rules, self._vocabulary, self._lead_ins)
        other._link = self._link
        return other

    def search_copy(self) -> StringState:
        """Return a copy whose inner state is a copy for a search: see ``BackendState.search_copy``."""
        other = StringState(self._inner.search_copy(), self._rules, self._vocabulary, self._lead_ins)
        other._link = self._link
        return other

    def can_end(self) -> bool:
        return self._inner.can_end()

    def failure(self) -> str | None:
        return self._inner.failure()

    def forced(self) -> bytes:
        return b"" if self._link.place.threads else self._inner.forced()

    def string_end(self) -> bytes:
        """Return the shortest end of the string that has begun, with its quote; no bytes outside of strings."""
        end = self._inner.string_end()
        if end:
            return end
        rests = [self._rules[number].rest(position) for number, position in self._link.place.threads]
        return min((rest for rest in rests if rest is not None), key=len, default=b"")

    def _follow(self, text: bytes, cuts: list[_Cut], probed: dict[bytes, tuple[int, ...]]) -> _Place | None:
        """Return the place after the text of a token; None if a string in it matches no rule.

        Args:
            text: text of the token.
            cuts: list to which the end of a string is added if only some of its rules match the string.
            probed: for each part of the text, the rules that may begin after it; parts asked here are added.
        """
        place = self._link.place
        lexical, opened, threads = place.lexical, place.opened, place.threads
        for at, byte in enumerate(text):
            if opened:
                if byte != QUOTE or lexical == ESCAPED:
                    threads = self._stepped(threads, byte)
                    if not threads:
                        return None
                else:
                    matched = tuple(number for number, position in threads if self._rules[number].may_close(position))
                    if not matched:
                        return None
                    if len(matched) < len(opened):
                        cuts.append((at + 1, matched))
                    opened = threads = ()
            elif byte == QUOTE and lexical == OUTSIDE and may_precede(text[:at], self._lead_ins):
                opened = self._beginning(text[:at], cuts, probed)
                threads = tuple((number, self._rules[number].start) for number in opened)
            if lexical == ESCAPED:
                lexical = INSIDE
            elif byte == QUOTE:
                lexical = INSIDE if lexical == OUTSIDE else OUTSIDE
            elif byte == BACKSLASH and lexical == INSIDE:
                lexical = ESCAPED
            if self._lead_ins and not opened:
                lexical = OUTSIDE
        if opened:
            threads = tuple(thread for thread in threads if self._rules[thread[0]].can_finish(thread[1]))
            if not threads:
                return None
        return _Place(lexical, opened, threads)

    def _stepped(self, threads: tuple[_Thread, ...], byte: int) -> tuple[_Thread, ...]:
        found = []
        for number, position in threads:
            after = self._rules[number].after(position, byte)
            if after is not None:
                found.append((number, after))
        return tuple(found)

    def _beginning(self, text: bytes, cuts: list[_Cut], probed: dict[bytes, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the rules that may begin after ``text``.

        Args:
            cuts: ends of the strings in the text that only some of their rules match.
            probed: see `_follow`.
        """
        key = text if not cuts else text + b"\0" + repr(cuts).encode()
        known = probed.get(key)
        if known is None:
            known = probed[key] = self._probe(text, cuts)
        return known

    def _probe(self, text: bytes, cuts: list[_Cut]) -> tuple[int, ...]:
        tokens = self._pieces(text, cuts)
        count = self._inner.advance(tokens)
        found: list[int] = []
        if count == len(tokens) and self._inner.accept(self._tokens.probe):
            forced = self._inner.forced()
            if b";" in forced:
                found.append(int(forced[: forced.index(b";")]))
            else:
                for number in range(len(self._rules)):
                    digits = self._tokens.digits(number)
                    taken = self._inner.advance(digits)
                    if taken == len(digits):
                        found.append(number)
                    self._inner.rollback(taken)
            count += 1
        self._inner.rollback(count)
        return tuple(found)

    def _pieces(self, text: bytes, cuts: list[_Cut]) -> list[int]:
        """Return ``text`` as tokens for the library, with the list of the rules that match inserted at each cut."""
        tokens, before = [], 0
        for at, matched in cuts:
            tokens += self._vocabulary.tokenize(text[before:at] + matched_text(matched))
            before = at
        return tokens + self._vocabulary.tokenize(text[before:])

    def _take(self, token: int, cuts: list[_Cut]) -> int:
        """Advance the library by a token. Returns the number of tokens that it took; 0 if it refuses the token."""
        if not cuts:
            return int(self._inner.accept(token))
        tokens = self._pieces(self._vocabulary.tokens[token], cuts)
        count = self._inner.advance(tokens)
        if count == len(tokens):
            return count
        self._inner.rollback(count)
        return 0


def _packed(allowed: NDArray[np.bool_], num_words: int) -> NDArray[np.uint32]:
    packed = np.zeros(4 * num_words, dtype=np.uint8)
    bytes_ = np.packbits(allowed, bitorder="little")
    packed[: len(bytes_)] = bytes_
    return packed.view(np.uint32)


class _SpecialTokens:
    """The tokens of a vocabulary that open or close a string before the token's own end, by lexical state; the markers.

    Attributes:
        openers: tokens with text after the opening quote of a string, ascending.
        both: the tokens of `openers`, and those with text after the closing quote of a string that has begun.
        markers: tokens with a byte of a marker; the state never allows them.
        no_marker: bitmask of all other tokens.
        probe: the token of `PROBE`.
        plain: tokens that contain no quote and no backslash.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        openers: list[list[int]] = [[], [], []]
        closers: list[list[int]] = [[], [], []]
        markers: set[int] = set()
        plain = set(vocabulary.special)
        for token, text in enumerate(vocabulary.tokens):
            if token in vocabulary.special:
                continue
            if b'"' not in text and b"\\" not in text:
                plain.add(token)
            if PROBE in text or MATCHED in text:
                markers.add(token)
            if b'"' in text[:-1]:
                for lexical in (OUTSIDE, INSIDE, ESCAPED):
                    quotes = _quotes(lexical, text[:-1])
                    if (lexical == OUTSIDE and quotes) or len(quotes) > 1:
                        openers[lexical].append(token)
                    if lexical != OUTSIDE and quotes:
                        closers[lexical].append(token)
        self.openers = [np.array(tokens, dtype=np.int64) for tokens in openers]
        self.both = [
            np.union1d(some, np.array(others, dtype=np.int64))
            for some, others in zip(self.openers, closers, strict=True)
        ]
        self.markers = frozenset(markers)
        self.plain = frozenset(plain)
        allowed = np.ones(vocabulary.size, dtype=np.bool_)
        allowed[list(markers)] = False
        self.no_marker = _packed(allowed, vocabulary.num_words)
        [self.probe] = vocabulary.tokenize(PROBE)
        self._tokenize = vocabulary.tokenize

    def digits(self, number: int) -> list[int]:
        return self._tokenize(probe_text(number)[len(PROBE) :])


def _quotes(lexical: int, text: bytes) -> list[int]:
    """Return the offsets of the quotes that open or close a string."""
    found = []
    is_inside, escaped = lexical != OUTSIDE, lexical == ESCAPED
    for at, byte in enumerate(text):
        if escaped:
            escaped = False
        elif byte == QUOTE:
            is_inside = not is_inside
            found.append(at)
        elif byte == BACKSLASH:
            escaped = is_inside
    return found


def can_spell_markers(vocabulary: Vocabulary) -> bool:
    """Return whether the vocabulary can spell the markers of string rules in tokens of one byte each."""
    try:
        tokens = vocabulary.tokenize(probe_text(0)), vocabulary.tokenize(matched_text([1]))
    except ValueError:
        return False
    return all(vocabulary.tokens[listed[0]] in (PROBE, MATCHED) for listed in tokens)


def may_precede(text: bytes, lead_ins: str) -> bool:
    """Return whether a JSON string may begin after the text of a token, judged by that text alone."""
    text = text.rstrip(b" \t\r\n") if lead_ins else b""
    return not text or text[-1] in _BEFORE_STRINGS or text[-1] in lead_ins.encode()


@lru_cache(maxsize=32)
def _before_quotes(vocabulary: Vocabulary, lead_ins: str) -> dict[int, tuple[bytes, ...]]:
    """Return, for each token with a quote, the texts before the quotes at which a string may begin in its middle."""
    found = {}
    for token in _special_tokens(vocabulary).openers[OUTSIDE].tolist():
        text = vocabulary.tokens[token]
        before = (text[:at] for at, byte in enumerate(text[:-1]) if byte == QUOTE)
        found[token] = tuple(each for each in before if may_precede(each, lead_ins))
    return found


def _special_tokens(vocabulary: Vocabulary) -> _SpecialTokens:
    return vocabulary.derived(_SpecialTokens)
