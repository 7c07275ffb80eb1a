"""Metric tables: names, types, buckets and prefixes of all metrics, and which of them vLLM has too.

Metrics that vLLM has too have the names, labels and buckets of its version 0.33.0, which are recorded in
``tests/api/observe/vllm_metrics.json``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .types import SequenceStats, Usage

OWN_PREFIX = "rootgraft:"
VLLM_PREFIX = "vllm:"

SECONDS_TO_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
SECONDS_BETWEEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
FAST_SECONDS_BETWEEN = (0.001, 0.0025, 0.005, *SECONDS_BETWEEN)
SECONDS_IN_ALL = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FAST_SECONDS_IN_ALL = (0.001, 0.003, 0.01, 0.03, 0.1, *SECONDS_IN_ALL)
SECONDS_OF_MASKS = (
    *(0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 20.0),
)
TOKENS_OF_STEPS = tuple(float(1 << power) for power in (0, *range(3, 15)))
POWERS_OF_TWO = tuple(float(1 << power) for power in range(18))
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
TOKENS_A_SECOND = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, ... up to the model's length, as vLLM does."""
    series = (mantissa * 10**power for power in range(len(str(max_model_len))) for mantissa in (1, 2, 5))
    return tuple(float(value) for value in series if value <= max_model_len)


