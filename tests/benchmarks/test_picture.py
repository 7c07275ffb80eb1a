"""Loads and the picture of ``benchmarks``: what is drawn is what was measured, and no load depends on a server."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.condense import MEDIAN
from benchmarks.picture import draw, read
from benchmarks.serve.workloads import NAMES, workload


@pytest.mark.parametrize("name", NAMES)
def test_a_load_is_the_same_each_time_and_another_for_each_repeat(name: str) -> None:
    assert workload(name, 0, 0, adapters=3) == workload(name, 0, 0, adapters=3)
    ours, other = workload(name, 0, 0, adapters=3), workload(name, 1, 0, adapters=3)
    assert {talk.turns[0] for talk in ours.conversations}.isdisjoint(talk.turns[0] for talk in other.conversations)


def test_adapters_are_spread_evenly() -> None:
    asked = [talk.adapter for talk in workload("W6", 0, 0, adapters=3).conversations]
    assert {number: asked.count(number) for number in (None, 0, 1, 2)} == {None: 8, 0: 8, 1: 8, 2: 8}


def test_the_picture_shows_medians() -> None:
    def kept(*rows: tuple[str, object, float]) -> dict[str, object]:
        entry = {"rows": [["W2", server, repeat, speed] for server, repeat, speed in rows]}
        return {"columns": ["workload", "server", "repeat", "output_tokens_per_s"], "comparisons": {"bf16": entry}}

    first = kept(("ours", MEDIAN, 90), ("a <peer>", MEDIAN, 45), ("ours", 0, 5), ("ours", 1, 100))
    speeds = read([first, kept(("ours", MEDIAN, 1))])
    assert speeds == {"W2": {"ours": 90, "a <peer>": 45}} and not read([first], ["int8"])
    image = ElementTree.fromstring(draw(speeds))
    bars = [rect.get("width") for rect in image.iter("{http://www.w3.org/2000/svg}rect") if rect.get("height") == "14"]
    assert float(bars[0]) == 2 * float(bars[1])
    assert "a <peer>" in [text.text for text in image.iter("{http://www.w3.org/2000/svg}text")]
