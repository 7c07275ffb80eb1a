"""Stop strings: finds stop strings in streamed text in one pass, with an Aho-Corasick automaton.

The automaton (Aho and Corasick, 1975) searches all stop strings at once. Its state represents the longest suffix of the
text that is a prefix of a stop string. The depth of the state is the number of characters to hold back, because they
may belong to a match.

Of several matches, the match that ends first counts; of matches with the same end, the longest counts. The result does
not depend on how the text is split into pieces or tokens.
"""

from __future__ import annotations

from collections import deque


class StopStrings:
    """Aho-Corasick automaton of non-empty stop strings. Immutable, so sequences may share it."""

    __slots__ = ("_depth", "_fallback", "_match", "_next")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [0]  # For each state, the length of the longest stop string that ends in the state; 0 for none.
        for stop in stops:
            self._match[self._insert(stop)] = len(stop)
        self._fallback = [0] * len(self._next)
        self._link()

    def matcher(self) -> StopMatcher:
        return StopMatcher(self)

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def match(self, state: int) -> int:
        """Return the length of the longest stop string that ends in ``state``; 0 if none does."""
        return self._match[state]

    def depth(self, state: int) -> int:
        """Return the number of characters at the end of the text that may be the beginning of a stop string."""
        return self._depth[state]

    def _insert(self, stop: str) -> int:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = self._next[state][character]
        return state

    def _link(self) -> None:
        """Set the fallback of each state: the state of its longest proper suffix.

        Parents are processed before children.
        """
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            self._match[state] = self._match[state] or self._match[self._fallback[state]]
            for character, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], character)
                waiting.append(child)


class StopMatcher:
    """Search for stop strings in one text, which arrives in pieces."""

    __slots__ = ("_automaton", "_held", "_state")

    def __init__(self, automaton: StopStrings) -> None:
        self._automaton = automaton
        self._state = 0
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Continue the search in ``text``.

        Args:
            armed: whether a stop string that ends in ``text`` counts as a match; False before ``min_tokens``.

        Returns:
            The text that can be sent, which ends before a match, and the stop string that was found, or None. After a
            match, the remaining text is dropped, and the matcher must not be used again.
        """
        automaton, state = self._automaton, self._state
        whole = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            state = automaton.step(state, character)
            if armed and (length := automaton.match(state)):
                self._held = ""
                return whole[: end - length], whole[end - length : end]
        self._state = state
        certain = len(whole) - automaton.depth(state)
        self._held = whole[certain:]
        return whole[:certain], None

    def finish(self) -> str:
        """Return the text held back. Must be called at the end of the text."""
        held, self._held, self._state = self._held, "", 0
        return held
