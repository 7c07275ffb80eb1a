"""Closing texts: short texts of a grammar, as tokens, from which a completion within the budget is composed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain

import numpy as np

from ..emit.grammar_artifact import GrammarArtifact
from ..vocabulary import Vocabulary
from .backends import Row
from .least_ends import LeastEnds
from .token_kinds import token_kinds

MAX_TAILS = 600
DEFAULT_JUMP = 10
MAX_RESTS = 4_000
MAX_CONTAINER_RESTS = 400
MAX_CHEAPER = 3  # Largest number of containers offered in exchange for another one.
# Lexical states: outside or inside of a JSON string, after a backslash in one, or in free text.
OUTSIDE, INSIDE, ESCAPED, FREE = range(4)
WINDOW = 3  # Number of bytes before and after a scalar that are tokenized with it when exchanges are compared.
NEVER = 100  # The kind of tokens that a search never tries.
_PLAIN = (b"0", b'""', b"null", b"[]", b"{}", b"true", b"false")
_BEGINS = (b"[", b"{")


class Exchanges:
    """A completion whose scalars can be exchanged for other scalars that take fewer tokens.

    Not every exchange gives a valid answer: items may have to differ, and a scalar may belong to several groups.

    Args:
        between: the texts before, between and after the scalars.
        choices: for each scalar, the scalars that may replace it, those of the fewest tokens first, and the scalar
            itself last.
        fewest: tokenizes a text into as few tokens as possible.
    """

    def __init__(
        self, between: list[bytes], choices: list[tuple[bytes, ...]], fewest: Callable[[bytes], list[int]]
    ) -> None:
        self._between = between
        self._choices = choices
        self._fewest = fewest

    def best(self) -> list[int]:
        """Return the tokens of the text in which each scalar is replaced by its first choice."""
        return self._cut([each[0] for each in self._choices])

    def improve(self, tokens: list[int], is_end: Callable[[list[int]], bool]) -> list[int]:
        """Exchange the scalars one by one if the text stays an end and has fewer tokens; return the last such text."""
        chosen = [each[-1] for each in self._choices]
        for at, choices in enumerate(self._choices):
            for choice in choices[:-1]:
                changed = self._cut([*chosen[:at], choice, *chosen[at + 1 :]])
                if len(changed) < len(tokens) and is_end(changed):
                    chosen[at], tokens = choice, changed
                    break
        return tokens

    def _cut(self, scalars: list[bytes]) -> list[int]:
        parts = (part for pair in zip(self._between, scalars, strict=False) for part in pair)
        return self._fewest(b"".join((*parts, self._between[-1])))


class ClosingTexts:
    """The short texts of one grammar as tokens, shared by all its matchers, computed on first use or by `prepare`.

    Attributes:
        shortest: the shortest answer; empty if unknown.
        search_failed: whether a search of the shortest answer found none.
        num_shortest: number of tokens of the shortest answer; None if unknown.
        least_ends: the fewest tokens to an end from each state; None if they are not known for the grammar.
        closers: texts that close an object or array, or separate entries. They are tried before all other texts: after
            a number, a further number would only add digits to it.
        end_row: the mask of the end tokens.
    """

    def __init__(self, vocabulary: Vocabulary, artifact: GrammarArtifact, least_ends: LeastEnds | None = None) -> None:
        self.vocabulary = vocabulary
        self.least_ends = least_ends
        self.end_row = _end_row(vocabulary)
        self.is_json = artifact.is_json
        self.shortest = artifact.shortest
        self.search_failed = artifact.search_failed
        self.num_shortest = len(artifact.shortest) or None
        self.closers = [vocabulary.tokenize(text) for text in (b"}", b"]", b",", b":")]
        self.quote = vocabulary.tokenize(b'"')
        self._artifact = artifact
        self._texts = (*artifact.properties, *artifact.values)
        self._lexical_after = vocabulary.derived(_LexicalStates)
        self._key = object()  # Key of this object's exchanges in the vocabulary's cache.

    def prepare(self) -> None:
        """Compute all texts now, so that no stream waits for them: structural tags have thousands."""
        _ = self.listed, self.tails, self.key_rests, self.ends, self.rests, self.jump, token_kinds(self.vocabulary)
        _ = self._rests_outside, self._rests_inside, self._kinds

    @cached_property
    def listed(self) -> list[list[int]]:
        """Short properties, then short values, each sorted by number of tokens; empty if the answer is not JSON."""
        if not self.is_json:
            return []
        parts = self._artifact.properties, self._artifact.values
        cut = [[self._fewest(text.encode()) for text in part] for part in parts]
        plain, begins = map(self.vocabulary.fewest, _PLAIN), map(self.vocabulary.fewest, _BEGINS)
        return [*sorted(cut[0], key=len), *sorted([*cut[1], *plain], key=len), *begins]

    @cached_property
    def digits(self) -> list[list[int]]:
        """All texts of one digit, then of two. Only some of them may end a number that has to be a multiple."""
        single = [token for char in b"0123456789" if (token := self.vocabulary.token_of(bytes((char,)))) is not None]
        return [*([each] for each in single), *([a, b] for a in single for b in single)]

    @cached_property
    def tails(self) -> list[list[int]]:
        """Texts that may complete a string that has begun, those with the fewest tokens first.

        They are the suffixes of the grammar's short strings; if the answer is not JSON, of its short texts. Suffixes of
        optional properties that begin within the property's name come last: they are needed only if such a name has
        begun.
        """
        texts = [text.encode() for text in (*self._texts, *chain.from_iterable(self._artifact.scalars))]
        if self.is_json:
            texts = [b'""', *(text for text in texts if text[:1] == text[-1:] == b'"')]
        ends = {text[at:] for text in texts for at in range(self.is_json, len(text))}
        return [*self._cut_ends(ends), *self._cut_ends(_key_rests(self._artifact.optional) - ends)]

    @cached_property
    def key_rests(self) -> list[list[int]]:
        """Ends of short properties cut off within their keys, fewest tokens first; empty for a single property."""
        properties = {*self._artifact.properties, *self._artifact.optional}
        return self._cut_ends(_key_rests(sorted(properties))) if len(properties) > 1 else []

    def _cut_ends(self, ends: set[bytes]) -> list[list[int]]:
        """Tokenize the shortest of ``ends`` into as few tokens as possible; return them sorted by number of tokens."""
        short = sorted(ends, key=lambda end: (len(end), end))[:MAX_TAILS]
        return sorted(map(self.vocabulary.fewest, short), key=len)

    def container_rests(self, lexical: int) -> list[list[int]]:
        """Return texts that complete arrays and objects of several kinds, those with the fewest tokens first.

        Each text is the rest of a container, up to its closing bracket. It begins before a key or value of the
        container, or within one if ``lexical`` says that a string is open.
        """
        if lexical == INSIDE:
            return self._rests_inside
        return self._rests_outside if lexical == OUTSIDE else []

    @property
    def has_kinds(self) -> bool:
        """Whether a value may be one of several kinds of arrays and objects, or arrays have items that must differ."""
        return bool(self._artifact.containers or self.items)

    @cached_property
    def items(self) -> list[list[int]]:
        """The arrays and objects among the items of arrays in the shortest answer; empty if items need not differ.

        They differ from each other, and there are as many as the array needs. So whichever of them are already written,
        the others complete the array.
        """
        return [self.vocabulary.fewest(text) for text in self._item_texts]

    @cached_property
    def _item_texts(self) -> list[bytes]:
        artifact = self._artifact
        if not any(each.has_containers for each in artifact.entries) or not artifact.is_json or artifact.texts:
            return []
        answer = b"".join(self.vocabulary.tokens[token] for token in artifact.shortest)
        return sorted(set(_container_items(answer)), key=lambda text: (len(text), text))

    @cached_property
    def _rests_outside(self) -> list[list[int]]:
        return self._container_rests(_outside_offsets if self.items else lambda text: [0, *_member_starts(text)])

    @cached_property
    def _rests_inside(self) -> list[list[int]]:
        return self._container_rests(lambda text: [at for start in _member_starts(text) for at in _within(text, start)])

    def _container_rests(self, offsets: Callable[[bytes], list[int]]) -> list[list[int]]:
        texts = [*(text.encode() for text in chain.from_iterable(self._artifact.containers)), *self._item_texts]
        sizes = sorted(len(text) - at for text in texts for at in offsets(text))
        most = sizes[min(MAX_CONTAINER_RESTS, len(sizes)) - 1] if sizes else 0
        short = ((text, [at for at in offsets(text) if len(text) - at <= most]) for text in texts)
        rests = dict.fromkeys(tuple(rest) for text, at in short for rest in self.vocabulary.fewest_rests(text, at))
        return [list(rest) for rest in sorted(rests, key=len)]

    @cached_property
    def ends(self) -> list[list[int]]:
        """Texts that end a structural tag and all tags around it."""
        return [self.vocabulary.tokenize_named(text) for text in self._artifact.ends]

    @cached_property
    def rests(self) -> list[list[int]]:
        """The texts of the grammar outside of JSON, then all suffixes of each of them."""
        texts = self._artifact.texts
        rests = dict.fromkeys((*texts, *(text[at:] for text in texts for at in range(1, len(text)))))
        return [self.vocabulary.tokenize_named(rest) for rest in list(rests)[:MAX_RESTS] if rest]

    @cached_property
    def jump(self) -> int:
        """Estimated largest number of tokens by which one token can lengthen the completion."""
        detour = self.vocabulary.tokenize_named(self._artifact.detour)
        texts = self.listed if self.is_json else self.tails
        # A completion is composed of parts, and therefore takes more tokens than a text that is tokenized as a whole.
        return 4 + 3 * max(map(len, (detour, *texts))) // 2 if texts or detour else DEFAULT_JUMP

    def recuts(self, tokens: list[int], lexical: int) -> list[list[int]]:
        """Return the text of ``tokens`` in as few tokens as possible.

        If blanks between the parts of JSON make the tokens fewer, the text with such blanks comes first.

        Args:
            lexical: lexical state in which the text begins.
        """
        plain = self.vocabulary.recut(tokens)
        if not self.is_json or self._artifact.texts or not self.vocabulary.special.isdisjoint(tokens):
            return [plain]
        spaced = self._fewest(b"".join(self.vocabulary.tokens[token] for token in tokens), lexical)
        return [spaced, plain] if len(spaced) < len(plain) else [plain]

    def exchanges(self, tokens: list[int], lexical: int) -> Exchanges | None:
        """Return a completion's scalars and the possible exchanges of each; None if no exchange takes fewer tokens.

        Args:
            tokens: tokens of the completion.
            lexical: lexical state in which the completion begins.
        """
        if not self._groups or lexical == ESCAPED or not self.vocabulary.special.isdisjoint(tokens):
            return None
        text = b"".join(self.vocabulary.tokens[token] for token in tokens)
        between, choices, at = list[bytes](), list[tuple[bytes, ...]](), 0
        for found in _SCALARS.finditer(text, _string_end(text, lexical)):
            if found[0][:1] == b'"' and text[found.end() : found.end() + 1] == b":":
                continue
            between.append(text[at : found.start()])
            before, after = text[max(0, found.start() - WINDOW) : found.start()], text[found.end() :][:WINDOW]
            choices.append(self._cheaper(found[0], before, after))
            at = found.end()
        if all(len(each) == 1 for each in choices):
            return None
        return Exchanges([*between, text[at:]], choices, partial(self._fewest, lexical=lexical))

    def other_kinds(self, tokens: list[int], lexical: int) -> Iterator[list[int]]:
        """Yield completions of fewer tokens, each with one container of ``tokens`` replaced by another of its group."""
        if not self._kinds or lexical == ESCAPED or not self.vocabulary.special.isdisjoint(tokens):
            return
        text = b"".join(self.vocabulary.tokens[token] for token in tokens)
        begin = _string_end(text, lexical)
        text = text[:begin] + _BLANKS.sub(lambda found: found[0].rstrip(b" "), text[begin:])
        for container, cheaper in self._kinds.items():
            for other in cheaper if container in text[begin:] else ():
                changed = self._fewest(text[:begin] + text[begin:].replace(container, other), lexical)
                if len(changed) < len(tokens):
                    yield changed

    @cached_property
    def _kinds(self) -> dict[bytes, list[bytes]]:
        """For each container of a group: the containers of the group that take fewer tokens, fewest first."""
        found: dict[bytes, list[bytes]] = {}
        for group in self._artifact.containers:
            counts = {text.encode(): len(self._fewest(text.encode())) for text in group}
            order = sorted(counts, key=counts.__getitem__)[:MAX_CHEAPER]
            for text, count in counts.items():
                cheaper = [each for each in order if counts[each] < count]
                found |= {text: cheaper} if cheaper else {}
        return found

    def _cheaper(self, scalar: bytes, before: bytes, after: bytes) -> tuple[bytes, ...]:
        """Return the scalars that may replace ``scalar`` with fewer tokens, fewest first, then ``scalar``. Cached.

        The result has at most one scalar of each group to which ``scalar`` belongs: the one of the fewest tokens.

        Args:
            before: bytes that come before the scalar.
            after: bytes that come after it.
        """
        key, cache = (self._key, scalar, before, after), self.vocabulary.cache
        known: tuple[bytes, ...] | None = cache.get(key)
        if known is None:
            counts = {}
            for group in self._groups.get(scalar, ()):
                counted = {each: self._count_between(each, before, after) for each in group}
                best = min(counted, key=counted.__getitem__)
                if counted[best] < counted[scalar]:
                    counts[best] = counted[best]
            known = (*sorted(counts, key=counts.__getitem__), scalar)
            cache.put(key, known, 200 + len(scalar) + sum(map(len, known)))
        return known

    def _count_between(self, scalar: bytes, before: bytes, after: bytes) -> int:
        """Return the fewest tokens of a scalar with the bytes around it, with or without blanks after marks."""
        befores, afters = [before], [after]
        if self.vocabulary.derived(_joined_blanks):
            befores += [before + b" "] if before[-1:] in (b":", b",") else []
            afters += [after[:1] + b" " + after[1:]] if after[:1] == b"," else []
        return min(self.vocabulary.fewest_counts(each + scalar + rest)[0] for each in befores for rest in afters)

    @cached_property
    def _groups(self) -> dict[bytes, list[tuple[bytes, ...]]]:
        """For each scalar, the groups to which it belongs."""
        found: dict[bytes, list[tuple[bytes, ...]]] = {}
        for group in self._artifact.scalars:
            scalars = tuple(text.encode() for text in group)
            for scalar in scalars:
                found.setdefault(scalar, []).append(scalars)
        return found

    def _fewest(self, text: bytes, lexical: int = OUTSIDE) -> list[int]:
        """Tokenize JSON into as few tokens as possible, with blanks after colons or commas if that saves tokens."""
        spellings, begin = [self.vocabulary.fewest(text)], _string_end(text, lexical)
        for marks in self.vocabulary.derived(_joined_blanks):
            spaced = text[:begin] + _spaced(text[begin:], marks)
            spellings.append(self._without_lone_blanks(self.vocabulary.fewest(spaced), lexical))
        return min(spellings, key=len)

    def _without_lone_blanks(self, tokens: list[int], lexical: int) -> list[int]:
        """Leave out each token that is a single blank outside of a string: it saves no token."""
        found = list[int]()
        for token in tokens:
            if lexical != OUTSIDE or self.vocabulary.tokens[token] != b" ":
                found.append(token)
            lexical = self.lexical(lexical, token)
        return found

    def before_key(self, tokens: list[int], lexical: int) -> bytes | None:
        """Return the text of a completion up to and with the opening quote of its first key; None if it has no key.

        The result is empty if the completion begins within a key.

        Args:
            tokens: tokens of the completion.
            lexical: lexical state in which the completion begins.
        """
        if not self.key_rests or lexical == ESCAPED or not self.vocabulary.special.isdisjoint(tokens):
            return None
        text = b"".join(self.vocabulary.tokens[token] for token in tokens)
        begin = _string_end(text, lexical)
        if lexical == INSIDE and text[begin:].lstrip().startswith(b":"):
            return b""
        key = next((found for found in _STRINGS.finditer(text, begin) if found["key"]), None)
        return None if key is None else text[: key.start() + 1]

    def begins_alike(self, tokens: list[int], others: list[int]) -> bool:
        """Return whether the text of ``tokens`` begins with the text of ``others``."""
        text, other = (b"".join(self.vocabulary.tokens[token] for token in each) for each in (tokens, others))
        return text.startswith(other)

    def is_blank(self, token: int) -> bool:
        """Return whether a token is white space only, in an answer that is JSON and nothing else."""
        text = self.vocabulary.tokens[token]
        return self.is_json and not self._artifact.texts and bool(text) and not text.strip(b" \t\r\n")

    def lexical(self, state: int, token: int) -> int:
        """Return the lexical state after a token. A structured part of free text begins outside of strings."""
        if not self.is_json:
            return state
        state = OUTSIDE if state == FREE else state
        return self._lexical_after.of(state, token)


_STRING_END = re.compile(rb'(?:[^"\\]|\\.)*"?', re.DOTALL)
_SCALARS = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null', re.DOTALL)
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"(?P<key>[ \t\r\n]*:)?', re.DOTALL)
_BLANKS = re.compile(rb'"(?:[^"\\]|\\.)*"|[:,] ', re.DOTALL)
_MARKS_OR_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{},:]', re.DOTALL)
_STRING_OR_BLANKS = re.compile(rb'("(?:[^"\\]|\\.)*")|[ \t\r\n]+', re.DOTALL)
_STRINGS_AND_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[:,](?![ \n])', re.DOTALL)


class _LexicalStates:
    """The lexical states after each token of a vocabulary, one byte for each."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._known = [bytearray(b"\xff" * len(self._tokens)) for _ in range(FREE)]

    def of(self, state: int, token: int) -> int:
        known = self._known[state]
        if known[token] == 0xFF:
            known[token] = _lexical(state, self._tokens[token])
        return known[token]


