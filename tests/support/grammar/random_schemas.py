"""Random schemas of many keywords, and values that they may hold for, as Hypothesis strategies."""

from __future__ import annotations

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "c"])
SCALARS = st.sampled_from([None, True, False, 0, 1, 2, -1, 0.5, 0.3, 4.35, 10**20, "", "a", "ab", "b", "é", '"', "1\n"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
PATTERNS = st.sampled_from(
    ["^a", "b$", "^ab?$", "a|b", "^(?!a)", r"^\w*$", r"\d", r"[^\s]", "^(?=.*b)", "(a$)|(^b)", "é"]
)
COUNTS = st.integers(0, 2)


def keywords(inner: st.SearchStrategy) -> dict[str, st.SearchStrategy]:
    schemas = st.lists(inner, min_size=1, max_size=3)
    return {
        "type": st.sampled_from(
            ["null", "boolean", "integer", "number", "string", "array", "object", ["string", "null"]]
        ),
        "enum": st.lists(VALUES, min_size=1, max_size=4),
        "const": VALUES,
        "minimum": st.integers(-1, 2) | st.sampled_from([0.29, 9.1, 1e-7, 10**20]),
        "exclusiveMaximum": st.sampled_from([0, 0.5, 1, 9.1, 1e20]),
        "multipleOf": st.sampled_from([1, 2, 0.5, 0.1, 0.01, 0.3, 1.5]),
        "format": st.sampled_from(["date", "ipv4", "hostname", "uuid", "unheard-of"]),
        "minLength": COUNTS,
        "maxLength": COUNTS,
        "pattern": PATTERNS,
        "items": inner,
        "prefixItems": schemas,
        "minItems": COUNTS,
        "maxItems": COUNTS,
        "uniqueItems": st.booleans(),
        "contains": inner,
        "minContains": COUNTS,
        "maxContains": COUNTS,
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "minProperties": COUNTS,
        "maxProperties": COUNTS,
        "propertyNames": inner,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=2),
        "anyOf": schemas,
        "oneOf": schemas,
        "allOf": schemas,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
    }


def objects(inner: st.SearchStrategy) -> st.SearchStrategy:
    known = keywords(inner)
    chosen = st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: known[name] for name in names}))


LEAVES = st.booleans() | st.sampled_from(
    [{}, {"type": "string"}, {"type": "integer"}, {"const": 1}, {"enum": ["a", 1]}]
)
SCHEMAS = st.recursive(LEAVES, objects, max_leaves=6).filter(lambda schema: isinstance(schema, dict))
