"""Completion search: finds a short sequence of tokens that leads from any state of an answer to an end.

Several walks compose the completion of the short texts of the grammar (``ClosingTexts``). It is then tokenized into as
few tokens as possible. A completion that is found always leads to an end; a shorter one may exist that no walk finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice, zip_longest

import numpy as np

from .backends import BackendState, BoundedState, Row, SearchExhausted, advance, leads_to_end, rollback_unless_failed
from .closing_texts import ESCAPED, INSIDE, NEVER, OUTSIDE, ClosingTexts, ranks

MAX_TOKENS = 2_000
MAX_STEPS = 800
HEAD_START = 40
# Limit of the tokens that a search may try. Successful searches try up to 800 in schemas, up to 10,000 in structural
# tags.
MAX_TRIES = 12_000
MAX_SEARCH = 300
MAX_KEYS = 4  # Number of properties that are tried in place of another one.
MAX_FEW = 64  # If at most this number of tokens is allowed, each of them is tried.


class CompletionSearch:
    """Searches completions of one grammar. It keeps no state between searches."""

    def __init__(self, texts: ClosingTexts) -> None:
        self._texts = texts

    def shortest(
        self,
        state: BackendState,
        lexical: int,
        most: int = MAX_TOKENS,
        enough: int = MAX_TOKENS,
        left: list[int] | None = None,
        *,
        near: int | None = None,
    ) -> list[int] | None:
        """Return the shortest completion that was found; None if none was found.

        Args:
            state: state of the answer, which is left unchanged.
            lexical: lexical state of the answer.
            most: approximate largest number of tokens of a completion.
            enough: the search ends when it finds a completion of at most this number of tokens.
            left: list with the number of tokens that may still be tried; the search reduces it.
            near: if given, the search also ends at a completion of more tokens than this, as no short one is then
                expected.
        """
        best: list[int] | None = None
        keys = set[bytes]()
        count = [MAX_TRIES] if left is None else left
        probe = BoundedState(state.copy(), count)
        bounded = BoundedState(state, count)
        sources = self._others(bounded, lexical, most), self._completions(bounded, lexical, most)
        try:
            for number, source in enumerate(sources):
                for first in source:
                    others = self._other_keys(bounded, first, lexical, most, keys) if number else ()
                    for each in chain([first], others):
                        found = self._recut(probe, each, lexical, enough)
                        if best is None or len(found) < len(best):
                            best = found
                        if len(best) <= enough:
                            return best
                    if number and near is not None and best is not None and len(best) > near:
                        break
        except SearchExhausted:
            pass
        return best

    def _recut(self, probe: BackendState, found: list[int], lexical: int, enough: int) -> list[int]:
        """Return a completion for ``found`` in as few tokens as possible."""
        recuts = self._texts.recuts(found, lexical)
        found = next((each for each in recuts if len(each) < len(found) and leads_to_end(probe, each)), found)
        others = self._texts.other_kinds(found, lexical)
        found = next((each for each in others if leads_to_end(probe, each)), found)
        return self._exchanged(probe, found, lexical, enough)

    def _exchanged(self, probe: BackendState, found: list[int], lexical: int, enough: int) -> list[int]:
        """Return ``found`` with scalars exchanged, if that gives at most ``enough`` tokens; else ``found`` itself."""
        exchanges = self._texts.exchanges(found, lexical)
        best = found if exchanges is None else exchanges.best()
        if exchanges is None or len(best) >= len(found) or len(best) > enough:
            return found
        return best if leads_to_end(probe, best) else exchanges.improve(found, partial(leads_to_end, probe))

    def _completions(self, state: BackendState, lexical: int, most: int) -> Iterator[list[int]]:
        """Run several walks in turns; yield the completions of those that reach an end."""
        texts = self._texts
        walk = self._walk(state.copy(), lexical, most)
        # The plain walk can fail: items of an array may have to differ, and text outside of JSON, or a quote in it,
        # may be taken for JSON. So other walks run too. Any walk that reaches an end is valid. The plain walk starts
        # first, as it is usually the shortest.
        others = [self._walk(state.copy(), lexical, most, rotate=True)] if texts.listed else []
        if texts.rests:
            others += [self._walk(state.copy(), lexical, most, first) for first in (texts.ends, texts.rests)]
            flipped = INSIDE if lexical == OUTSIDE else OUTSIDE
            others += [self._walk(state.copy(), flipped, most, first) for first in ([], texts.ends)]
        for found in chain(islice(walk, HEAD_START), chain.from_iterable(zip_longest(walk, *others))):
            if found is not None:
                yield found
        yield from self._branches(state, lexical, most)
        yield from self._one_more(state, lexical, most)

    def _others(self, state: BackendState, lexical: int, most: int) -> Iterator[list[int]]:
        """Yield completions for each kind of array or object that has begun or may begin here.

        A single walk continues with one kind only, and the shortest container of that kind may take more tokens than
        one of another kind.
        """
        if not self._texts.has_kinds:
            return
        state = state.copy()
        begin = self._texts.vocabulary.tokenize_forced(state.forced())
        if not advance(state, begin):
            return
        inside, rejected = self._lexical_after(lexical, begin), set[int]()
        items = self._texts.items
        for found in self._walk(state.copy(), inside, most, each_once=items) if items else ():
            if found is not None:
                yield [*begin, *found]
        for rest in self._texts.container_rests(inside):
            if rest[0] in rejected:
                continue
            count = state.advance(rest)
            after = state.copy() if count == len(rest) else None
            rollback_unless_failed(state, count)
            if not count:
                rejected.add(rest[0])
            for found in self._walk(after, OUTSIDE, most, each_once=items) if after is not None else ():
                if found is not None:
                    yield [*begin, *rest, *found]

    def _other_keys(
        self, state: BackendState, found: list[int], lexical: int, most: int, tried: set[bytes]
    ) -> Iterator[list[int]]:
        """Yield completions that have another property in place of the first one in ``found``.

        A single walk continues with one of the properties that may begin or have begun, but another one may take fewer
        tokens.

        Args:
            tried: texts before a key for which this was done already; the text before the first key of ``found`` is
                added.
        """
        before = self._texts.before_key(found, lexical)
        if before is None or before in tried:
            return
        tried.add(before)
        begin, after = self._texts.vocabulary.fewest(before), state.copy()
        if begin and not advance(after, begin):
            return
        count = 0
        for rest in self._texts.key_rests:
            advanced = after.advance(rest)
            if advanced == len(rest) and not self._texts.begins_alike(found, [*begin, *rest]):
                count += 1
                for end in self._walk(after.copy(), OUTSIDE, most):
                    if end is not None:
                        yield [*begin, *rest, *end]
            rollback_unless_failed(after, advanced)
            if count == MAX_KEYS:
                return

    def _branches(self, state: BackendState, lexical: int, most: int) -> Iterator[list[int]]:
        """Yield completions that begin with each of the short texts: the shortest text may have the most tokens."""
        texts = self._texts
        for begin in texts.tails if lexical == INSIDE or not texts.is_json else texts.listed:
            after = state.copy()
            if not advance(after, begin):
                continue
            for found in self._walk(after, self._lexical_after(lexical, begin), most):
                if found is not None:
                    yield [*begin, *found]

    def _one_more(self, state: BackendState, lexical: int, most: int) -> Iterator[list[int]]:
        """Yield completions that begin with each allowed token, then with each two allowed tokens, and so on."""
        frontier: list[tuple[BackendState, int, list[int]]] = [(state, lexical, [])]
        seen, row = {b""}, np.zeros(self._texts.vocabulary.num_words, dtype=np.int32)
        tokens = self._texts.vocabulary.tokens
        for node, inside, path in frontier:
            if len(path) >= most:
                return
            node.fill(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            for token in allowed if len(allowed) <= MAX_FEW else ():
                text = b"".join(tokens[each] for each in path) + tokens[token]
                # White space between JSON values is not tried: the same completions follow without it.
                is_blank = self._texts.is_json and inside == OUTSIDE and not tokens[token].strip()
                after = node.copy()
                if is_blank or token in self._texts.vocabulary.eos or text in seen or not after.accept(token):
                    continue
                seen.add(text)
                begun = [*path, token]
                frontier.append((after, self._texts.lexical(inside, token), begun))
                for found in self._walk(after.copy(), frontier[-1][1], most):
                    if found is not None:
                        yield [*begun, *found]

    def _walk(
        self,
        state: BackendState,
        lexical: int,
        most: int,
        first: Sequence[list[int]] = (),
        *,
        rotate: bool = False,
        each_once: Sequence[list[int]] = (),
    ) -> Iterator[list[int] | None]:
        """Yield None after each closing text that is appended, then all tokens. Stops without tokens if no text fits.

        Args:
            state: state of the answer, which is advanced.
            lexical: lexical state of the answer.
            most: largest number of tokens of a completion.
            first: texts that are tried before all others.
            rotate: whether each step tries the listed texts in another order, beginning with the next one of them.
            each_once: texts that are tried before ``first``, each of which is used at most once.
        """
        tokens: list[int] = []
        for turn in range(MAX_STEPS):
            if state.can_end():
                yield tokens
                return
            step = self._step(state, lexical, [*each_once, *first], turn if rotate else 0)
            if not step or len(tokens) > min(most, MAX_TOKENS):
                return
            each_once = [text for text in each_once if text != step]
            lexical = self._lexical_after(lexical, step)
            tokens += step
            yield None

    def _lexical_after(self, lexical: int, tokens: Sequence[int]) -> int:
        for token in tokens:
            lexical = self._texts.lexical(lexical, token)
        return lexical

    def _step(self, state: BackendState, lexical: int, first: Sequence[list[int]], turn: int) -> list[int] | None:
        """Advance the state by the next tokens of a completion and return them; None if no text fits."""
        texts = self._texts
        # The texts that end tags are tried before the forced text, as that may be the first letter of two ends.
        end = next((end for end in texts.ends if leads_to_end(state, end)), None)
        if end is not None and advance(state, end):
            return list(end)
        forced = state.forced()
        if forced:
            tokens = texts.vocabulary.tokenize_forced(forced)
            return tokens if advance(state, tokens) else None
        found = _accept_first(state, first) or self._json_step(state, lexical, turn)
        return found or _accept_first(state, texts.rests) or self._search(state, lexical)

    def _json_step(self, state: BackendState, lexical: int, turn: int) -> list[int] | None:
        """Advance by a short text that fits the lexical state. Outside of JSON, the text must lead to an end."""
        texts = self._texts
        end = state.string_end()
        if end:
            tokens = texts.vocabulary.tokenize_bpe(end)
            return tokens if advance(state, tokens) else None
        if lexical == INSIDE:
            return _accept_first(state, texts.tails)
        if texts.is_json and lexical != ESCAPED:
            turn %= len(texts.listed)
            listed = [*texts.listed[turn:], *texts.listed[:turn]] if turn else texts.listed
            return (
                _accept_first(state, texts.closers)
                or _accept_first(state, listed, then=texts.closers)
                or self._number_end(state)
                or _accept_first(state, (*listed, texts.quote))
            )
        tail = next((tail for tail in texts.tails if leads_to_end(state, tail)), None)
        return list(tail) if tail and advance(state, tail) else None

    def _number_end(self, state: BackendState) -> list[int] | None:
        """Advance by the digits that end a number of which only some digits may be the last, such as a multiple."""
        texts = self._texts
        if not texts.digits or not state.advance(texts.digits[0]):
            return None
        rollback_unless_failed(state, 1)
        return _accept_first(state, texts.digits, then=texts.closers)

    def _search(self, state: BackendState, lexical: int) -> list[int] | None:
        """Search breadth first for a way out of a string or word that has begun, over a few tokens of each kind."""
        row: Row = np.zeros(self._texts.vocabulary.num_words, dtype=np.int32)
        frontier: list[tuple[BackendState, list[int]]] = [(state.copy(), [])]
        seen = {b""}
        for node, path in frontier:
            if len(frontier) > MAX_SEARCH:
                return None
            node.fill(row)
            if not path and (rest := self._character_rest(row)) is not None:
                return rest if advance(state, rest) else None
            for token in self._candidates(row):
                found = [*path, token]
                text = b"".join(self._texts.vocabulary.tokens[t] for t in found)
                after = node.copy()
                if text in seen or not after.accept(token):
                    continue
                seen.add(text)
                if after.can_end() or (lexical in (INSIDE, ESCAPED) and advance(after.copy(), self._texts.quote)):
                    return found if advance(state, found) else None
                frontier.append((after, found))
        return None

    def _character_rest(self, row: Row) -> list[int] | None:
        """Return the next byte of a character if the text ends within one, where the answer cannot end; else None."""
        tokens = self._texts.vocabulary.tokens
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        if any(not 0x80 <= next(iter(tokens[token]), 0) < 0xC0 for token in allowed):
            return None
        return [min(allowed, key=lambda token: len(tokens[token]))] if allowed else None

    def _candidates(self, row: Row) -> list[int]:
        """Return the best allowed token of each kind."""
        rank = ranks(self._texts.vocabulary)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(rank)])
        best = allowed[np.argsort(rank[allowed], kind="stable")]
        kinds, first = np.unique(rank[best] >> 8, return_index=True)
        return [int(best[index]) for kind, index in zip(kinds, first, strict=True) if kind < NEVER]


def _accept_first(state: BackendState, texts: Sequence[list[int]], then: Sequence[list[int]] = ()) -> list[int] | None:
    """Advance the state by the first text that it accepts, and return that text; None if it accepts none.

    Args:
        then: if given, one of these texts must be able to follow, unless the text completes the answer.
    """
    rejected: set[int] = set()  # First tokens that the state did not accept.
    for text in texts:
        if text[0] in rejected:
            continue
        count = state.advance(text)
        if count == len(text) and (not then or state.can_end() or _accepts_any(state, then)):
            return list(text)
        rollback_unless_failed(state, count)
        if not count:
            rejected.add(text[0])
    return None


def _accepts_any(state: BackendState, texts: Sequence[list[int]]) -> bool:
    for tokens in texts:
        count = state.advance(tokens)
        rollback_unless_failed(state, count)
        if count == len(tokens):
            return True
    return False