def _joined_blanks(vocabulary: Vocabulary) -> list[bytes]:
    """Return colons, commas or both: those after which a blank may save tokens, as a longer token contains it."""
    tokens = vocabulary.tokens
    found = [mark for mark in b":," if any(bytes((mark, 0x20)) in token and len(token) > 2 for token in tokens)]
    return [bytes((mark,)) for mark in found] + ([b":,"] if len(found) > 1 else [])


def _member_starts(container: bytes) -> list[int]:
    """Return the offsets of the keys and values of an array or object written without blanks."""
    starts, depth = list[int](), 0
    for found in _MARKS_OR_STRING.finditer(container):
        mark = found[0]
        depth += (mark in (b"{", b"[")) - (mark in (b"}", b"]"))
        if depth == 1 and mark in (b"{", b"[", b",", b":"):
            starts.append(found.end())
    return starts


def _container_items(answer: bytes) -> Iterator[bytes]:
    """Yield, without blanks, the arrays and objects of a JSON text that are items of an array."""
    opened = list[tuple[bytes, int]]()
    compact = _STRING_OR_BLANKS.sub(lambda found: found[1] or b"", answer)
    for found in _MARKS_OR_STRING.finditer(compact):
        if found[0] in (b"{", b"["):
            opened.append((found[0], found.start()))
        elif found[0] in (b"}", b"]"):
            _, start = opened.pop()
            if opened and opened[-1][0] == b"[":
                yield compact[start : found.end()]


