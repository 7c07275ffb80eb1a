"""The Grafana board against a live /metrics: each expression is well formed, and asks for what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.api.api_live import Live
from support.api.reply_checks import scrape

BOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "deploy" / "grafana" / "rootgraft.json").read_text("utf-8")
)
FROM_PROMETHEUS = {"job", "instance"}  # labels that the scrape adds
NAME = r"[a-zA-Z_:][\w:]*"
SELECTOR = re.compile(rf"({NAME})\{{([^}}]*)\}}")
WORDS = {"sum", "max", "min", "by", "rate", "increase", "histogram_quantile"}


def expressions() -> Iterator[tuple[str, str, str]]:
    """Title of the panel, expression, legend."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def served(live: Live) -> dict[str, tuple[str, set[str]]]:
    """Sample -> type of its metric, labels."""
    found: dict[str, tuple[str, set[str]]] = {}
    for family in scrape(live).values():
        for sample in family.samples:
            _, labels = found.setdefault(sample.name, (family.type, set()))
            labels |= set(sample.labels)
    return found


def test_every_expression_asks_for_what_there_is(live: Live) -> None:
    there = served(live)
    for title, expression, legend in expressions():
        assert expression.count("(") == expression.count(")"), title
        selectors = SELECTOR.findall(expression)
        assert selectors, title
        grouped = {name.strip() for names in re.findall(r"by \(([^)]*)\)", expression) for name in names.split(",")}
        for metric, matchers in selectors:
            assert metric in there, f"{title}: there is no {metric}"
            labels = there[metric][1] | FROM_PROMETHEUS
            assert set(re.findall(rf"({NAME})\s*=~?", matchers)) <= labels, title
            assert grouped <= labels, f"{title}: {metric} has no {grouped}"
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= grouped | FROM_PROMETHEUS, title
        rest = re.sub(r"by \([^)]*\)|\[[^\]]*\]", "", SELECTOR.sub("", expression))
        assert set(re.findall(NAME, rest)) <= WORDS, f"{title}: {rest}"


def test_counters_are_rated_and_gauges_are_not(live: Live) -> None:
    there = served(live)
    for title, expression, _ in expressions():
        rated = {name for name, _ in re.findall(rf"(?:rate|increase)\(({NAME})\{{([^}}]*)\}}\[", expression)}
        for metric, _ in SELECTOR.findall(expression):
            is_gauge = there[metric][0] == "gauge"
            assert is_gauge != (metric in rated), f"{title}: {metric}"
            assert metric.endswith("_bucket") == ("histogram_quantile" in expression), title


def test_variables_are_those_that_are_used() -> None:
    names = {variable["name"] for variable in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(BOARD["panels"]))) - {"__rate_interval"}
    assert used == names


def test_every_metric_of_our_own_is_on_the_board(live: Live) -> None:
    """But for what a panel has no use for."""
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", metric)
        for _, text, _ in expressions()
        for metric, _ in SELECTOR.findall(text)
    }
    families = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in scrape(live).values()
        if family.name.startswith("rootgraft:")
    }
    left_out = {
        "rootgraft:computed_tokens_total", "rootgraft:spec_decode_num_drafts_total", "rootgraft:forced_tokens_total",
        "rootgraft:files_stored_bytes", "rootgraft:batches_unfinished",
            "rootgraft:prefix_cache_pins", "rootgraft:prefix_cache_sessions", "rootgraft:prompt_tokens_forked_total",
            "rootgraft:responses_stored", "rootgraft:request_params_n", "rootgraft:key_prompt_tokens_cached_total",
    }  # fmt: skip
    assert families - shown == left_out


def test_panels_have_a_place_of_their_own() -> None:
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in BOARD["panels"]]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(places)
    for number, (x, y, w, h) in enumerate(places):
        assert x + w <= 24
        for other_x, other_y, other_w, other_h in places[:number]:
            apart = x >= other_x + other_w or other_x >= x + w or y >= other_y + other_h or other_y >= y + h
            assert apart, BOARD["panels"][number]["title"]
