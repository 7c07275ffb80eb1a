"""Engine facts: facts for metrics, such as lengths, adapter slots and the labels of vLLM's ``cache_config_info``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...engine.config import EngineConfig
    from ...engine.messages import Ready

# Fields of vLLM's CacheConfig (0.33.0) that have no meaning for this engine.
_ABSENT = (
    *("cache_hit_alignment_tokens", "enable_mamba_shared_prefix_checkpoint", "kv_offloading_size"),
    *("kv_cache_dtype_skip_layers", "kv_cache_layout", "kv_cache_memory_bytes", "kv_offloading_backend"),
    *("kv_sharing_fast_prefill", "mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode"),
    *("mamba_page_size_padded", "mamba_ssm_cache_dtype", "num_cpu_blocks", "prefix_cache_retention_interval"),
    *("prefix_caching_hash_algo", "prefix_match_unit", "replayssm_buffer_len", "simple_cpu_offload_num_blocks"),
    *("skip_page_size_padded", "sliding_window", "swa_bounded_replay", "use_kda_recoverssm", "use_replayssm"),
)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that are known once the engine is ready. The defaults are for a server that is still loading.

    Attributes:
        max_model_len: largest number of tokens of prompt and answer together.
        max_loras: number of device slots for adapters; 0 without adapters.
        max_drafts: largest number of draft tokens of a sequence in one step; 0 without speculative decoding.
        cache: labels of ``cache_config_info``.
    """

    max_model_len: int = 1 << 17
    max_loras: int = 0
    max_drafts: int = 0
    cache: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: EngineConfig, ready: Ready) -> EngineFacts:
        """Return the facts about an engine that is ready."""
        speculative = config.speculative
        return cls(
            ready.max_model_len,
            config.max_loras if config.enable_lora else 0,
            0 if speculative.method == "off" else speculative.num_speculative_tokens,
            _cache_labels(config, ready),
        )


def _cache_labels(config: EngineConfig, ready: Ready) -> dict[str, str]:
    """Return vLLM's fields as labels, in the form in which Python prints them; ``None`` for what this engine lacks."""
    num_tokens = ready.num_pages * ready.page_size
    known = {
        "_block_size_resolved": True,
        "block_size": ready.page_size,
        "cache_dtype": config.kv_cache_dtype,
        "effective_attention_block_size": ready.page_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "hash_block_size": ready.page_size,
        "is_attention_free": False,
        "kv_cache_max_concurrency": round(num_tokens / ready.max_model_len, 2),
        "kv_cache_size_tokens": num_tokens,
        "num_gpu_blocks": ready.num_pages,
        "num_gpu_blocks_override": config.num_gpu_blocks_override,
        "user_specified_block_size": config.block_size != type(config)().block_size,
    }
    return {name: str(value) for name, value in sorted((dict.fromkeys(_ABSENT) | known).items())}
