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
    """Check that arrays of remembered items may stand where they do.

    Where another array is possible at the same place, and the text tells them apart too late, the items of both are
    kept apart, which is recorded as a narrowing.

    Raises:
        GrammarError: if a memory of the items could come to an end that the other array does not have.
    """
    distinct = rules.entries.distinct if rules.entries is not None else {}
    if not distinct:
        return
    positions = alternatives_by_position(rules.satisfiability, root)
    if positions is None:
        raise rules.unsupported(("uniqueItems",), "the schema has too many places for values to find such arrays in")
    for alternatives in positions:
        arrays = dict.fromkeys(each.arrays for each in alternatives if each.types & ARRAY)
        languages = dict.fromkeys(distinct[each] for each in arrays if each in distinct)
        others = any(each not in distinct for each in arrays)
        is_unclear = any(_overlap(*pair) for pair in combinations(languages, 2))
        if is_unclear or (others and any(language.has_containers for language in languages)):
            raise rules.unsupported(("uniqueItems",), "another array may stand in place of this one")
        if others and languages:
            found = rules.unsupported(("uniqueItems",), "another array in place of this one has distinct items too")
            narrowing = Narrowing(found.keyword, found.pointer, found.reason)
            if narrowing not in rules.analysis.narrowings:
                rules.analysis.narrowings.append(narrowing)


def _overlap(one: EntryLanguage, other: EntryLanguage) -> bool:
    """Return whether an item may belong to both languages while only one of them can go on."""
    strings = (*one.strings, *other.strings) if one.strings and other.strings else ()
    return bool(
        not set(one.words).isdisjoint(other.words)
        or (one.numbers and other.numbers)
        or (one.has_containers and other.has_containers)
        or not all(map(is_endless, strings))
    )


def distinct_texts(rules: LarkRules, arrays: Arrays, count: int) -> list[str] | None:
    """Return the JSON of short, different items of an array; None if too few are found."""
    language = None if rules.entries is None else rules.entries.distinct.get(arrays)
    found = [] if language is None or count > MAX_DISTINCT else shortest_entries(language, count)
    return found if len(found) >= count else None