# Name in the heartbeat, name outside, help.
Rows = Sequence[tuple[str, str, str]]
GAUGES: Rows = (
    ("engine_healthy", "engine_healthy", "1 while the engine process runs and does not hang, otherwise 0."),
    ("engine_silent_seconds", "engine_silent_seconds", "Seconds since the last heartbeat of the engine process."),
    ("running", "num_requests_running", "Running sequences."),
    ("waiting", "num_requests_waiting", "Sequences waiting for admission."),
    ("pages", "kv_cache_pages", "Pages of the KV pool."),
    ("pages_cached", "prefix_cache_pages", "Pages of the KV pool that the prefix cache holds."),
    ("pages_pinned", "prefix_cache_pinned_pages", "Pages of the prefix cache that `cache_control` pins."),
    ("pages_of_sessions", "prefix_cache_session_pages", "Pages of the prefix cache that sessions hold."),
    ("pins", "prefix_cache_pins", "Pinned prompts."),
    ("sessions", "prefix_cache_sessions", "Sessions (`prompt_cache_key`) that have not expired."),
    ("grammar_pending", "grammar_compiles_pending", "Grammars that wait to be compiled or are being compiled."),
    ("grammar_cached_bytes", "grammar_cache_bytes", "Approximate memory of compiled grammars, in bytes."),
    ("adapters", "adapters_loaded", "Adapters that requests can name."),
    ("adapters_resident", "adapters_resident", "Adapters in a slot on the device."),
    ("adapters_host_bytes", "adapters_host_bytes", "Host memory of adapters, in bytes."),
    ("responses_stored", "responses_stored", "Stored responses that clients may continue."),
    ("responses_stored_bytes", "responses_stored_bytes", "Approximate memory of stored responses, in bytes."),
    (
        "response_event_bytes",
        "response_event_bytes",
        "Memory of the events that resume streams of responses, in bytes.",
    ),
    ("files_stored_bytes", "files_stored_bytes", "Size of clients' files in the folder of batches, in bytes."),
    ("batches_unfinished", "batches_unfinished", "Batches that have not ended."),
    ("ledger_waiting", "usage_ledger_waiting", "Requests waiting to be written to the usage ledger."),
)
COUNTERS: Rows = (
    ("prompt_tokens", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prompt_tokens_cached", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("preemptions", "num_preemptions", "Sequences sent back to the queue for lack of pages."),
    ("prompt_tokens", "prompt_tokens", "Tokens of admitted prompts."),
    ("prompt_tokens_cached", "prompt_tokens_cached", "Tokens of admitted prompts whose KV was cached."),
    (
        "prompt_tokens_forked",
        "prompt_tokens_forked",
        "Cached tokens of admitted prompts that another running sequence also used.",
    ),
    ("computed_tokens", "computed_tokens", "Tokens computed by the model."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("steps", "steps", "Forward passes."),
    ("rows", "rows", "Sequences in all forward passes; divided by the steps, the mean batch size."),
    ("drafts", "spec_decode_num_drafts", "Number of times that a sequence had drafts in a step."),
    ("draft_tokens", "spec_decode_num_draft_tokens", "Tokens drafted."),
    ("draft_tokens_accepted", "spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    ("forced_tokens", "forced_tokens", "Tokens that a grammar determined, without a choice."),
    ("grammar_hits", "grammar_cache_hits", "Grammars that were already compiled or being compiled."),
    ("grammar_compiled", "grammar_compiles", "Grammars compiled."),
    ("grammar_refused", "grammar_refusals", "Grammars that the compiler refused, including stopped compiles."),
    ("grammar_stopped", "grammar_compiles_stopped", "Compiles stopped at their limit of time or memory."),
    ("ledger_lost", "usage_ledger_lost", "Requests that could not be written to the usage ledger."),
    ("adapters_evicted", "adapters_evicted", "Adapters evicted from host memory for others."),
)
# Name in the heartbeat before the tier's, name outside, help; each by the tiers that an engine has.
KV_TIERS = ("host", "disk", "peer")
KV_TIER_GAUGES: Rows = (
    ("kv_bytes", "kv_tier_bytes", "Bytes of KV in a tier other than the pool, by `tier`."),
    ("kv_capacity_bytes", "kv_tier_capacity_bytes", "Maximum bytes of KV in a tier."),
    ("kv_pages", "kv_tier_pages", "Pages of KV in a tier."),
    ("kv_held", "kv_tier_held", "Pages of the pool that will be written to a tier when the engine pauses next."),
)
KV_TIER_COUNTERS: Rows = (
    ("kv_hits", "kv_tier_hits", "Pages read from a tier."),
    ("kv_misses", "kv_tier_misses", "Pages that were needed but gone or unreadable."),
    ("kv_stored", "kv_tier_stored", "Pages written to a tier."),
    ("kv_evicted", "kv_tier_evicted", "Pages evicted from a tier to make room."),
    ("kv_rejected", "kv_tier_rejected", "Files that were damaged or did not match their name."),
    ("kv_errors", "kv_tier_errors", "Reads and writes that failed with an I/O error."),
    ("kv_unwritten", "kv_tier_unwritten", "Pages evicted from the pool before they were written to a tier."),
    ("kv_ghost_hits", "kv_tier_ghost_hits", "Pages computed again after they were evicted from the pool unwritten."),
)
# Observed in the engine, which sends the values with each heartbeat.
ENGINE_HISTOGRAMS = (
    ("iteration_tokens_total", "Tokens computed in one step.", TOKENS_OF_STEPS),
    ("grammar_mask_seconds", "Seconds to fill the masks of one step.", SECONDS_OF_MASKS),
    ("grammar_compile_seconds", "Seconds to compile one grammar.", SECONDS_OF_MASKS),
)
# Observed once for each sequence; a range of tokens is `token_buckets`.
SEQUENCE_HISTOGRAMS = (
    ("e2e_request_latency_seconds", "Seconds from the request to the end of a sequence.", SECONDS_IN_ALL),
    ("request_queue_time_seconds", "Seconds from arrival to the first step.", SECONDS_IN_ALL),
    ("request_prefill_time_seconds", "Seconds from the first step to the first token.", SECONDS_IN_ALL),
    ("request_decode_time_seconds", "Seconds from the first token to the end.", SECONDS_IN_ALL),
    ("request_inference_time_seconds", "Seconds from the first step to the end.", SECONDS_IN_ALL),
    ("request_time_per_output_token_seconds", "Mean seconds per token after the first.", SECONDS_BETWEEN),
    ("request_num_preemptions", "Number of times that a sequence was preempted.", PREEMPTIONS),
    ("request_prompt_tokens", "Tokens of a request's prompt.", None),
    ("request_generation_tokens", "Tokens of an answer.", None),
    ("request_max_num_generation_tokens", "Tokens of the longest answer to a prompt.", None),
    ("request_params_max_tokens", "Requested limit of tokens.", None),
    ("request_prefill_kv_computed_tokens", "Tokens of a prompt that were not cached.", None),
    ("request_params_n", "Requested number of answers.", COUNTS),
    ("request_batch_size", "Mean number of sequences in the steps of a sequence.", POWERS_OF_TWO),
    ("request_kv_pages", "Pages of KV that a sequence used at its end, including shared pages.", POWERS_OF_TWO),
    ("request_tokens_per_second", "Tokens per second after the first token of a sequence.", TOKENS_A_SECOND),
)
# vLLM's counters of what is not here, served under its prefix alone.
ZERO_COUNTERS = (
    ("external_prefix_cache_queries", "Always 0: there is no cache outside of this process."),
    ("external_prefix_cache_hits", "Always 0: there is no cache outside of this process."),
    ("mm_cache_queries", "Always 0: only text is supported."),
    ("mm_cache_hits", "Always 0: only text is supported."),
)
SLEEP_STATES = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
VLLM_REJECTIONS = {"max_queued_requests": "max_num_queued_reqs", "max_queued_tokens": "max_num_queued_tokens"}
"""vLLM's reasons of ``admission_rejections`` for ours of the same meaning."""

_VLLM_NAMES = frozenset(
    (
        *(name for name, _ in ZERO_COUNTERS),
        "engine_sleep_state",
        *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "prompt_tokens_cached"),
        *("prompt_tokens_by_source", "prompt_tokens_cached_by_source", "generation_tokens", "request_success"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *("spec_decode_num_accepted_tokens_per_pos", "lora_requests_info", "cache_config_info"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "iteration_tokens_total"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_inference_time_seconds", "request_time_per_output_token_seconds"),
        *("request_num_preemptions", "request_prompt_tokens", "request_generation_tokens", "request_params_n"),
        *("request_max_num_generation_tokens", "request_params_max_tokens", "request_prefill_kv_computed_tokens"),
    )
)


MODEL_INFOS = ("lora_requests_info", "cache_config_info")
"""Metrics of a model whose labels are vLLM's, which has no ``model_name`` there."""


def full_name(name: str, prefix: str) -> str:
    """Return a metric's name with its prefix: ``prefix`` for those that vLLM has too, else ours."""
    return (prefix if name in _VLLM_NAMES else OWN_PREFIX) + name


def kv_usage(stats: Mapping[str, float]) -> float:
    """Return the share of the KV pool that running sequences hold, 0 to 1, from the engine's statistics."""
    return 1 - stats.get("pages_available", 0.0) / max(1.0, stats["pages"]) if "pages" in stats else 0.0


def accepted_by_position(stats: Mapping[str, float], max_drafts: int) -> list[int]:
    """Return how many drafts stood at each position of a draft, from the engine's statistics."""
    runs = [int(stats.get(f"accepted_runs_{length}", 0.0)) for length in range(max_drafts + 1)]
    return [sum(runs[position + 1 :]) for position in range(max_drafts)]


def sequence_values(seconds: float, usage: Usage, stats: SequenceStats | None) -> dict[str, float]:
    """Return the values for ``SEQUENCE_HISTOGRAMS`` of a sequence that has ended by itself, by the histograms' names.

    Args:
        seconds: seconds from the request to its end.
        stats: the engine's measurements; None without measurements.
    """
    values: dict[str, float] = {"e2e_request_latency_seconds": seconds, "request_generation_tokens": usage.completion}
    if stats is None:
        return values
    later = usage.completion - 1
    values |= {
        "request_queue_time_seconds": stats.queued,
        "request_prefill_time_seconds": stats.prefill,
        "request_decode_time_seconds": stats.decode,
        "request_inference_time_seconds": stats.prefill + stats.decode,
        "request_time_per_output_token_seconds": stats.decode / later if later > 0 else 0.0,
        "request_num_preemptions": stats.preemptions,
        "request_prefill_kv_computed_tokens": usage.prompt - usage.cached,
        "request_batch_size": stats.batch_size,
        "request_kv_pages": stats.kv_pages,
    }
    if later > 0 and stats.decode > 0:
        values["request_tokens_per_second"] = later / stats.decode
    return values