def _outside_offsets(container: bytes) -> list[int]:
    """Return the offset of an array or object and those of its keys, values, brackets, colons and commas."""
    starts = _member_starts(container)
    return sorted({0, *starts, *(at - 1 for at in starts), len(container) - 1})


def _key_rests(properties: Sequence[str]) -> set[bytes]:
    """Return the ends of each property from every place within its key on."""
    return {text[at:] for text in map(str.encode, properties) for at in _within(text, 0)}


def _within(text: bytes, start: int) -> list[int]:
    """Return the offsets of the bytes of the string that starts at ``start``, its closing quote included."""
    if text[start : start + 1] != b'"':
        return []
    end = start + 1 + _string_end(text[start + 1 :], INSIDE)
    return [at for at in range(start + 1, end) if text[at - 1 : at] != b"\\"]


def _string_end(text: bytes, lexical: int) -> int:
    """Return the offset after the string in which a text begins; 0 if it begins outside of strings."""
    found = _STRING_END.match(text, int(lexical == ESCAPED)) if lexical in (INSIDE, ESCAPED) else None
    return 0 if found is None else found.end()


def _spaced(text: bytes, marks: bytes) -> bytes:
    """Return JSON with a blank after each of the given marks that is outside of strings."""
    return _STRINGS_AND_MARKS.sub(lambda found: found[0] + b" " * (found[0] in (marks[:1], marks[1:])), text)


