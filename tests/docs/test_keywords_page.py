"""The page on keywords is what the tables say, and the tables are what the analysis does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.grammar.schema_cases import CASES
from support.keywords_page import page

from rootgraft.grammar.regex.string_formats import FORMATS
from rootgraft.grammar.schema.keywords import KEYWORDS, Treatment

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "schema-keywords.md"


def keywords_in(schema: Any) -> Iterator[str]:
    """Every key of every object, which holds all keywords that a schema uses."""
    if isinstance(schema, dict):
        yield from schema
        for value in schema.values():
            yield from keywords_in(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from keywords_in(value)


def test_the_page_is_made_from_the_tables():
    made = "run python tests/support/keywords_page.py > docs/reference/schema-keywords.md"
    assert PAGE.read_text("utf-8") == page(), made


@pytest.mark.parametrize("treatment", [Treatment.ENFORCED])
def test_each_enforced_keyword_has_a_case_that_admits_and_one_that_does_not(treatment):
    """The cases themselves are run by the test of keywords, and judged by another library."""
    shown = {word for schema, valid, invalid in CASES if valid and invalid for word in keywords_in(schema)}
    named = {name for name, row in KEYWORDS.items() if row.treatment is treatment}
    # Formats have a test of their own; a dynamic reference to one place is that of an ordinary one.
    assert named - shown == {"format", "$dynamicRef"}


def test_annotations_and_unknown_words_constrain_nothing(grammars):
    words = [name for name, row in KEYWORDS.items() if row.treatment is Treatment.ANNOTATION if name[0] != "$"]
    notes = {name: {} if name == "definitions" else "http://x.y/z" if name == "id" else True for name in words}
    schema = {**notes, "x-vendor": {"type": "string"}, "format": "no-such-format", "type": ["string", "integer"]}
    compiled = grammars.schema(schema)
    assert grammars.admits(compiled, '"anything"') and grammars.admits(compiled, "5")
    assert not grammars.admits(compiled, "null")


def test_every_format_of_the_specification_is_asserted_or_said_to_be_none():
    known = set(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
    asserted = set(FORMATS)
    assert all(name.startswith(("uuid", "ipv")) for name in asserted - known), "pydantic's"
    assert known - asserted <= {"color", "ip-address", "host-name"}, "named by older drafts only"
    text = PAGE.read_text("utf-8")
    assert all(f"| `{name}` |" in text for name in asserted)


def test_a_dynamic_reference_to_one_place_is_followed(grammars):
    schema = {
        "$defs": {"node": {"$dynamicAnchor": "node", "type": "integer"}},
        "type": "array",
        "items": {"$dynamicRef": "#node"},
    }
    compiled = grammars.schema(schema)
    assert grammars.admits(compiled, "[1]") and not grammars.admits(compiled, '["a"]')
