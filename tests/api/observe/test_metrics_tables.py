"""``--metrics-prefix vllm:`` against vLLM 0.33.0's own metrics: names, types, labels, buckets; and bounded labels.

``vllm_metrics.json`` was written by running vLLM's own ``PrometheusStatLogger`` for a model of 2,048 tokens, with
adapters and four drafts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api.api_live import Live, make_state, serve
from support.api.reply_checks import scrape, value
from support.machine.waits import wait_until

from rootgraft.api import config
from rootgraft.api.config import ServerConfig
from rootgraft.api.observe import metrics as metrics_module
from rootgraft.api.observe.bounded_labels import OTHER, BoundedLabels
from rootgraft.api.observe.token_usage import TokenCounts
from rootgraft.engine.errors import EngineDead
from rootgraft.engine.messages import Heartbeat
from rootgraft.engine.metric_tables import OWN_PREFIX, VLLM_PREFIX, token_buckets
from rootgraft.engine.types import AdapterInfo, FinishReason

VLLM: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "vllm_metrics.json").read_text())["metrics"]
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def like_vllm() -> Iterator[Live]:
    yield from serve(make_state(ServerConfig(metrics_prefix="vllm:")))


@pytest.fixture
def quiet(like_vllm: Live) -> Live:
    like_vllm.reset()
    return like_vllm


def shapes(families: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Type, labels and buckets of vLLM's metrics as they are served."""
    found = {}
    for family in families.values():
        if not family.name.startswith(VLLM_PREFIX):
            continue
        labels = set().union(*(set(sample.labels) for sample in family.samples))
        shape: dict[str, Any] = {"type": family.type, "labels": sorted(labels - {"le"})}
        if family.type == "histogram":
            shape["buckets"] = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
        name = family.name.removeprefix(VLLM_PREFIX) + ("_total" if family.type == "counter" else "")
        found[name] = shape
    return found


def test_names_types_labels_and_buckets_are_those_of_vllm(quiet: Live) -> None:
    expected = {name: {key: shape[key] for key in shape if key != "values"} for name, shape in VLLM.items()}
    assert shapes(scrape(quiet)) == expected


def test_label_values_that_dashboards_group_by_are_there(quiet: Live) -> None:
    families = scrape(quiet)
    for name, shape in VLLM.items():
        [label] = [each for each in shape["labels"] if each not in ("model_name", "engine")][:1] or [None]
        if label is None or "values" not in shape:
            continue
        samples = families[VLLM_PREFIX + name.removesuffix("_total")].samples
        missing = set(shape["values"]) - {sample.labels[label] for sample in samples}
        # Of the ends of a sequence one cannot come: a stop for repetition.
        assert missing == ({"repetition"} if name == "request_success_total" else set()), name


def test_our_own_metrics_keep_our_prefix(quiet: Live, live: Live) -> None:
    ours = {name for name in scrape(quiet) if name.startswith(OWN_PREFIX)}
    default = set(scrape(live))
    assert ours and ours <= default
    assert not any(name.startswith(VLLM_PREFIX) for name in default)
    assert {name.removeprefix(OWN_PREFIX) for name in default - ours} >= {"prompt_tokens", "num_requests_running"}