def _lexical(state: int, text: bytes) -> int:
    for byte in text:
        if state == ESCAPED:
            state = INSIDE
        elif byte == 0x22:
            state = INSIDE if state == OUTSIDE else OUTSIDE
        elif byte == 0x5C and state == INSIDE:
            state = ESCAPED
    return state


def _end_row(vocabulary: Vocabulary) -> Row:
    row = np.zeros(vocabulary.num_words, dtype=np.uint32)
    for token in vocabulary.eos:
        row[token >> 5] |= np.uint32(1 << (token & 31))
    return row.view(np.int32)


def ranks(vocabulary: Vocabulary) -> Row:
    """Return, for each token, its kind * 256 + its preference within the kind. Tokens of kind `NEVER` are not tried."""
    return vocabulary.derived(_ranks)


def _ranks(vocabulary: Vocabulary) -> Row:
    rank: Row = np.full(vocabulary.size, NEVER << 8, dtype=np.int32)
    for token, text in enumerate(vocabulary.tokens):
        if text and token not in vocabulary.special and token not in vocabulary.eos:
            kind, size = _kind(text), min(len(text), 255)
            rank[token] = (kind << 8) + (255 - size if kind < 10 else size)
    return rank


def _kind(text: bytes) -> int:
    """Return the kind of a token: the length of a run of letters, digits or blanks, or the class of a character."""
    if len(text) == 1:
        return 11 if text.isdigit() else 12 if text.islower() else 13 if text.isupper() else 14 + text[0] % 32
    if text.isalpha():
        return 1
    if text.isdigit():
        return 2
    return 3 if not set(text) & set(b'"\\{}[],:') else 50
