"""The Grafana board and the alert rules against a live /metrics: each expression is well formed, and asks for what
there is. Where ``promtool`` is installed it checks the rules too, and that they fire when they should.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.api.api_live import Live
from support.api.reply_checks import scrape

GRAFANA = Path(__file__).parents[3] / "deploy" / "grafana"
BOARD: dict[str, Any] = json.loads((GRAFANA / "rootgraft.json").read_text("utf-8"))
ALERTS = GRAFANA / "alerts.yml"
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]
PROMTOOL = shutil.which("promtool")
FROM_PROMETHEUS = {"job", "instance"}  # labels that the scrape adds
NAME = r"[a-zA-Z_:][\w:]*"
SELECTOR = re.compile(rf"({NAME})\{{([^}}]*)\}}")
WORDS = {"sum", "max", "min", "by", "rate", "increase", "histogram_quantile"}


def expressions() -> Iterator[tuple[str, str, str]]:
    """Title of the panel, expression, legend."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def rule_expressions() -> Iterator[tuple[str, str, str]]:
    """Name of the rule, expression, and the text that shows labels of it."""
    for rule in RULES:
        annotations = " ".join(rule["annotations"].values())
        yield rule["alert"], rule["expr"], re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"{{\1}}", annotations)


def served(live: Live) -> dict[str, tuple[str, set[str]]]:
    """Sample -> type of its metric, labels."""
    live.state.observers.metrics.count_fallback("failure", "small")  # whose series begin with the first one
    found: dict[str, tuple[str, set[str]]] = {}
    for family in scrape(live).values():
        for sample in family.samples:
            _, labels = found.setdefault(sample.name, (family.type, set()))
            labels |= set(sample.labels)
    return found


def test_every_expression_asks_for_what_there_is(live: Live) -> None:
    there = served(live) | {"up": ("gauge", set())}  # which Prometheus itself adds
    for title, expression, legend in (*expressions(), *rule_expressions()):
        assert expression.count("(") == expression.count(")"), title
        selectors = SELECTOR.findall(expression)
        assert selectors, title
        grouped = {name.strip() for names in re.findall(r"by \(([^)]*)\)", expression) for name in names.split(",")}
        for metric, matchers in selectors:
            assert metric in there, f"{title}: there is no {metric}"
            labels = there[metric][1] | FROM_PROMETHEUS
            assert set(re.findall(rf"({NAME})\s*=~?", matchers)) <= labels, title
            assert grouped <= labels, f"{title}: {metric} has no {grouped}"
        own = set() if re.search("sum|max|min", expression) else labels
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= grouped | FROM_PROMETHEUS | own, title
        rest = re.sub(r"by \([^)]*\)|\[[^\]]*\]", "", SELECTOR.sub("", expression)).replace(" and ", " ")
        assert set(re.findall(NAME, rest)) <= WORDS, f"{title}: {rest}"


def test_counters_are_rated_and_gauges_are_not(live: Live) -> None:
    there = served(live) | {"up": ("gauge", set())}
    for title, expression, _ in (*expressions(), *rule_expressions()):
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
            "rootgraft:responses_stored", "rootgraft:response_event_bytes",
                "rootgraft:request_params_n", "rootgraft:key_prompt_tokens_cached_total",
        "rootgraft:request_inference_time_seconds", "rootgraft:request_time_per_output_token_seconds",
        "rootgraft:request_num_preemptions", "rootgraft:request_prefill_kv_computed_tokens",
        "rootgraft:request_max_num_generation_tokens", "rootgraft:request_batch_size",
        "rootgraft:spec_decode_num_accepted_tokens_per_pos_total", "rootgraft:lora_requests_info",
        "rootgraft:cache_config_info", "rootgraft:adapter_prompt_tokens_total",
        "rootgraft:adapter_prompt_tokens_cached_total", "rootgraft:gpu_temperature_celsius",
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


def test_each_rule_says_how_bad_it_is_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert "$labels.instance" in rule["annotations"]["summary"]


def promtool(*arguments: str | Path) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_takes_the_rules() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "rules", ALERTS)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_rules_fire_when_they_should(tmp_path: Path) -> None:
    def series(name: str, values: str, **labels: str) -> dict[str, str]:
        text = ", ".join(f'{key}="{value}"' for key, value in {"instance": "a", **labels}.items())
        return {"series": f"{name}{{{text}}}", "values": values}

    def fires(alert: str, minute: int, **labels: str) -> dict[str, Any]:
        severity = next(rule["labels"]["severity"] for rule in RULES if rule["alert"] == alert)
        found = [{"exp_labels": {"instance": "a", "severity": severity, **labels}}] if labels != {"none": ""} else []
        return {"alertname": alert, "eval_time": f"{minute}m", "exp_alerts": found}

    silent = {"none": ""}
    tests = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    series("up", "1x4 0x20", job="rootgraft"),
                    series("rootgraft:engine_healthy", "1x4 0x20"),
                    series("rootgraft:request_success_total", "0+60x60", finished_reason="stop"),
                    series("rootgraft:request_success_total", "0+0x20 0+6x40", finished_reason="error"),
                    series("rootgraft:structured_answers_broken_total", "0x9 1x20"),
                    series("rootgraft:usage_ledger_waiting", "0x9 101x20"),
                ],
                "alert_rule_test": [
                    fires("RootgraftUnreachable", 4, **silent),
                    fires("RootgraftUnreachable", 8, job="rootgraft"),
                    fires("RootgraftEngineDown", 8, **silent),
                    fires("RootgraftEngineDown", 12),
                    fires("RootgraftErrors", 19, **silent),
                    fires("RootgraftErrors", 40),
                    fires("RootgraftStructuredAnswerBroken", 8, **silent),
                    fires("RootgraftStructuredAnswerBroken", 12),
                    fires("RootgraftUsageWaits", 15),
                ],
            }
        ],
    }
    for rule in tests["tests"][0]["alert_rule_test"]:  # type: ignore[index]
        for alert in rule["exp_alerts"]:
            alert["exp_annotations"] = shown(rule["alertname"], rule["eval_time"])
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump(tests))
    assert "SUCCESS" in promtool("test", "rules", path)


def shown(alert: str, minute: str) -> dict[str, str]:
    """The annotations of a rule for the instance ``a``; of the errors 6 in 66."""
    [annotations] = [rule["annotations"] for rule in RULES if rule["alert"] == alert]
    values = {"{{ $labels.instance }}": "a", "{{ $value | humanizePercentage }}": "9.091%"}
    texts = dict(annotations)
    for pattern, text in values.items():
        texts = {key: each.replace(pattern, text) for key, each in texts.items()}
    return texts
