"""Arrays of distinct items beside other arrays, and short texts of their items."""

from __future__ import annotations

from itertools import combinations

from ..schema.constraints import Arrays, Conj
from ..schema.json_types import ARRAY
from ..schema.subschemas import Narrowing
from .entry_languages import EntryLanguage, is_endless, shortest_entries
from .lark_rules import LarkRules
from .string_rules import alternatives_by_position

MAX_DISTINCT = 64
"""Most distinct items for which the shortest texts are searched."""


def check_distinct(rules: LarkRules, root: Conj) -> None:
    """Check that the matcher may remember the items of arrays that must be distinct.

    If the schema permits another array at the same place, and the text shows only later which of the two it is, the
    items of the other array must be distinct too. This is recorded as a narrowing.

    Raises:
        GrammarError: the memory cannot tell which of two arrays an item belongs to, although only one of them may end
            or continue there.
    """
    if rules.entries is None or not rules.entries.distinct:
        return
    distinct = rules.entries.distinct.copy()
    positions = alternatives_by_position(rules.satisfiability, root)
    if positions is None:
        raise rules.unsupported(("uniqueItems",), "the schema has too many positions to check for such arrays")
    for alternatives in positions:
        arrays = dict.fromkeys(each.arrays for each in alternatives if each.types & ARRAY)
        languages = dict.fromkeys(distinct[each] for each in arrays if each in distinct)
        others = [each for each in arrays if each not in distinct]
        if any(_overlap(*pair) for pair in combinations(languages, 2)):
            raise rules.unsupported(("uniqueItems",), "another array is allowed at the same position")
        of_containers = [each for each in languages if each.has_containers]
        if others and of_containers:
            # It is unknown to which array an item that is an array or object belongs, so its ends are searched.
            if any(each.least > 1 or each.contains for each in others):
                raise rules.unsupported(("uniqueItems",), "another array is allowed at the same position")
            for language in of_containers:
                rules.entries.limit(language)
        if others and languages:
            found = rules.unsupported(("uniqueItems",), "another array at the same position gets distinct items too")
            narrowing = Narrowing(found.keyword, found.pointer, found.reason)
            if narrowing not in rules.analysis.narrowings:
                rules.analysis.narrowings.append(narrowing)


def _overlap(one: EntryLanguage, other: EntryLanguage) -> bool:
    """Return whether an item may belong to both languages but only one of them can continue."""
    strings = (*one.strings, *other.strings) if one.strings and other.strings else ()
    return bool(
        not set(one.words).isdisjoint(other.words)
        or (one.numbers and other.numbers)
        or not all(map(is_endless, strings))
    )


def distinct_texts(rules: LarkRules, arrays: Arrays, count: int) -> list[str] | None:
    """Return the JSON of short, different items of an array; None if too few are found."""
    language = None if rules.entries is None else rules.entries.distinct.get(arrays)
    found = [] if language is None or count > MAX_DISTINCT else shortest_entries(language, count)
    return found if len(found) >= count else None
