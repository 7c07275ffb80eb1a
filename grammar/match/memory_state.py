"""Memory state: keeps the keys of an object and the items of an array distinct, which a grammar cannot express.

A context-free grammar cannot require that a value differs from earlier ones. So this state reads the JSON along with
the library. It remembers the keys of each object, and the items of each array whose items must be distinct. It removes
from the masks the tokens that complete a repetition, and those after which only repetitions are possible. A mask is the
intersection of the library's mask and the mask of this state.

Keys are distinct in every object. Only the library knows which arrays have distinct items, and which objects have so
few possible keys that all may be used. To pass this on, the grammar has a second spelling of such a container that no
text can contain: `ENTRIES` and the container's number. The numbers that the grammar admits before an opening bracket
name the languages that the entries may have. If other text may surround the JSON, the parts that are JSON are found in
the same way.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, takewhile
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..emit.entry_languages import ENTRIES, JSON_PART
from ..emit.string_rules import MATCHED, PROBE
from ..vocabulary import Vocabulary
from .backends import BackendState, Row
from .closing_texts import ESCAPED, INSIDE, OUTSIDE
from .entry_sets import Entries, EntryCounter, Outlook, scalar_value
from .json_chars import BACKSLASH, QUOTE
from .partial_value import PartialValue, container_value

# Largest depth of a value in an array of distinct items.
MAX_DEPTH = 200
MAX_SEARCHED = 1_000  # Largest number of beginnings of an item that are followed in search of a new end of it.
# The lexical state within a marker of this state or of the string rules. The other states are those of `closing_texts`.
_MARKER = 3
_BLANKS = b" \t\r\n"
_OPENING, _CLOSING = b"[{", b"]}"
_BLANK = re.compile(rb"[ \t\r\n]+")
_MARKERS = re.compile(rb"[\x01-\x03][0-9,]*;")
_MARKER_BYTES = frozenset((*PROBE, *MATCHED, *ENTRIES))


class _Frame(NamedTuple):
    """An array or object that is open.

    Attributes:
        outer: the array or object around it.
        is_object: whether it is an object; otherwise it is an array.
        counters: the languages that its entries may have; empty for containers whose entries are not counted.
        entries: its keys, or its items if they must be distinct.
        is_before_entry: for an object, whether a key may come next; for an array, whether an item must come next.
        begun: position in the answer at which the present item has begun, if it is an array or object.
        is_watched: whether it, or a container around it, is an array of distinct items.
        depth: number of containers around it.
    """

    outer: _Frame | None
    is_object: bool
    counters: tuple[EntryCounter, ...]
    entries: Entries = Entries()
    is_before_entry: bool = False
    begun: int = 0
    is_watched: bool = False
    depth: int = 0

    @property
    def has_distinct_items(self) -> bool:
        return not self.is_object and bool(self.counters)


class _Rivals(NamedTuple):
    """The earlier items of an array with which the present item may become equal. It is an array or object.

    Kept only for items whose language has a limited number of values.

    Attributes:
        begun: position in the answer at which the present item has begun.
        values: values of the earlier items.
    """

    begun: int
    values: tuple[Any, ...]

    def kept(self, text: bytes) -> _Rivals:
        """Return the rivals with which the item may still become equal, given its text so far."""
        partial = PartialValue(text)
        return self._replace(values=tuple(filter(partial.may_become, self.values)))


@dataclass(frozen=True, slots=True)
class _Place:
    """The data kept for one place in the answer.

    Attributes:
        lexical: lexical state: outside or inside of a JSON string, after a backslash in one, or in a marker.
        frame: the innermost array or object that is open.
        entry: beginning of the present key, or of the present scalar item of an array of distinct items; empty
            elsewhere.
        rivals: rivals of the items that have begun, from the outermost item on. Items without rivals are left out.
    """

    lexical: int = OUTSIDE
    frame: _Frame | None = None
    entry: bytes = b""
    rivals: tuple[_Rivals, ...] = ()

    @property
    def must_be_searched(self) -> bool:
        """Whether only a search can tell if anything but a repetition is possible here."""
        frame = self.frame
        if self.rivals or frame is None:
            return bool(self.rivals)
        is_before_item = frame.has_distinct_items and frame.is_before_entry and not self.entry
        return is_before_item and any(each.has_limited for each in frame.counters)


@dataclass(frozen=True, slots=True)
class _Link:
    """An element of a linked list with the place after each accepted token.

    Attributes:
        place: the place.
        before: the link of the place before the last token; None at the beginning.
        text: text of the last token.
        size: number of bytes of the answer so far.
        probed: for each text tried from here, the numbers of the containers that may begin after it.
        searched: for each text searched from here, whether an item can have a new end after it.
    """

    place: _Place
    before: _Link | None = None
    text: bytes = b""
    size: int = 0
    probed: dict[bytes, tuple[int, ...]] = field(default_factory=dict, compare=False)
    searched: dict[bytes, bool] = field(default_factory=dict, compare=False)


class MemoryState:
    """A state of a grammar that remembers the entries of its containers.

    Args:
        inner: the library's state.
        counters: the languages of the containers by number; the first has number 1.
        has_parts: whether only parts of the text are JSON.
    """

    def __init__(
        self, inner: BackendState, counters: Sequence[EntryCounter], vocabulary: Vocabulary, *, has_parts: bool = False
    ) -> None:
        self._inner = inner
        self._counters = counters
        self._vocabulary = vocabulary
        self._has_parts = has_parts
        self._tokens = _entry_tokens(vocabulary)
        self._link = _Link(_Place())
        self._has_limited = any(each.has_limited for each in counters)
        self._is_searching = False

    def fill(self, row: Row) -> None:
        """Write the library's bitmask without the tokens that lead only to repetitions."""
        self._inner.fill(row)
        if self._inner.failure() is not None:
            return
        bits = row.view(np.uint32)
        if self._counters or self._has_parts:
            bits &= self._tokens.no_marker
        place = self._link.place
        if place.entry and place.lexical != OUTSIDE:
            self._ban_seen(bits, place)
        suspects = self._suspects(bits, place)
        if len(suspects):
            self._check_each(bits, place, suspects)
        if place.rivals and place.lexical == INSIDE:
            self._ban_used_up(bits)

    def _suspects(self, bits: NDArray[np.uint32], place: _Place) -> NDArray[np.int64]:
        """Return the allowed tokens that must be checked: they may complete an entry and go on, or begin one."""
        tokens, frame = self._tokens, place.frame
        lexical = place.lexical if place.lexical in (INSIDE, ESCAPED) else OUTSIDE
        if frame is None:
            listed = tokens.opening
        elif not (frame.is_watched or frame.counters) or self._has_plain_items(frame):
            listed = tokens.nested if self._counters and lexical == OUTSIDE else tokens.whole[lexical]
        elif lexical == OUTSIDE:
            return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        else:
            listed = tokens.closing[lexical]
        some: NDArray[np.int64] = listed[(bits[listed >> 5] >> (listed & 31).astype(np.uint32)) & 1 > 0]
        return some

    def _has_plain_items(self, frame: _Frame) -> bool:
        """Return whether the items are strings of an endless language, where only a whole string is a repetition."""
        is_inner = frame.outer is not None and frame.outer.is_watched
        return frame.has_distinct_items and not is_inner and all(each.is_plain for each in frame.counters)

    def _check_each(self, bits: NDArray[np.uint32], place: _Place, suspects: NDArray[np.int64]) -> None:
        """Clear the bits of those ``suspects`` that lead only to repetitions."""
        frame = place.frame
        is_endless = not self._has_limited and (frame is None or all(each.is_endless for each in frame.counters))
        lexical = place.lexical if place.lexical in (INSIDE, ESCAPED) else OUTSIDE
        kinds = self._tokens.kinds(lexical, is_endless=is_endless)
        numbers = kinds.of(suspects)
        wrong = [number for number in np.unique(numbers).tolist() if self._possible(kinds.texts[number]) is None]
        for token in suspects[np.isin(numbers, wrong)].tolist() if wrong else ():
            _ban(bits, token)

    def _ban_seen(self, bits: NDArray[np.uint32], place: _Place) -> None:
        """Clear the bits of the tokens with which the string that has begun becomes equal to an earlier entry."""
        assert place.frame is not None
        rests = [rival[len(place.entry) :] for rival in place.frame.entries.rivals(place.entry)]
        for rest in rests:
            for token in self._tokens.beginning_with(rest):
                _ban(bits, token)
        if all(each.is_endless for each in place.frame.counters):
            return
        # Only beginnings of earlier entries are followed. Any other text has an end that differs from all of them, or
        # the library would not have allowed it.
        for begun in {rest[:at] for rest in rests for at in range(1, len(rest))}:
            if self._vocabulary.token_of(begun) is not None and self._follow(begun) is None:
                for token in self._tokens.spelled(begun):
                    _ban(bits, token)

    def _ban_used_up(self, bits: NDArray[np.uint32]) -> None:
        """Clear the bits of the tokens in a string after which an item can only become equal to an earlier one."""
        rests = set[bytes]()
        for each in self._link.place.rivals:
            rests |= PartialValue(self.written(each.begun, b"")).rests(each.values)
        for text in {rest[:at] for rest in rests for at in range(1, len(rest) + 1)}:
            tokens = [token for token in self._tokens.spelled(text) if bits[token >> 5] >> (token & 31) & 1]
            if tokens and self._possible(text) is None:
                for token in tokens:
                    _ban(bits, token)

    def accept(self, token: int) -> bool:
        """Advance by a token, if it is allowed."""
        if not 0 <= token < len(self._vocabulary.tokens) or token in self._tokens.markers:
            return False
        if token in self._vocabulary.special:
            return self._inner.accept(token) and self._append(self._link.place, b"")
        text = self._vocabulary.tokens[token]
        if self._has_limited or self._must_probe(text):
            place = self._possible(text)
            return place is not None and self._inner.accept(token) and self._append(place, text)
        if not self._inner.accept(token):
            return False
        place = self._follow(text)
        if place is None:
            self._inner.rollback(1)
            return False
        return self._append(place, text)

    def _append(self, place: _Place, text: bytes) -> bool:
        self._link = _Link(place, self._link, text, self._link.size + len(text))
        return True

    def _must_probe(self, text: bytes) -> bool:
        return (self._has_parts or bool(self._counters)) and (b"[" in text or b"{" in text)

    def advance(self, tokens: Sequence[int]) -> int:
        """Advance by the longest allowed prefix of ``tokens``. Returns its length."""
        if self._has_parts or self._counters:
            return next((count for count, token in enumerate(tokens) if not self.accept(token)), len(tokens))
        count = self._inner.advance(tokens)
        for at, token in enumerate(tokens[:count]):
            text = b"" if token in self._vocabulary.special else self._vocabulary.tokens[token]
            place = self._follow(text)
            if place is None:
                self._inner.rollback(count - at)
                return at
            self._append(place, text)
        return count

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens. Raises ValueError if fewer were accepted."""
        link = self._link
        for _ in range(count):
            if link.before is None:
                raise ValueError(f"cannot take back {count} tokens")
            link = link.before
        self._inner.rollback(count)
        self._link = link

    def copy(self) -> MemoryState:
        """Return an independent state at the same position."""
        other = MemoryState(self._inner.copy(), self._counters, self._vocabulary, has_parts=self._has_parts)
        other._link, other._is_searching = self._link, self._is_searching
        return other

    def search_copy(self) -> MemoryState:
        """Return a copy that refuses repetitions only once they are complete, as it does not search for new ends."""
        other = MemoryState(self._inner.search_copy(), self._counters, self._vocabulary, has_parts=self._has_parts)
        other._link, other._is_searching = self._link, True
        return other

    def can_end(self) -> bool:
        return self._inner.can_end()

    def failure(self) -> str | None:
        return self._inner.failure()

    def forced(self) -> bytes:
        return self._inner.forced()

    def string_end(self) -> bytes:
        """Return a short end of the present entry, if its shortest ends may be repetitions; else no bytes.

        The end of a string includes its quote. After a comma in an array of distinct items, the result is a whole short
        item.
        """
        place = self._link.place
        if place.frame is None:
            return b""
        entries, counters = place.frame.entries, place.frame.counters
        if place.lexical == OUTSIDE:
            if not place.frame.has_distinct_items or not (place.entry or place.frame.is_before_entry):
                return b""
            return min((each.shortest_rest(place.entry, entries) for each in counters), key=len)
        if not place.entry:
            return b""
        if not entries.rivals(place.entry):
            return b""
        found = [each.shortest_end(place.entry, entries) for each in counters]
        if counters:
            return min(filter(None, found), key=len, default=b"")
        return self._plain_end(place.entry, entries)

    def _plain_end(self, entry: bytes, entries: Entries) -> bytes:
        """Return a short end, allowed by the library, of a string whose entries have no counted language."""
        ends = (b"", *(bytes((char,)) for char in _LIKELY), *(bytes((a, b)) for a in _LIKELY for b in _LIKELY))
        for end in ends:
            if entry + end + b'"' in entries.strings:
                continue
            tokens = self._vocabulary.tokenize(end + b'"')
            count = self._inner.advance(tokens)
            self._inner.rollback(count)
            if count == len(tokens):
                return end + b'"'
        return b""

    def _possible(self, text: bytes) -> _Place | None:
        """Return the place after the text of a token; None if only repetitions would be possible there."""
        place = self._follow(text)
        if place is None or not place.must_be_searched:
            return place
        try:
            kept = [each.kept(self.written(each.begun, text)) for each in place.rivals]
        except ValueError:
            return None  # Like in `_follow`: bytes of a token that are not a character end a string.
        place = replace(place, rivals=tuple(each for each in kept if each.values))
        if not place.must_be_searched or self._is_searching:
            return place
        known = self._link.searched.get(text)
        if known is None:
            known = self._link.searched[text] = self._has_new_end(text)
        return place if known else None

    def _has_new_end(self, text: bytes) -> bool:
        """Search, byte by byte, whether after ``text`` the present items can still differ from all earlier items."""
        begin, tokens = self.search_copy(), self._vocabulary.tokenize(text)
        if begin.advance(tokens) < len(tokens):
            return False
        states = [begin]
        for state in states:
            for token in state._next_bytes():
                after = state.copy()
                if not after.accept(token):
                    continue
                if not after._link.place.must_be_searched:
                    return True
                states.append(after)
            if len(states) > MAX_SEARCHED:
                return False
        return False

    def _next_bytes(self) -> list[int]:
        """Return the allowed tokens of one byte, without white space between JSON values."""
        row = np.zeros(self._vocabulary.num_words, dtype=np.int32)
        self._inner.fill(row)
        bits, singles = row.view(np.uint32), self._tokens.singles
        some: list[int] = singles[(bits[singles >> 5] >> (singles & 31).astype(np.uint32)) & 1 > 0].tolist()
        if self._link.place.lexical != OUTSIDE:
            return some
        return [token for token in some if self._vocabulary.tokens[token] not in _BLANKS]

    def _follow(self, text: bytes) -> _Place | None:
        """Return the place after the text of a token; None if the text completes a repetition.

        The result is also None if every end of a scalar is a repetition. For arrays and objects, only a search can
        decide that (`_possible`).
        """
        place = self._link.place
        lexical, frame, entry = place.lexical, place.frame, place.entry
        if lexical == INSIDE and not (QUOTE in text or BACKSLASH in text):
            return _checked(INSIDE, frame, entry + text, place.rivals) if entry else place
        reader = _Reader(self, text, place)
        try:
            return reader.place() if reader.read() else None
        except ValueError:
            return None  # The text is not JSON, so the library refuses it too.

    def containers(self, text: bytes) -> tuple[int, ...]:
        """Return the numbers of the containers that may begin after ``text``."""
        known = self._link.probed.get(text)
        if known is None:
            known = self._link.probed[text] = self._probe(text)
        return known

    def _probe(self, text: bytes) -> tuple[int, ...]:
        tokens = self._vocabulary.tokenize(text)
        count = self._inner.advance(tokens)
        found: list[int] = []
        if count == len(tokens) and self._inner.accept(self._tokens.marker):
            forced = self._inner.forced()
            if self._has_parts and self._inner.accept(self._tokens.marker):
                self._inner.rollback(1)  # Free text may contain any character, also a marker.
            elif b";" in forced:
                found.append(int(forced[: forced.index(b";")]))
            else:
                for number in range(len(self._counters) + 1):
                    digits = self._vocabulary.tokenize(b"%d;" % number)
                    taken = self._inner.advance(digits)
                    if taken == len(digits):
                        found.append(number)
                    self._inner.rollback(taken)
            count += 1
        self._inner.rollback(count)
        return tuple(found)

    def written(self, begun: int, text: bytes) -> bytes:
        """Return the text written since byte ``begun`` of the answer, followed by ``text``, without markers."""
        parts, link = [text], self._link
        while link.size > begun and link.before is not None:
            parts.append(link.text)
            link = link.before
        return _MARKERS.sub(b"", b"".join(reversed(parts))[begun - link.size :])

    @property
    def size(self) -> int:
        return self._link.size

    @property
    def has_parts(self) -> bool:
        return self._has_parts

    def counter(self, number: int) -> EntryCounter:
        return self._counters[number - 1]

    @property
    def has_counters(self) -> bool:
        return bool(self._counters)


_LIKELY = b"0123456789abcdefghijklmnopqrstuvwxyz"


def _checked(lexical: int, frame: _Frame | None, entry: bytes, rivals: tuple[_Rivals, ...]) -> _Place | None:
    """Return the place within an entry; None if every end of the entry is a repetition.

    If the entry does not belong to one of the possible languages of an array, that language is removed.
    """
    if not entry or frame is None or not frame.counters:
        return _Place(lexical, frame, entry, rivals)
    outlooks = [each.outlook(entry, frame.entries) for each in frame.counters]
    if Outlook.NEW not in outlooks and Outlook.SEEN in outlooks:
        return None
    if Outlook.OTHER in outlooks:
        frame = _kept(frame, outlooks)
        entry = entry if frame.counters or frame.is_object else b""
    return _Place(lexical, frame, entry, rivals)


def _kept(frame: _Frame, outlooks: Sequence[Outlook]) -> _Frame:
    """Return a frame with the languages that it may still have."""
    if frame.is_object:
        return frame  # Keys that the language lacks are declared properties.
    kept = tuple(each for each, outlook in zip(frame.counters, outlooks, strict=True) if outlook is not Outlook.OTHER)
    is_watched = bool(kept) or (frame.outer is not None and frame.outer.is_watched)
    return frame._replace(counters=kept, is_watched=is_watched)


class _Reader:
    """Reads the text of one token from a place in the answer, and determines the place after it."""

    def __init__(self, state: MemoryState, text: bytes, place: _Place) -> None:
        self._state = state
        self._text = text
        self._lexical, self._frame, self._entry, self._rivals = place.lexical, place.frame, place.entry, place.rivals

    def place(self) -> _Place | None:
        return _checked(self._lexical, self._frame, self._entry, self._rivals)

    def read(self) -> bool:
        """Read the text. Returns False if it completes a repetition."""
        for at, byte in enumerate(self._text):
            lexical = self._lexical
            if lexical == OUTSIDE:
                if not self._outside(at, byte):
                    return False
            elif lexical == _MARKER:
                self._lexical = OUTSIDE if byte == 0x3B else _MARKER
            else:
                if self._entry:
                    self._entry += self._text[at : at + 1]
                if lexical == ESCAPED:
                    self._lexical = INSIDE
                elif byte == BACKSLASH:
                    self._lexical = ESCAPED
                elif byte == QUOTE:
                    self._lexical = OUTSIDE
                    if self._entry and not self._complete():
                        return False
        return True

    def _outside(self, at: int, byte: int) -> bool:
        frame = self._frame
        if byte in _MARKER_BYTES:
            self._lexical = _MARKER
        elif frame is None:
            return self._before_json(at, byte)
        elif byte == QUOTE:
            self._lexical = INSIDE
            self._entry = b'"' if (frame.is_object and frame.is_before_entry) or frame.has_distinct_items else b""
        elif byte == 0x3A:
            self._frame = frame._replace(is_before_entry=False)
        elif byte in _OPENING:
            self._open(at, byte)
            return frame.depth < MAX_DEPTH or not frame.is_watched
        elif byte in b"]},":
            if self._entry and not self._complete():
                return False
            return self._comma() if byte == 0x2C else self._close(at)
        elif byte in _BLANKS:
            return not self._entry or self._complete()
        elif frame.has_distinct_items:
            self._entry += self._text[at : at + 1]
        return True

    def _before_json(self, at: int, byte: int) -> bool:
        if byte in _OPENING:
            if not self._state.has_parts or self._state.containers(self._text[:at]):
                self._open(at, byte)
        elif byte == QUOTE and not self._state.has_parts:
            self._lexical = INSIDE
        return True

    def _open(self, at: int, byte: int) -> None:
        frame = self._frame
        if frame is not None and frame.has_distinct_items:
            kept = [Outlook.NEW if each.has_containers else Outlook.OTHER for each in frame.counters]
            frame = _kept(frame, kept)._replace(begun=self._state.size + at)
            others = frame.entries.containers() if any(each.has_limited for each in frame.counters) else ()
            self._rivals += (_Rivals(frame.begun, others),) if others else ()
        is_object = byte == 0x7B
        numbers = self._state.containers(self._text[:at]) if self._state.has_counters else ()
        found = [self._state.counter(number) for number in numbers if number != JSON_PART]
        counters = tuple(each for each in found if each.of_keys == is_object)
        is_watched = (not is_object and bool(counters)) or (frame is not None and frame.is_watched)
        depth = 0 if frame is None else frame.depth + 1
        self._frame = _Frame(frame, is_object, counters, is_before_entry=is_object, is_watched=is_watched, depth=depth)

    def _comma(self) -> bool:
        """Go on to the next entry. Returns False if no new entry is possible."""
        frame = self._frame
        assert frame is not None
        if frame.is_object:
            self._frame = frame._replace(is_before_entry=True)
            extra = [each for each in frame.counters if any(map(each.accepts, frame.entries.strings))]
            return not extra or any(each.outlook(b"", frame.entries) is Outlook.NEW for each in extra)
        if not frame.counters:
            return True
        self._frame = frame._replace(is_before_entry=True)
        return any(each.outlook(b"", frame.entries) is Outlook.NEW for each in frame.counters)

    def _close(self, at: int) -> bool:
        if self._frame is None:
            return True
        self._frame = self._frame.outer
        if self._frame is None or not self._frame.has_distinct_items:
            return True
        text = self._state.written(self._frame.begun, self._text[: at + 1])
        self._rivals = tuple(each for each in self._rivals if each.begun < self._frame.begun)
        return self._add(container_value(text))

    def _complete(self) -> bool:
        """Complete a key or a scalar item. Returns False if it is a repetition."""
        entry, frame = self._entry, self._frame
        self._entry = b""
        assert frame is not None
        if frame.has_distinct_items:
            kept = [Outlook.NEW if each.accepts(entry) else Outlook.OTHER for each in frame.counters]
            self._frame = frame = _kept(frame, kept)
            if not frame.counters:
                return True
        return self._add(scalar_value(entry))

    def _add(self, value: Any) -> bool:
        frame = self._frame
        assert frame is not None
        if value in frame.entries.values:
            return False
        is_before_entry = frame.is_object and frame.is_before_entry
        self._frame = frame._replace(entries=frame.entries.add(value), is_before_entry=is_before_entry)
        return True


def _ban(bits: NDArray[np.uint32], token: int) -> None:
    bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)


class _TokenKinds:
    """Tokens grouped by their effect on the memory state. White space between JSON values has no effect.

    Args:
        lexical: the lexical state before a token.
        is_endless: whether every beginning of a string has endlessly many ends. Then strings that have only begun are
            equivalent.
    """

    def __init__(self, vocabulary: Vocabulary, lexical: int, *, is_endless: bool) -> None:
        self.texts: list[bytes] = []
        self._vocabulary, self._lexical, self._is_endless = vocabulary, lexical, is_endless
        self._by_text: dict[bytes, int] = {}
        self._lock = Lock()
        self._numbers = np.full(vocabulary.num_words * 32, -1, dtype=np.int32)

    def of(self, tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the groups of ``tokens``, as indices into `texts`."""
        found = self._numbers[tokens]
        if (found < 0).any():
            with self._lock:
                for token in tokens[found < 0].tolist():
                    self._numbers[token] = self._kind(self._text(token))
            found = self._numbers[tokens]
        return found

    def _text(self, token: int) -> bytes:
        is_text = token < len(self._vocabulary.tokens) and token not in self._vocabulary.special
        return self._vocabulary.tokens[token] if is_text else b""

    def _kind(self, text: bytes) -> int:
        short = self._shortened(text)
        number = self._by_text.get(short)
        if number is None:
            number = self._by_text[short] = len(self.texts)
            self.texts.append(short)
        return number

    def _shortened(self, text: bytes) -> bytes:
        parts, at = [], 0
        lexical = OUTSIDE if self._lexical == OUTSIDE else INSIDE
        for quote in _quotes(self._lexical, text):
            part = text[at : quote + 1]
            parts.append(_BLANK.sub(b" ", part) if lexical == OUTSIDE else part)
            lexical = INSIDE if lexical == OUTSIDE else OUTSIDE
            at = quote + 1
        rest = text[at:]
        if lexical == OUTSIDE:
            parts.append(_BLANK.sub(b" ", rest))
        elif not (self._is_endless and parts):
            parts.append(rest)
        return b"".join(parts)


