"""Logprobs and probabilities in the shapes that clients get."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from rootgraft.api.exact_json import loads_exact
from rootgraft.api.generate.logprob_formats import field_probabilities
from rootgraft.engine.text.field_probabilities import FieldProbability


@pytest.mark.parametrize("value", ["a", None, True, 1.5, 5, 12345678901234567890123])
def test_values_of_fields_are_exact(value: Any) -> None:
    """An enum may have integers of any length."""
    written = orjson.dumps(field_probabilities([FieldProbability("/n", "value", value, 0.5)]))
    assert loads_exact(written) == [{"path": "/n", "kind": "value", "value": value, "probability": 0.5}]
