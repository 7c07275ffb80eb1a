"""Random schemas against python-jsonschema: nothing invalid is admitted, nothing valid is lost unnoticed."""

from __future__ import annotations

import json
import random

import jsonschema
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.grammar.random_schemas import SCHEMAS, VALUES
from support.machine.thoroughness import repeats

from benchmarks.grammar.spelling import MISSING, spell
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.schema.analysis import Analysis
from rootgraft.grammar.schema.document import Document
from rootgraft.grammar.spec import GrammarSpec

ROOT = frozenset((0,))
SLOW = settings(max_examples=repeats(300), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@SLOW
@given(SCHEMAS, st.lists(VALUES, min_size=4, max_size=10))
def test_the_analysis_admits_what_the_validator_admits(schema, values):
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    analysis = Analysis(Document(schema))
    try:
        admitted = [spell(analysis, ROOT, value) is not MISSING for value in values]
    except GrammarError:
        assume(False)
    for value, found in zip(values, admitted, strict=True):
        valid = validator.is_valid(value)
        assert valid or not found
        # Some of the validator's formats end in "$", which in Python also matches before a last line break.
        if isinstance(value, str) and value.endswith("\n"):
            continue
        assert found or not valid or analysis.narrowings or "unevaluated" in json.dumps(schema)


@settings(SLOW, max_examples=repeats(150))
@given(SCHEMAS, st.integers(0, 1000))
def test_random_answers_of_random_schemas_validate(grammars, vocabulary, schema, seed):
    try:
        compiled = compile(GrammarSpec.json_schema(schema), vocabulary)
    except GrammarError as error:
        assert error.reason
        assume(False)
    text = grammars.draw(compiled.matcher(), random.Random(seed), 60)
    if text is not None:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator, format_checker=checker)