class _EntryTokens:
    """The tokens of a vocabulary that may complete an entry of a container before the token's own end.

    Attributes:
        whole: for each lexical state, the tokens in which a string begins and ends, ascending.
        closing: for each lexical state, the tokens that go on after the end of a string.
        opening: tokens in which a container begins and an entry of it is repeated.
        nested: the tokens of `opening`, and the tokens of `whole` for places outside of strings.
        markers: tokens with a byte of a marker; the state never allows them.
        no_marker: bitmask of all other tokens.
        marker: the token of `ENTRIES`; -1 if the vocabulary has none.
        singles: the tokens of one byte.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        listed = [(token, text) for token, text in enumerate(vocabulary.tokens) if token not in vocabulary.special]
        quoted = [(token, text) for token, text in listed if b'"' in text]
        states = range(3)
        self.whole = [_array(t for t, text in quoted if _num_ends(lexical, text) > (lexical > 0)) for lexical in states]
        self.closing = [_array(t for t, text in quoted if _goes_on(lexical, text)) for lexical in states]
        self.opening = _array(t for t, text in listed if _may_repeat(text))
        self.nested = np.union1d(self.whole[OUTSIDE], self.opening)
        self.markers = frozenset(token for token, text in listed if ENTRIES in text)
        allowed = np.ones(vocabulary.num_words * 32, dtype=np.bool_)
        allowed[list(self.markers)] = False
        self.no_marker = np.packbits(allowed, bitorder="little").view(np.uint32)
        found = vocabulary.token_of(ENTRIES)
        self.marker = -1 if found is None else found
        self.singles = _array(t for t, text in listed if len(text) == 1 and vocabulary.token_of(text) == t)
        self._texts = vocabulary.tokens
        self._sorted = sorted((token for token, text in listed if text), key=self._texts.__getitem__)
        self._kinds: dict[tuple[int, bool], _TokenKinds] = {}
        self._vocabulary = vocabulary

    def kinds(self, lexical: int, *, is_endless: bool) -> _TokenKinds:
        known = self._kinds.get((lexical, is_endless))
        if known is not None:
            return known
        made = _TokenKinds(self._vocabulary, lexical, is_endless=is_endless)
        return self._kinds.setdefault((lexical, is_endless), made)

    def beginning_with(self, text: bytes) -> list[int]:
        """Return the tokens whose text starts with ``text``."""
        return self._run(text, lambda each: each.startswith(text))

    def spelled(self, text: bytes) -> list[int]:
        """Return the tokens whose text is ``text``."""
        return self._run(text, lambda each: each == text)

    def _run(self, first: bytes, is_in: Callable[[bytes], bool]) -> list[int]:
        begin = bisect_left(self._sorted, first, key=self._texts.__getitem__)
        found = (self._sorted[at] for at in range(begin, len(self._sorted)))
        return list(takewhile(lambda token: is_in(self._texts[token]), found))


def _array(tokens: Any) -> NDArray[np.int64]:
    return np.array(list(tokens), dtype=np.int64)


def _quotes(lexical: int, text: bytes) -> list[int]:
    """Return the offsets of the quotes that begin or end a string."""
    found = []
    for at, byte in enumerate(text):
        if lexical == ESCAPED:
            lexical = INSIDE
        elif byte == QUOTE:
            found.append(at)
            lexical = OUTSIDE if lexical == INSIDE else INSIDE
        elif byte == BACKSLASH and lexical == INSIDE:
            lexical = ESCAPED
    return found


def _ends_of_strings(lexical: int, text: bytes) -> list[int]:
    """Return the offsets of the quotes that end a string."""
    return _quotes(lexical, text)[lexical == OUTSIDE :: 2]


def _may_repeat(text: bytes) -> bool:
    """Return whether an array or object may begin in ``text`` with an entry that begins like an earlier one of it."""
    first = min((at for at in (text.find(b"["), text.find(b"{")) if at >= 0), default=-1)
    if first < 0 or b"," not in text:
        return False
    entries = [part.strip(b" \t\r\n[]{}").split(b":")[0] for part in text[first + 1 :].split(b",")]
    return any(entry and before.startswith(entry) for entry, before in combinations(reversed(entries), 2))


def _num_ends(lexical: int, text: bytes) -> int:
    return len(_ends_of_strings(lexical, text))


def _goes_on(lexical: int, text: bytes) -> bool:
    return any(at + 1 < len(text) for at in _ends_of_strings(lexical, text))


def _entry_tokens(vocabulary: Vocabulary) -> _EntryTokens:
    return vocabulary.derived(_EntryTokens)


def can_spell_entries(vocabulary: Vocabulary) -> bool:
    """Return whether the vocabulary has tokens for the marker `ENTRIES` and for the digits of a container's number."""
    return vocabulary.token_of(ENTRIES) is not None and all(
        vocabulary.token_of(bytes((byte,))) is not None for byte in b"0123456789;"
    )
