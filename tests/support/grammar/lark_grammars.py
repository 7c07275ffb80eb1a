"""Random grammars in Lark whose terminals are one character each, so that every reader cuts a text alike."""

from __future__ import annotations

import random

COUNTS = ("?", "*", "+", "~2", "~1..2", "~0..1", "~2..3", "~0..2", "~ 1 .. 2", "~1")
TERMINALS = (
    '"a"', '"b"', '"c"', '"é"', '"a"i', '"B"i', "/[ab]/", "/b|c/", "/[a-c]/", '"a".."b"', "/[AB]/i", '"\\x61"',
    '"\\u0062"', "/\\x63/", "/[b[]/", "/[^a-z\\x00-[]|a/",
)  # fmt: skip


class LarkDraw:
    """Draws one grammar of a few rules and terminals.

    Args:
        rng: source of all choices.

    Attributes:
        alphabet: characters of texts to try.
        ignores: whether the grammar ignores blanks.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rules = ["start", *(f"r{number}" for number in range(rng.randint(0, 2)))]
        self._terminals = [f"T{number}" for number in range(rng.randint(0, 3))]
        self.ignores = rng.random() < 0.2
        self.alphabet = ("a", "A", " ") if self.ignores else rng.choice((("a", "b", "c"), ("a", "B", "é"), ("b", "[")))

    def grammar(self) -> str:
        """Return the text of the grammar."""
        rng = self._rng
        lines = [f"{self._sign(name)}{name}: {self._choices(2)}" for name in self._rules]
        lines += [f"{name}: {self._terminal(number)}" for number, name in enumerate(self._terminals)]
        rng.shuffle(lines)
        lines = [self._laid_out(line) for line in lines]
        if self.ignores:
            ignored = rng.choice(('" "', "/ /", "/ +/", '"x"\n  | " "', "WS_INLINE"))
            lines += [f"%ignore {ignored}", *["%import common.WS_INLINE"] * (ignored == "WS_INLINE")]
        return "\n".join(lines) + "\n"

    def _sign(self, name: str) -> str:
        return self._rng.choice(("", "", "?", "!"))

    def _laid_out(self, line: str) -> str:
        """Put an alternative on a line of its own, perhaps behind a comment."""
        between = self._rng.choice((" | ", "\n  | ", "\n\n  | ", " // x\n  # y\n  | ")) if "(" not in line else " | "
        return line.replace(" | ", between)

    def _terminal(self, number: int) -> str:
        choice = self._rng.randrange(4)
        if choice == 0 and number:
            return f"T{self._rng.randrange(number)}"
        one, other = self._rng.choice(TERMINALS), self._rng.choice(TERMINALS)
        return (one, f"{one} | {other}", f"({one} | {other})", one)[choice]

    def _choices(self, depth: int) -> str:
        found = [self._sequence(depth) for _ in range(self._rng.choice((1, 1, 2, 3)))]
        if self._rng.random() < 0.12:
            found.append("")
        return " | ".join(found)

    def _sequence(self, depth: int) -> str:
        parts = (self._part(depth) for _ in range(self._rng.choice((1, 1, 2, 2, 3))))
        return " ".join(part + (self._rng.choice(COUNTS) if self._rng.random() < 0.3 else "") for part in parts)

    def _part(self, depth: int) -> str:
        choice = self._rng.randrange(8)
        if choice == 3 and self._terminals:
            return self._rng.choice(self._terminals)
        if choice in (4, 5):
            return self._rng.choice(self._rules)
        if choice < 5 or not depth:
            return self._rng.choice(TERMINALS)
        inner = self._choices(depth - 1)
        return f"[{inner}]" if choice == 6 else f"({inner})"
