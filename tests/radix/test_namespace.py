import pytest

from rootgraft.radix.namespace import ENDLESS, Namespace, Origin, Path

BASE = Namespace("r1")
ADAPTER = Namespace("r1", "a")


@pytest.mark.parametrize(
    ("start", "end", "origin"),
    [
        (0, 4, Origin(BASE)),
        (4, 6, Origin(BASE)),
        (4, 8, Origin(ADAPTER, 2, BASE)),
        (4, 7, Origin(ADAPTER, 2, BASE)),
        (8, 12, Origin(ADAPTER)),
    ],
)
def test_the_page_of_the_switch_says_where_it_lies(start, end, origin):
    assert Path(ADAPTER, 6, BASE).origin(start, end) == origin


def test_a_page_that_begins_with_the_switch_is_the_adapters_alone():
    assert Path(ADAPTER, 4, BASE).origin(4, 8) == Origin(ADAPTER)


def test_zones():
    assert Path(ADAPTER).zone(0) == (ADAPTER, ENDLESS)
    assert Path(ADAPTER, 6, BASE).zone(5) == (BASE, 6)
    assert Path(ADAPTER, 6, BASE).zone(6) == (ADAPTER, ENDLESS)


@pytest.mark.parametrize(
    ("namespace", "switch_at", "before"), [(ADAPTER, 3, None), (ADAPTER, 0, BASE), (ADAPTER, -1, BASE), (BASE, 3, BASE)]
)
def test_a_switch_that_is_none_is_refused(namespace, switch_at, before):
    with pytest.raises(ValueError, match=f"switch at {switch_at}"):
        Path(namespace, switch_at, before)


def test_equal_fields_in_other_places_are_other_namespaces():
    namespaces = {Namespace("a"), Namespace("", "a"), Namespace("", None, "a"), Namespace("", "", "a"), Namespace("")}
    assert len(namespaces) == 5