def test_values_of_the_engine(quiet: Live) -> None:
    quiet.client.stats = {"waiting": 5.0, "waiting_deferred": 2.0, "prompt_tokens": 40.0, "prompt_tokens_cached": 10.0}
    quiet.client.stats |= {"accepted_runs_0": 4.0, "accepted_runs_1": 2.0, "accepted_runs_3": 1.0}
    quiet.state.observers.metrics.on_heartbeat(Heartbeat({}, {}, (("sql", "team/x"), ("zeta",))))
    found = [sample for family in scrape(quiet).values() for sample in family.samples]
    of_label = ("reason", "source", "position")
    samples = {
        (sample.name, next((sample.labels[each] for each in of_label if each in sample.labels), None)): sample
        for sample in found
    }
    for name, label, expected in (
        ("num_requests_waiting", None, 5), ("num_requests_waiting_by_reason", "capacity", 3),
        ("num_requests_waiting_by_reason", "deferred", 2), ("prompt_tokens_by_source_total", "local_compute", 30),
        ("prompt_tokens_by_source_total", "local_cache_hit", 10),
        ("prompt_tokens_cached_by_source_total", "device", 10), ("prompt_tokens_cached_by_source_total", "disk", 0),
        ("spec_decode_num_accepted_tokens_per_pos_total", "0", 3),
        ("spec_decode_num_accepted_tokens_per_pos_total", "1", 1),
        ("spec_decode_num_accepted_tokens_per_pos_total", "2", 1),
        ("spec_decode_num_accepted_tokens_per_pos_total", "3", 0),
    ):  # fmt: skip
        assert samples[VLLM_PREFIX + name, label].value == expected, (name, label)
    lora = samples[VLLM_PREFIX + "lora_requests_info", None]
    assert lora.labels == {"max_lora": "8", "running_lora_adapters": "sql,team/x", "waiting_lora_adapters": "zeta"}
    assert lora.value > 1e9, "the time, by which a router finds the newest"
    cache = samples[VLLM_PREFIX + "cache_config_info", None]
    assert (cache.labels["num_gpu_blocks"], cache.labels["block_size"], cache.value) == ("100", "16", 1)


def test_refusals_are_counted_in_both_words(quiet: Live) -> None:
    for reason in ("max_queued_requests", "max_queued_tokens", "tenant_share"):
        quiet.state.observers.metrics.count_rejection(reason)
    families = scrape(quiet)
    told = {sample.labels["reason"]: sample.value for sample in families["vllm:admission_rejections"].samples}
    assert told == {"max_num_queued_reqs": 1, "max_num_queued_tokens": 1}
    assert value(families, "admission_rejections", "_total", reason="tenant_share") == 1


def test_what_the_engine_measures_of_a_request(live: Live) -> None:
    before = scrape(live)
    with live.http() as http:
        http.post(COMPLETIONS, json={"prompt": "ab", "n": 2})
    wait_until(lambda: value(scrape(live), "request_max_num_generation_tokens", "_count") > 0)
    after = scrape(live)

    def grown(family: str, sample: str) -> float:
        return value(after, family, sample) - value(before, family, sample)

    expected = {"queue_time_seconds": 0.25, "prefill_time_seconds": 0.5, "decode_time_seconds": 2.0}
    expected |= {"inference_time_seconds": 2.5, "num_preemptions": 1, "batch_size": 3.5}
    for name, each in expected.items():
        assert (grown(f"request_{name}", "_count"), grown(f"request_{name}", "_sum")) == (2, 2 * each), name
    assert grown("request_kv_pages", "_sum") == 7 + 8
    assert grown("request_time_per_output_token_seconds", "_sum") == pytest.approx(2 * 2.0 / 7)
    assert grown("request_tokens_per_second", "_sum") == pytest.approx(2 * 7 / 2.0)
    assert (grown("request_max_num_generation_tokens", "_count"), grown("request_generation_tokens", "_count")) == (
        1,
        2,
    )
    assert grown("request_prefill_kv_computed_tokens", "_sum") == (3 - 1) + (3 - 2)


def test_errors_are_counted_by_their_code(live: Live) -> None:
    with live.http() as http:
        http.post(COMPLETIONS, json={"prompt": "ab", "model": "../../etc"})
        http.post(COMPLETIONS, json={"prompt": "ab", "n": 0})
        http.get("/v1/nothing")
        live.async_engine.fail_after = (1, EngineDead("gone"))
        http.post(COMPLETIONS, json={"prompt": "ab", "stream": True})
    wait_until(lambda: "engine_dead" in errors(live))
    assert errors(live) >= {"model_not_found", "invalid_value", "unknown_url", "engine_dead"}
    families = scrape(live)
    assert value_of_http(families, "/v1/completions", "POST", "4xx") >= 2
    assert value_of_http(families, "none", "GET", "4xx") >= 1


