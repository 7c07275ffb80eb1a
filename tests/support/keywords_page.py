# ruff: noqa: E501 (paragraphs of the page)
"""Writes the documentation's page on keywords from the tables that the analysis uses.

python tests/support/keywords_page.py > docs/reference/schema-keywords.md
"""

from __future__ import annotations

from dataclasses import fields

from rootgraft.grammar.emit.lark_rules import MAX_WHITESPACE
from rootgraft.grammar.emit.listed_values import MAX_LISTED_VALUES
from rootgraft.grammar.match.memory_state import MAX_DEPTH
from rootgraft.grammar.regex.number_ranges import MAX_INT_DIGITS
from rootgraft.grammar.regex.string_formats import FORMATS, NARROWER
from rootgraft.grammar.schema.keywords import KEYWORDS, Treatment
from rootgraft.grammar.schema.static_limits import Limits

_INTRODUCTION = """# What we promise, keyword by keyword

This page is written from the tables that the analysis of schemas uses: `tests/support/keywords_page.py`. A test compares them.

A keyword is **enforced** (a finished answer holds it) or an **annotation** (it constrains nothing, by the specification). Keywords that are in no table are annotations, as the specification says. One whose value is null, as Go writes maps and lists that were never made, counts as absent, but for `const`, `default`, `example` and `type`. What an enforced keyword cannot do in some combination is **refused**: the schema gets status 400, naming keyword, JSON Pointer and reason. All drafts from 4 to 2020-12 are read; `$schema` chooses, and 2020-12 is the default. A keyword of another draft means what the draft says, nothing, where it would make a difference to a validator of that draft: within `oneOf`, `not`, `if` or `contains`, beside keywords that have taken its place, and beside `unevaluatedItems`. Elsewhere it is enforced too. `dependencies` of drafts up to 7, which many validators know in later ones, is refused there within `oneOf`, `not`, `if` or `contains` and beside `unevaluatedProperties` or `unevaluatedItems`.
"""
_SPELLING = f"""## How answers are spelled

Every finished answer validates; some valid JSON texts are never produced. Besides what the tables say:

- Keys that a schema declares come in the order of the schema, before all others.
- No key of an object comes twice, at any depth: see [what is remembered](#what-is-remembered).
- Each character of a string has one spelling: itself, or, where JSON asks for an escape, the shortest one. `\\u0061` for `a` is never written.
- Integers have no fraction and no exponent, and at most {MAX_INT_DIGITS} digits. Only numbers without bounds may have an exponent, of at most two digits.
- Between the parts there are at most {MAX_WHITESPACE} blanks, tabs and line breaks.
- Integers in a schema are exact at any length; other numbers are read as doubles and compared by value, as validators do: `1e23` is 99999999999999991611392, and is written so. NaN, infinities, repeated keys (in schemas given as text) and halves of surrogate pairs are refused.
"""

_COMPILES = """A compile may take 2 seconds of processor time and 512 MiB of memory; a grammar beyond one of them is refused too. How busy the machine is decides nothing: a request that has waited 120 seconds for its grammar gets status 503 with `retry-after` while the compile goes on, and asking again finds its result. So does a request whose compile was killed from outside twice.

Of tools, a refusal names the place in the schema of one of them (`tools[1].function.parameters`), or `tools` where all together exceed a limit.

Of the 27 schemas of published tools in check-jsonschema 0.39, 21 are served. Refused are `azure-pipelines` (an `anyOf` of 259 branches), `drone-ci` (a `oneOf` of more than 256 combinations), `circle-ci` and `travis` (branches of `oneOf` that overlap, and whose difference cannot be written), `citation-file-format` (strings too complex to follow) and `renovate` (1.2 MB). CycloneDX 1.2 to 1.7 are served once the files that they refer to, which are never fetched, are definitions of the schema, and so are OpenAPI 2.0 to 3.2.
"""
_REMEMBERED = f"""## What is remembered

A grammar cannot say that two values differ, so the matcher reads the JSON along with it and remembers:

- the keys of every object: none comes twice, at any depth, as I-JSON (RFC 7493) asks. `minProperties` counts undeclared keys too, and keys of `patternProperties` and `propertyNames` are used up one by one;
- the items of every array with `uniqueItems`. Strings are compared by their characters, numbers by value (1 and 1.0 are equal; integers exactly, others as doubles), arrays and objects by their contents, in any order of keys. So pydantic's `set[str]`, `set[int]` and `frozenset` can be answered, as an answer and as parameters of tools.

A token is left out if it completes a repetition, or if nothing but repetitions can follow: after `"a1"` and `"a2"` of the
pattern `^(a[12]|b)$` no string begins with `a`. There is no limit on the number of items or keys. At most {MAX_LISTED_VALUES} values of any
kind are listed in the grammar instead, which costs nothing along the answer.

Of items that are arrays or objects of limited size (`maxItems`, or no undeclared properties) a search tells whether a
beginning has an end that no item has. Refused by name are more than {MAX_LISTED_VALUES} of them by `minItems`; strings and numbers whose automaton has too
many states; fewer values than `minItems`. Arrays in items are at most {MAX_DEPTH} deep. Where another array may
stand in place of one with distinct items and the text does not tell which of them it is, the items are distinct in
both; where that could leave an answer without an end, the schema is refused.

In tool calls all this holds for parameters in every format but `gemma4`, where sets hold up to {MAX_LISTED_VALUES} values and keys are not
compared. A parameter of an XML style that takes strings as well as arrays has no memory either, and names of parameters
themselves are not compared in the formats that are not JSON. In structural tags there is no memory where other text may
stand in place of JSON: beside `any_text`, or where two tags begin alike.
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [_INTRODUCTION]
    parts.append(f"## Enforced\n\n{_table()}")
    names = ", ".join(f"`{name}`" for name, row in KEYWORDS.items() if row.treatment is Treatment.ANNOTATION)
    parts.append(f"## Annotations\n\n{names}. So is every `format` but those below, and every unknown keyword.\n")
    parts.append(f"## Formats\n\n{_formats()}")
    parts.append(_REMEMBERED)
    parts.append(_SPELLING)
    parts.append(f"## Limits\n\n{_limits()}")
    return "\n".join(parts)


def _table() -> str:
    rows = [f"| `{name}` | {row.note} |" for name, row in KEYWORDS.items() if row.treatment is Treatment.ENFORCED]
    return "\n".join(["| keyword | narrower or refused where |", "|---|---|", *rows]) + "\n"


def _formats() -> str:
    lead = (
        "These are asserted, on strings of any draft: those of the standard, and those that pydantic writes for UUIDs of "
        "one version and for networks. Any other format is an annotation and constrains nothing.\n\n"
    )
    rows = [f"| `{name}` | {NARROWER.get(name, '')} |" for name in FORMATS]
    return lead + "\n".join(["| format | narrower than the standard |", "|---|---|", *rows]) + "\n"


def _limits() -> str:
    lead = (
        "A schema beyond one of these is refused before anything is compiled. Annotations and unknown keywords are cut "
        "off before anything is measured, unless a reference leads into them; all tools of a request together are one "
        "structural tag or schema.\n\n"
    )
    limits = Limits()
    described = dict(line.strip().split(": ", 1) for line in (Limits.__doc__ or "").splitlines() if ": " in line)
    rows = [f"| {described[field.name].rstrip('.')} | {getattr(limits, field.name):,} |" for field in fields(limits)]
    rows = [row.replace("``", "`") for row in rows]
    table = "\n".join(["| at most | |", "|---|---|", *rows])
    return f"{lead}{table}\n\n{_COMPILES}"


if __name__ == "__main__":
    print(page(), end="")
