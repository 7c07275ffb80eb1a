"""Stop strings, against a search over the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.text.stop_strings import StopStrings

WORDS = st.text(alphabet="ab", min_size=1, max_size=5)


def naive(text: str, stops: tuple[str, ...], armed_from: int = 0) -> tuple[str, str | None]:
    """The match that ends first beyond ``armed_from`` characters, the longest of those that end together."""
    for end in range(armed_from + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(WORDS, min_size=1, max_size=5).map(tuple),
    cuts=st.lists(st.integers(0, 7), max_size=12),
    unarmed=st.integers(0, 4),
)
def test_any_portions_equal_the_whole_text(text: str, stops: tuple[str, ...], cuts: list[int], unarmed: int) -> None:
    portions, rest = [], text
    for size in cuts:
        portions.append(rest[:size])
        rest = rest[size:]
    portions.append(rest)
    matcher = StopStrings(stops).matcher()
    certain, found, seen = "", None, ""
    for number, portion in enumerate(portions):
        emitted, found = matcher.feed(portion, armed=number >= unarmed)
        certain += emitted
        if found is not None:
            break
        seen += portion
        assert seen.startswith(certain)
        held = seen[len(certain) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(seen.endswith(end) for stop in stops for end in prefixes(stop, len(held)))
    if found is None:
        certain += matcher.finish()
    assert (certain, found) == naive(text, stops, sum(map(len, portions[:unarmed])))


def prefixes(stop: str, longer_than: int) -> list[str]:
    """Beginnings of ``stop`` that would have to be held back."""
    return [stop[:size] for size in range(longer_than + 1, len(stop))]


def test_earliest_end_wins_and_then_the_longest() -> None:
    assert StopStrings(("abc", "b")).matcher().feed("xabc") == ("xa", "b")
    assert StopStrings(("c", "abc")).matcher().feed("xabc") == ("x", "abc")


def test_held_back_text_leaves_once_no_match_can_come() -> None:
    matcher = StopStrings(("###END",)).matcher()
    assert matcher.feed("text ##") == ("text ", None)
    assert matcher.feed("#E") == ("", None)
    assert matcher.feed("X#") == ("###EX", None)
    assert matcher.finish() == "#"


def test_longest_strings_take_linear_time() -> None:
    """Each stop string differs from the text in its last character alone, so each is almost there all the time."""
    stops = tuple("a" * 255 + character for character in "bcdefghijklmnopq")
    matcher = StopStrings(stops).matcher()
    total = 0
    for _ in range(2000):
        certain, found = matcher.feed("aaaa")
        total += len(certain)
        assert found is None
    assert total == 8000 - 255
    assert matcher.feed("b")[1] == "a" * 255 + "b"
