"""``LLM.get_metrics`` against the metrics of vLLM's own logger, and against what the answers say."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.machine.import_graph import ROOT

from rootgraft import LLM, SamplingParams
from rootgraft.engine.metric_tables import VLLM_PREFIX
from rootgraft.engine.offline.offline_metrics import Counter, Gauge, Histogram, Metric, OfflineMetrics, Vector

VLLM: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests" / "api" / "observe" / "vllm_metrics.json").read_text("utf-8")
)["metrics"]
TYPES = {Gauge: "gauge", Counter: "counter", Vector: "counter", Histogram: "histogram"}


def by_name(metrics: Iterable[Metric]) -> dict[str, Any]:
    return {each.name.removeprefix(VLLM_PREFIX) + each.labels.get("finished_reason", ""): each for each in metrics}


def test_names_types_labels_and_buckets_are_those_of_vllm() -> None:
    found = OfflineMetrics("m", 2048, 4).snapshot({"pages": 8.0, "pages_available": 6.0, "accepted_runs_2": 3.0})
    for metric in found:
        name = metric.name.removeprefix(VLLM_PREFIX)
        assert metric.name == VLLM_PREFIX + name
        expected = VLLM[name + ("_total" if isinstance(metric, (Counter, Vector)) else "")]
        assert TYPES[type(metric)] == expected["type"], name
        assert set(expected["labels"]) - {"position"} == set(metric.labels), name
        if isinstance(metric, Histogram):
            assert list(metric.buckets) == expected["buckets"], name
    values = by_name(found)
    assert values["kv_cache_usage_perc"].value == 0.25
    assert values["spec_decode_num_accepted_tokens_per_pos"].values == [3, 3, 0, 0]


def test_metrics_count_what_the_answers_say(llm: LLM) -> None:
    before = by_name(llm.get_metrics())
    params = SamplingParams(n=2, max_tokens=6, temperature=1.0, seed=1, ignore_eos=True)
    outputs = llm.generate(["the quick", "in the hills of"], params, use_tqdm=False)
    after = by_name(llm.get_metrics())

    def grown(name: str) -> int:
        return after[name].value - before[name].value

    def observed(name: str) -> tuple[int, float]:
        return after[name].count - before[name].count, after[name].sum - before[name].sum

    usage = [each for output in outputs for each in output.usage]
    assert grown("generation_tokens") == sum(each.completion for each in usage) == 24
    assert grown("prompt_tokens") == sum(each.prompt for each in usage)
    assert grown("prefix_cache_hits") == sum(each.cached for each in usage)
    assert grown("request_successlength") == 4 and grown("request_successstop") == 0
    assert observed("request_generation_tokens") == (4, 24)
    assert observed("request_max_num_generation_tokens") == (2, 12)
    assert observed("request_params_n") == (2, 4) and observed("request_params_max_tokens") == (2, 12)
    assert observed("request_prompt_tokens") == (2, sum(len(each.prompt_token_ids) for each in outputs))
    assert observed("time_to_first_token_seconds")[0] == 4
    assert observed("iteration_tokens_total")[1] >= 20
    assert observed("e2e_request_latency_seconds")[1] >= observed("request_inference_time_seconds")[1] > 0
    buckets = after["request_generation_tokens"].buckets
    assert buckets["+Inf"] == after["request_generation_tokens"].count and after["num_requests_running"].value == 0
    assert Path(after["generation_tokens"].labels["model_name"]).is_dir()
