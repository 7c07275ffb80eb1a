"""Adapters are PEFT's, or refused by the name of the option: a cell of the matrix may get better, never worse.

``support.models.peft_matrix`` says what the cells mean and how the file is written anew.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.machine.thoroughness import taking_turns
from support.models.lora_models import BASES
from support.models.peft_matrix import EDITS, FILE, OPTIONS, cell

NAMES = (*OPTIONS, *EDITS)
# Cells of each family in an ordinary run; the heavy test computes a third.
SAMPLE = 5


def rank(verdict: str) -> int:
    """How good a cell is: an exact result, a refusal by name, a refusal by nobody's fault but PEFT's, a fault."""
    order = ("exact", "refused: ", "not in peft")
    return next((len(order) - place for place, start in enumerate(order) if verdict.startswith(start)), 0)


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, str]]:
    return json.loads(FILE.read_text())


def assert_not_worse(
    family: str, options: tuple[str, ...], bases: Path, folder: Path, expected: dict[str, str]
) -> None:
    found = {option: cell(family, option, bases, folder / str(place)) for place, option in enumerate(options)}
    worse = {
        option: f"{expected[option]} -> {verdict}"
        for option, verdict in found.items()
        if rank(verdict) < rank(expected[option]) or (verdict.startswith("refused") and verdict != expected[option])
    }
    assert not worse


def test_the_matrix_has_every_family_and_option_and_no_fault(expected: dict[str, dict[str, str]]) -> None:
    assert expected.keys() == BASES.keys()
    # Later families, with every linear module adapted: test_family_passes.py, and test_mixture_adapters.py.
    for row in expected.values():
        assert row.keys() == set(NAMES)
        assert all(rank(verdict) for verdict in row.values())
        assert "refused: None" not in row.values(), "a refusal names its option"
        assert all(row[option].startswith("refused: ") for option in EDITS)


@pytest.mark.sample
@pytest.mark.parametrize("family", BASES)
def test_a_sample(family: str, bases: Path, tmp_path: Path, expected: dict[str, dict[str, str]]) -> None:
    options = tuple(random.Random(family).sample(NAMES, SAMPLE))
    assert_not_worse(family, options, bases, tmp_path, expected[family])


@pytest.mark.heavy
@pytest.mark.parametrize("family", BASES)
def test_the_row_of_a_family(family: str, bases: Path, tmp_path: Path, expected: dict[str, dict[str, str]]) -> None:
    """A third of its cells, in turns: each pass has every option, with a third of the families."""
    options = tuple(taking_turns(NAMES, 3, list(BASES).index(family)))
    assert_not_worse(family, options, bases, tmp_path, expected[family])
