"""Names of combinations of adapters: as requests write them, and as the engine knows them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.errors import RequestError
from rootgraft.engine.weighted_adapters import (
    MAX_PARTS,
    MAX_WEIGHT,
    WeightedPart,
    check_parts,
    combination_name,
    names_in,
    parts_of,
    read_combination,
    renamed,
    requested_name,
)

NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:@+/-]{0,8}", fullmatch=True)
PLAIN_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_./-]{0,8}", fullmatch=True)
WEIGHTS = st.floats(-MAX_WEIGHT, MAX_WEIGHT)


def parts(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[WeightedPart]]:
    each = st.tuples(names, WEIGHTS).map(lambda pair: WeightedPart(*pair))
    return st.lists(each, min_size=1, max_size=MAX_PARTS, unique_by=lambda part: part.name)


@given(parts(NAMES), st.randoms())
def test_the_engine_s_name_holds_any_names_and_weights_exactly(given_parts: list[WeightedPart], random) -> None:
    name = combination_name(given_parts)
    assert list(parts_of(name)) == sorted(given_parts)
    assert read_combination(name) == parts_of(name)
    shuffled = list(given_parts)
    random.shuffle(shuffled)
    assert combination_name(shuffled) == name
    assert set(names_in(name)) == {part.name for part in given_parts}
    assert parts_of(renamed(name, lambda each: f"{each}@2")) == tuple(
        sorted(part._replace(name=f"{part.name}@2") for part in given_parts)
    )


@given(st.lists(st.tuples(PLAIN_NAMES, st.integers(-9999, 9999)), min_size=1, max_size=MAX_PARTS))
def test_requests_name_parts_with_weights(given_parts: list[tuple[str, int]]) -> None:
    wanted = [WeightedPart(name, number / 100) for name, number in given_parts]
    assert list(read_combination(requested_name(wanted))) == wanted
    assert list(read_combination("+".join(f"{name}:{number / 100}" for name, number in given_parts))) == wanted


@given(NAMES)
def test_no_adapter_s_name_is_one_of_the_engine_s_combinations(name: str) -> None:
    assert parts_of(name) == ()
    assert names_in(name) == (name,)
    assert renamed(name, lambda each: each + "x") == name + "x"


@pytest.mark.parametrize(
    "name", ["", "a", "a:", ":1", "a:b", "a:1+b", "a:1+", "a:1e+2", "a:nan", "a:inf", "a*b:1", "x*a", "1*", "a b:1"]
)
def test_other_names_are_none(name: str) -> None:
    assert read_combination(name) == ()


def test_bounds() -> None:
    check_parts([WeightedPart(f"a{number}", MAX_WEIGHT) for number in range(MAX_PARTS)])
    with pytest.raises(RequestError, match=f"At most {MAX_PARTS}"):
        check_parts([WeightedPart(f"a{number}", 1.0) for number in range(MAX_PARTS + 1)])
    with pytest.raises(RequestError, match="'a' is given twice"):
        check_parts([WeightedPart("a", 1.0), WeightedPart("a", 2.0)])
    for weight in (MAX_WEIGHT + 1, -MAX_WEIGHT - 1, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="weight of the adapter 'a' must be from -100 to 100"):
            check_parts([WeightedPart("a", weight)])