def errors(live: Live) -> set[str]:
    return {sample.labels["error"] for sample in scrape(live)["rootgraft:request_errors"].samples}


def value_of_http(families: dict[str, Any], handler: str, method: str, status: str) -> float:
    labels = {"handler": handler, "method": method, "status": status}
    [sample] = [each for each in families["http_requests"].samples if each.labels == labels]
    return float(sample.value)


def test_hostile_names_make_no_series(live: Live) -> None:
    """Of what a client writes nothing becomes a label: no model, route, method, header or adapter."""
    before = {(sample.name, *sorted(sample.labels.items())) for f in scrape(live).values() for sample in f.samples}
    hostile = ['a"} 1\nx{y="', "x" * 5000, "\x00", "ß{}", "vllm:boom"]
    with live.http() as http:
        for number, name in enumerate(hostile * 10):
            http.post(COMPLETIONS, json={"prompt": "ab", "model": f"{name}{number}"})
            http.request(f"METHOD{number}", f"/v1/{number}")
            http.post(COMPLETIONS, json={"prompt": "ab", "user": name, f"field{number}": 1})
        after = {(sample.name, *sorted(sample.labels.items())) for f in scrape(live).values() for sample in f.samples}
    assert len(after - before) <= 8, "codes of errors, and routes with their methods"
    assert not any("boom" in str(series) or "METHOD" in str(series) for series in after)


def test_hundreds_of_adapters_have_a_bounded_number_of_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MOST_ADAPTERS", 5)
    metrics = make_state().observers.metrics
    loaded = {f"a{number}": None for number in range(300)}
    for name in loaded:
        metrics.count_usage("", name, TokenCounts(1, 0, 2), loaded)
    metrics.count_usage("", "never loaded", TokenCounts(1, 0, 2), loaded)

    def series() -> dict[str, float]:
        text = metrics.exposition("")[0].decode()
        rows = [line for line in text.splitlines() if line.startswith("rootgraft:adapter_requests_total{")]
        return {line.split('adapter="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in rows}

    assert series() == {"": 0, **{f"a{number}": 1 for number in range(5)}, OTHER: 296}
    del loaded["a1"]
    metrics.count_usage("", "a299", TokenCounts(1, 0, 2), loaded)
    assert series().keys() == {"", "a0", "a2", "a3", "a4", "a299", OTHER}, "an unloaded adapter makes room"


def test_a_bounded_label_keeps_what_it_has() -> None:
    labels = BoundedLabels(2)
    assert [labels.label(word) for word in ("a", "b", "c", "a", "b")] == ["a", "b", OTHER, "a", "b"]


def test_the_options_prefixes_are_those_of_the_tables() -> None:
    assert config.METRICS_PREFIXES == (OWN_PREFIX, VLLM_PREFIX)
    with pytest.raises(config.ConfigError, match=r"--metrics-prefix must be one of rootgraft:, vllm:, not x:"):
        ServerConfig(metrics_prefix="x:")


@pytest.mark.parametrize(
    ("length", "last"), [(1, 1), (2, 2), (4, 2), (5, 5), (99, 50), (100, 100), (2048, 2000), (1 << 17, 100_000)]
)
def test_token_buckets_end_at_the_models_length(length: int, last: int) -> None:
    buckets = token_buckets(length)
    assert buckets[-1] == last and buckets == tuple(sorted(set(buckets)))


def test_an_adapters_requests_are_counted_by_its_name(live: Live) -> None:
    # A name of its own: other files' requests are counted by the same server.
    live.client.adapters["counted"] = AdapterInfo("counted", "counted", "ready", "host")
    with live.http() as http:
        answer = http.post(COMPLETIONS, json={"prompt": "ab", "model": "counted"}).json()
    assert answer["choices"][0]["finish_reason"] == FinishReason.STOP
    wait_until(lambda: "counted" in str(scrape(live)["rootgraft:adapter_requests"].samples))
    families = scrape(live)
    assert value(families, "adapter_generation_tokens", "_total", adapter="counted") == 8
    assert value(families, "adapter_prompt_tokens", "_total", adapter="counted") == 3
