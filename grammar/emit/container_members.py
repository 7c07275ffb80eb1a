"""Rules for the members of arrays and objects: which item may come next, and the number of items.

An object writes its listed properties in the order of the schema, then the others:

    "{" a ("," b)? "," c ("," extra)* "}"

If the number of properties or of matching items is limited, rule names include the count so far.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..schema.constraints import Arrays, Conj, Contains, Objects
from .container_entries import item_language
from .entry_languages import has_entries
from .lark_rules import LarkRules
from .listed_values import MAX_LISTED_VALUES, listed_values

MAX_STATES = 2_000


@dataclass(frozen=True, slots=True)
class Field:
    """A listed property: its name, its item in the grammar (None if it must be absent), whether it is required."""

    name: str
    rule: str | None
    required: bool


def object_fields(rules: LarkRules, objects: Objects, fields: list[Field], extra: list[str], name: str) -> str:
    """Return the body of the grammar rule for an object, and define the auxiliary rules that it needs.

    Args:
        rules: the grammar that is being written.
        objects: the constraints, of which only `least` and `most` are used.
        fields: the listed properties that may be present, in order.
        extra: expressions for one property with an unlisted key, one for each set of patterns that the key may match;
            empty if there may be no other keys.
        name: prefix for the names of auxiliary rules.
    """
    needed = sum(field.required for field in fields)
    open_end = rules.define(f"{name}_x", " | ".join(extra)) if extra else ""
    counts_most = objects.most is not None and (bool(extra) or objects.most < len(fields))
    if objects.least <= needed and not counts_most:
        return f'"{{" {_in_order(rules, fields, open_end, name)} "}}"'
    if objects.most == 0:
        return '"{" "}"'
    return f'"{{" {_counted(rules, objects, fields, open_end, name)} "}}"'


def _in_order(rules: LarkRules, fields: list[Field], extra: str, name: str) -> str:
    """Write properties in order, optional ones as optional."""
    tails = [f'("," {extra})*' if extra else ""]
    for index in range(len(fields) - 1, 0, -1):
        field = fields[index]
        step = f'"," {field.rule}' if field.required else f'("," {field.rule})?'
        tail = f"{step} {tails[0]}"
        tails.insert(0, rules.define(f"{name}_{index}", tail) if len(fields) > 2 else tail)
    options = []
    for field, tail in zip(fields, tails, strict=False):
        options.append(f"{field.rule} {tail}")
        if field.required:
            return _group(options)
    if extra:
        options.append(f'{extra} ("," {extra})*')
    return f"({' | '.join(options)})?" if options else ""


def _counted(rules: LarkRules, objects: Objects, fields: list[Field], extra: str, name: str) -> str:
    """Write properties in order with a count: one rule for each (next property, properties so far)."""
    cap = objects.most if objects.most is not None else objects.least
    if (len(fields) + 1) * (cap + 1) > MAX_STATES:
        raise rules.unsupported(("minProperties", "maxProperties"), f"more than {MAX_STATES} states to count")
    bodies: dict[tuple[int, int], str | None] = {}
    for index in range(len(fields), -1, -1):
        for count in range(min(cap, index) + 1):
            key = f"{name}_c{index}_{count}"
            if index == len(fields):
                body = _counted_extra(rules, objects, extra, count)
            else:
                body = _counted_step(bodies, objects, fields[index], (index, count), name)
            bodies[index, count] = body
            if body is not None:
                rules.define(key, body or '""')
    if bodies[0, 0] is None:
        reason = "no object can have that many distinct keys"
        raise rules.unsupported(("minProperties", "maxProperties"), reason)
    return f"{name}_c0_0"


def _counted_step(
    bodies: dict[tuple[int, int], str | None], objects: Objects, field: Field, state: tuple[int, int], name: str
) -> str | None:
    index, count = state
    cap = objects.most if objects.most is not None else objects.least
    full = objects.most is not None and count + 1 > objects.most
    after = index + 1, min(count + 1, cap)
    options = []
    if not full and bodies.get(after) is not None:
        comma = '"," ' if count else ""
        options.append(f"{comma}{field.rule} {name}_c{after[0]}_{after[1]}")
    if not field.required and bodies.get((index + 1, count)) is not None:
        options.append(f"{name}_c{index + 1}_{count}")
    return " | ".join(options) or None


def _counted_extra(rules: LarkRules, objects: Objects, extra: str, count: int) -> str | None:
    """Write the unlisted properties; where two of their keys may be equal, only one counts towards a minimum."""
    least = max(0, objects.least - count)
    most = None if objects.most is None else objects.most - count
    if (least > 1 and rules.entries is None) or (least and (not extra or most == 0)):
        return None
    if not extra or most == 0:
        return ""
    another = f'("," {extra})'
    if count:
        return _times(another, least, most)
    rest = f"{extra} {_times(another, max(0, least - 1), None if most is None else most - 1)}"
    return rest if least else f"({rest})?"


def array_fields(rules: LarkRules, arrays: Arrays, name: str) -> str:
    """Return the body of the grammar rule for an array, and define the auxiliary rules that it needs."""
    if arrays.unique and (arrays.most is None or arrays.most > 1):
        return _unique(rules, arrays, name)
    return _repeating(rules, arrays, name)


def _repeating(rules: LarkRules, arrays: Arrays, name: str) -> str:
    if arrays.contains:
        return _containing(rules, arrays, name)
    prefix = [arrays.item(index) for index in range(arrays.num_prefix)]
    most = arrays.most
    for index, conj in enumerate(prefix):
        if not rules.satisfiability.is_satisfiable(conj):
            rules.check_not_narrowed(conj)
            prefix, most = prefix[:index], index if most is None else min(most, index)
            break
    rest = arrays.item(arrays.num_prefix)
    if (most is None or most > len(prefix)) and not rules.satisfiability.is_satisfiable(rest):
        rules.check_not_narrowed(rest)
        most = len(prefix)
    prefix = prefix[:most]
    return f'"[" {_positions(rules, prefix, rest, arrays.least, most, name)} "]"'


def _positions(rules: LarkRules, prefix: list[Conj], rest: Conj, least: int, most: int | None, name: str) -> str:
    """Write items by position, then items that share their constraints."""
    low = max(0, least - len(prefix))
    high = None if most is None else most - len(prefix)
    if not prefix:
        return _alike(rules.rule(rest), low, high) if high != 0 else ""
    tail = "" if high == 0 else _times(f'("," {rules.rule(rest)})', low, high)
    for index in range(len(prefix) - 1, 0, -1):
        step = f'"," {rules.rule(prefix[index])} {tail}'
        tail = rules.define(f"{name}_{index}", step if index < least else f'{step} | ""')
    whole = f"{rules.rule(prefix[0])} {tail}"
    return whole if least else f"({whole})?"


def _alike(item: str, least: int, most: int | None) -> str:
    more = _times(f'("," {item})', max(0, least - 1), None if most is None else most - 1)
    return f"{item} {more}" if least else f"({item} {more})?"


def _containing(rules: LarkRules, arrays: Arrays, name: str) -> str:
    """Write arrays with a number of matching items: one rule for each (position, matches so far)."""
    if len(arrays.contains) > 1:
        raise rules.unsupported(("contains", "items"), "some item of an array has more than one condition")
    entry = arrays.contains[0]
    last = _last_state(arrays)
    cap = entry.most if entry.most is not None else entry.least
    if (last + 1) * (cap + 1) > MAX_STATES:
        raise rules.unsupported(("contains", "minContains", "maxContains"), f"more than {MAX_STATES} states to count")
    is_satisfiable = False
    for index in range(last, -1, -1):
        for count in range(cap, -1, -1):
            body = _containing_step(rules, arrays, entry, (index, count), name)
            if body is not None:
                rules.define(f"{name}_k{index}_{count}", body)
                is_satisfiable = is_satisfiable or (index, count) == (0, 0)
    if not is_satisfiable:
        raise rules.unsupported(("contains", "minContains", "items"), "no array satisfies it")
    return f'"[" {name}_k0_0 "]"'


def _containing_step(
    rules: LarkRules, arrays: Arrays, entry: Contains, state: tuple[int, int], name: str
) -> str | None:
    index, count = state
    last = _last_state(arrays)
    options = ['""'] if index >= arrays.least and count >= entry.least else []
    if arrays.most is None or index < arrays.most:
        comma = '"," ' if index else ""
        after = min(index + 1, last)
        # The rule with most matches comes first, so that a loop to the same state is last: alone it never ends.
        for conj, new in _next_items(arrays.item(index), entry, count):
            target = f"{name}_k{after}_{new}"
            can_end = bool(options) if (after, new) == state else target in rules.bodies
            if can_end and rules.satisfiability.is_satisfiable(conj):
                options.append(f"{comma}{rules.rule(conj)} {target}")
    return " | ".join(options) or None


def _last_state(arrays: Arrays) -> int:
    """Return the position from which all further states are equal; position 0 has no items yet."""
    return max(1, arrays.num_prefix, arrays.least, arrays.most or 0)


def _next_items(item: Conj, entry: Contains, count: int) -> list[tuple[Conj, int]]:
    """Return the conjunctions of the items that may come next, with the number of matches after each."""
    if entry.most is None:
        if count == entry.least:
            return [(item, count)]
        return [(item | entry.item, count + 1), (item | entry.negated, count)]
    hits = [(item | entry.item, count + 1)] if count < entry.most else []
    return [*hits, (item | entry.negated, count)]


def _unique(rules: LarkRules, arrays: Arrays, name: str) -> str:
    """Write arrays of distinct items: listed if there are few values, else followed by a memory of the items."""
    if arrays.contains or arrays.num_prefix:
        raise rules.unsupported(("uniqueItems",), "cannot be combined with prefixItems or contains")
    values = listed_values(rules, arrays.item(0))
    if values is not None:
        return _each_once(rules, arrays, values, name)
    if rules.entries is None:
        reason = f"the items can have more than {MAX_LISTED_VALUES} values, which is the limit here"
        raise rules.unsupported(("uniqueItems",), reason)
    language = item_language(rules, arrays.item(0))
    # If values are too many to list, their number exceeds the limit; by how much is only known for scalars.
    if language.has_limited and arrays.least > MAX_LISTED_VALUES:
        reason = f"the items are arrays or objects of limited size; at most {MAX_LISTED_VALUES} are supported"
        raise rules.unsupported(("uniqueItems", "minItems"), reason)
    if not has_entries(language, arrays.least):
        raise rules.unsupported(("uniqueItems",), f"there are fewer than {arrays.least} different items")
    rules.entries.distinct[arrays] = language
    return f"{_repeating(rules, arrays, name)} | {rules.terminal(rules.entries.mark(language))}"


def _each_once(rules: LarkRules, arrays: Arrays, values: list[str], name: str) -> str:
    """Write arrays of distinct items from a list of values: the set of values used is the rule's parameter."""
    if arrays.least > len(values):
        raise rules.unsupported(("uniqueItems",), f"there are only {len(values)} values for {arrays.least} items")
    most = min(arrays.most if arrays.most is not None else len(values), len(values))
    lines = [f'"" %if bit_count_ge(_, {arrays.least})'] if arrays.least else ['""']
    first = []
    for bit, value in enumerate(values):
        guard = f"and(bit_clear({bit}), bit_count_lt(_, {most}))"
        lines.append(f'"," {value} {name}_u::set_bit({bit}) %if {guard}')
        first.append(f"{value} {name}_u::{hex(1 << bit)}")
    rules.bodies[f"{name}_u::_"] = "\n | ".join(lines)
    inside = _group(first)
    return f'"[" {inside if arrays.least else f"({inside})?"} "]"' if first else '"[" "]"'


def _times(item: str, least: int, most: int | None) -> str:
    """Write a repeated expression; an empty text if it may not occur."""
    if most is None:
        return f"{item}*" if least == 0 else f"{item}{{{least},}}"
    return f"{item}{{{least},{most}}}" if most else ""


def _group(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
