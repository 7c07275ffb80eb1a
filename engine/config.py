"""Engine options: type, default, bounds and help of each. The command line is generated from them.

Names are vLLM's if vLLM has the option. ``low`` and ``high`` are inclusive. ``EngineConfig`` is immutable; derived
values (dtype in use, number of pages) are reported by the engine when it is ready.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ConfigError
from .json_options import QUANTIZATIONS, SpeculativeConfig, TargetItl, TargetTtft, parse_overrides
from .kv_events_config import KvEventsConfig
from .types import MAX_SEED, MIN_SEED

# Limits of a step if no option sets them and no GPU is known (``executor.device_defaults``).
DEFAULT_SEQS = 64
DEFAULT_TOKENS = 640
MOST_GPU_SEQS = 256


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] = (),
    group: str = "engine",
    short: str = "",
    words: bool = False,
) -> Any:
    """Return a dataclass field with the metadata of a command-line option.

    Args:
        short: a flag such as ``-i``.
        words: whether several values may follow the flag.
    """
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "choices": choices,
        "group": group,
        "short": short,
        "words": words,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of the engine and its model. ``__post_init__`` checks bounds and contradictions."""

    model: str | None = option(
        None,
        "Folder in Hugging Face format, GGUF file, name on the Hugging Face Hub or in rootgraft search, or "
        "s3://BUCKET/FOLDER. Default: SmolLM2-135M-Instruct (Q4_1).",
        group="model",
    )
    tokenizer: str | None = option(None, "Folder with tokenizer.json. Default: the model's.", group="model")
    chat_template: str | None = option(None, "File with a Jinja chat template. Default: the model's.", group="model")
    generation_config: str = option(
        "auto",
        "Default sampling parameters of requests. auto: from the model's generation_config.json or GGUF file; vllm: "
        "neutral values.",
        choices=("auto", "vllm"),
        group="model",
    )
    revision: str | None = option(None, "Branch, tag or commit of a model on the Hub.", group="model")
    hf_overrides: str = option(
        "{}",
        "JSON object whose keys override those of the model's config.json, such as '{\"rope_scaling\": "
        '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}\'.',
        group="model",
    )
    dtype: str = option(
        "auto",
        "Data type of weights, hidden states and KV. auto: bfloat16 on GPUs that support it and on CPUs with AVX2 or "
        "newer, else float16 on a GPU and float32 on a CPU.",
        choices=("auto", "float32", "bfloat16", "float16"),
        group="model",
    )
    quantization: str | None = option(
        None,
        "Format of the weights in memory. Default on a GPU: as stored in the checkpoint. Default on a CPU: --dtype; "
        "blocks of GGUF, GPTQ, AWQ or compressed-tensors are also or only kept as stored where that is faster, with "
        "the same answers; CPUs without bfloat16 instructions use gguf_dynamic (llama.cpp's arithmetic) for Q4_0, "
        "Q4_1, Q8_0, Q2_K to Q6_K and IQ4_XS. widened: --dtype. Only on a CPU: gguf: blocks as stored, 15-bit "
        "activations; int8_weight_only: rounded to 8 bits with a scale per output; gguf_dynamic, int8_dynamic: the "
        "same with activations rounded to 8 bits, which is faster but changes answers.",
        choices=QUANTIZATIONS,
        group="model",
    )
    model_impl: str = option(
        "auto",
        "Implementation of the model. rootgraft: our decoder. transformers: modules of the transformers library over "
        "our KV pool; slower, for models that our decoder does not support (pip install 'rootgraft[transformers]'). "
        "auto: our decoder if it supports the model, else transformers.",
        choices=("auto", "rootgraft", "transformers"),
        group="model",
    )
    device: str = option(
        "auto", "Device to run on. auto: cuda if there is a GPU, else cpu.", choices=("auto", "cpu", "cuda")
    )
    tensor_parallel_size: int = option(
        1,
        "Number of devices (on a CPU: processes) that compute one model together, each with a shard of its weights "
        "and KV. Options for memory, threads and adapter slots apply to each. See docs/guide/tensor-parallel.md.",
        low=1,
        high=64,
    )
    pipeline_parallel_size: int = option(
        1,
        "Number of groups of devices (on a CPU: processes) that compute one model together, each some of its layers. "
        "See docs/guide/pipeline-parallel.md.",
        low=1,
        high=64,
    )
    load_format: str = option(
        "auto",
        "Where weights come from. auto: the checkpoint; dummy: random values in the model's shape.",
        choices=("auto", "dummy"),
        group="model",
    )
    max_model_len: int | None = option(
        None,
        "Maximum context length: tokens of prompt and answer together. Default: the model's own limit, if the KV "
        "pool can hold it.",
        low=1,
    )
    seed: int = option(0, "Sampling seed of requests without one.", low=MIN_SEED, high=MAX_SEED)
    block_size: int = option(16, "Number of tokens in a page of KV.", choices=(1, 2, 4, 8, 16, 32, 64, 128))
    kv_cache_dtype: str = option(
        "auto",
        "Data type of KV. auto: --dtype. int8, and on a GPU fp8 (E4M3, same as fp8_e4m3): 8 bits and a scale per "
        "token and head; half the memory, but answers change. On a CPU, int8 also makes attention faster.",
        choices=("auto", "int8", "fp8", "fp8_e4m3"),
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Fraction of the device's memory for the weights and KV of this engine. Other engines on the device have "
        "their own.",
        low=0.05,
        high=1.0,
    )
    kv_cache_memory: float | None = option(
        None,
        "Size of the KV pool in GiB. Default: from --gpu-memory-utilization; on a CPU at most 4.",
        low=0.001,
        high=1 << 20,
    )
    num_gpu_blocks_override: int | None = option(
        None, "Number of pages in the KV pool; overrides the number computed from memory.", low=2, high=(1 << 31) - 1
    )
    max_num_seqs: int | None = option(
        None,
        "Maximum number of sequences in one step. Default: 64; on a GPU by its memory, at most 256.",
        low=1,
        high=4096,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Maximum number of tokens in one step, at least --max-num-seqs. Prompts use up to four fifths of it, more "
        "only to finish a prompt or if one is computed alone, and fewer beside running streams (--target-itl-ms). "
        "Default: 640, on a GPU up to 2048.",
        low=1,
        high=1 << 20,
    )
    target_itl_ms: str = option(
        '{"realtime": 100, "interactive": 100, "batch": 500}',
        "Target inter-token latency in milliseconds. Prompts beside running streams are computed in chunks small "
        "enough to keep it, by measured step times. A lower target delays first tokens. A number, or JSON by "
        "priority of the streams; 0: no target, highest throughput.",
    )
    target_ttft_ms: str = option(
        "0",
        "Target time to first token in milliseconds. It orders the queue within a priority class by deadline; the "
        'header x-slo: strict enforces it. A number, or JSON by priority class such as {"realtime": 500, '
        '"interactive": 2000}; 0: no target.',
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV of equal prompt prefixes.")
    kv_disk: str | None = option(
        None,
        "Folder for the KV of prefixes that do not fit the pool; it survives a restart. Pages are written in the "
        "background and read while their request waits. Each engine process uses its own subfolder.",
    )
    kv_disk_gib: float = option(
        10.0, "Maximum size of the files of one engine process in --kv-disk, in GiB.", low=0.001, high=1 << 20
    )
    kv_disk_key_file: str | None = option(
        None,
        "File with a key of 32 bytes or 64 hexadecimal digits. KV in --kv-disk is encrypted (AES-256-GCM) with a key "
        "per tenant derived from it, and file names do not reveal prompts without it.",
    )
    kv_host_gib: float | None = option(
        None,
        "GiB of host memory for KV that does not fit a GPU's pool. Not for a CPU, whose pool is in host memory: use "
        "--kv-cache-memory.",
        low=0.001,
        high=1 << 20,
    )
    kv_events_config: str | None = option(
        None,
        "Publish KV events over ZMQ, as vLLM does, when pages enter and leave the prefix cache. JSON such as "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}.',
    )
    kv_peer_gib: float | None = option(
        None,
        "Maximum GiB of KV that a replica prefetches from others: it copies a prefix that another replica has cached "
        "instead of computing it again. 0: off. Default: 0.5 with several replicas.",
        low=0,
        high=1 << 20,
    )
    speculative_config: str = option(
        '{"method": "auto"}',
        "Speculative decoding; it changes only speed. JSON: method auto (drafts from grammars, the sequence's own "
        "tokens, the prefix cache and other answers), ngram (its own tokens), mtp (the checkpoint's MTP module) or "
        "off; model, a small model with the same vocabulary or an EAGLE-3 head as a further drafter; quantization of "
        "the drafter; num_speculative_tokens (16).",
    )
    threads: int | None = option(
        None,
        "Number of CPU threads that compute. Default: the processors that this process may use; if these are more "
        "than 8, one per core of one socket, to which the engine is bound.",
        low=1,
    )
    native_kernels: bool = option(
        True, "Compile and use our own kernels (C++ on a CPU, Triton on a GPU) instead of plain torch."
    )
    enforce_eager: bool = option(
        False, "Launch each op of a step separately: no CUDA graphs on a GPU, no recorded calls on a CPU."
    )

    batch_invariant: bool = option(
        False,
        "Give a request the same tokens whatever else is in its batch. Always so on a CPU; on a GPU with slower "
        "kernels, for dense models in bfloat16 or float16.",
    )

    enable_lora: bool = option(False, "Also serve LoRA adapters of the model.", group="adapters")
    lora_modules: tuple[str, ...] = option(
        (),
        "Adapters to load at the start, each as NAME=SOURCE or vLLM's JSON. SOURCE is any folder, org/name on the "
        "Hub, s3://BUCKET/FOLDER, https://HOST/FOLDER or file:///FOLDER.",
        group="adapters",
        words=True,
    )
    lora_dir: str | None = option(
        None,
        "Folder of adapters. A request that names one of them loads it; adapters in other folders cannot be loaded "
        "by requests.",
        group="adapters",
    )
    max_loras: int = option(
        8, "Maximum number of adapters in one step: slots on the device.", low=1, high=1024, group="adapters"
    )
    max_lora_rank: int = option(64, "Maximum rank of an adapter.", low=1, high=4096, group="adapters")
    max_lora_embeddings: int | None = option(
        None,
        "Maximum number of adapters in one step with their own embedding or head. Default: --max-loras on a CPU; 1 "
        "on a GPU, where memory is reserved for them.",
        low=0,
        high=1024,
        group="adapters",
    )
    max_cpu_loras: int | None = option(
        None,
        "Host memory for adapters, as a number of adapters of the maximum rank; smaller ones take less. Default: "
        "four times --max-loras.",
        low=1,
        high=1 << 20,
        group="adapters",
    )
    max_adapters: int = option(
        10000,
        "Maximum number of loaded adapters, on the device, on the host or on disk.",
        low=1,
        high=1 << 20,
        group="adapters",
    )

    adapter_sources: tuple[str, ...] = option(
        (),
        "Sources from which requests may load adapters: hf, hf://ORG, hf://ORG/NAME, s3://BUCKET/FOLDER, "
        "https://HOST/FOLDER, file:///FOLDER; and private networks such as 10.1.0.0/16 in which these hosts may be. "
        "Default: none.",
        group="adapters",
        words=True,
    )
    adapter_cache_dir: str | None = option(
        None,
        "Folder for downloaded adapters; several servers may share it. Default: rootgraft/adapters in the user's "
        "cache.",
        group="adapters",
    )
    max_adapter_bytes: int = option(
        2 << 30, "Maximum size of an adapter's weights to download, in bytes.", low=1024, high=4 << 30, group="adapters"
    )
    max_adapter_cache_bytes: int = option(
        20 << 30,
        "Maximum size of downloaded adapters on disk, in bytes; the least recently used are deleted.",
        low=1024,
        high=1 << 50,
        group="adapters",
    )
    adapter_download_timeout: float = option(
        900.0, "Maximum seconds for the download of one adapter.", low=1, high=86400, group="adapters"
    )

    @property
    def speculative(self) -> SpeculativeConfig:
        return SpeculativeConfig.parse(self.speculative_config)

    @property
    def target_itl(self) -> TargetItl:
        return TargetItl.parse(str(self.target_itl_ms))  # LLM takes numbers

    @property
    def kv_events(self) -> KvEventsConfig:
        return KvEventsConfig.parse(self.kv_events_config or "{}")

    @property
    def target_ttft(self) -> TargetTtft:
        return TargetTtft.parse(str(self.target_ttft_ms))

    @property
    def most_seqs(self) -> int:
        """Largest number of sequences in one step: the option, or its default if no GPU is known."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return min(DEFAULT_SEQS, self.max_num_batched_tokens or DEFAULT_SEQS)

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens in one step: the option, or its default if no GPU is known."""
        return self.max_num_batched_tokens or max(DEFAULT_TOKENS, self.most_seqs)

    @property
    def max_drafts(self) -> int:
        """Largest number of drafts in one step, of all sequences together. Each draft takes a row of logits."""
        config = self.speculative
        return 0 if config.method == "off" else max(self.most_seqs, config.num_speculative_tokens)

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_option(self) -> str:
        """The option that requests several ranks, with its value; both options if both do."""
        sizes = {"tensor": self.tensor_parallel_size, "pipeline": self.pipeline_parallel_size}
        options = [f"--{way}-parallel-size {size}" for way, size in sizes.items() if size > 1]
        return " ".join(options) or f"--tensor-parallel-size {self.tensor_parallel_size}"

    @property
    def named_adapters(self) -> dict[str, str]:
        """Folders or sources of ``lora_modules`` by name."""
        return dict(_named_adapter(module) for module in self.lora_modules)

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for the first option out of bounds, or for two that contradict each other."""
        check_options(self)
        self._check_adapters()
        self._check_tiers()
        self._check_ranks()
        _ = self.speculative, self.target_itl, self.target_ttft, self.kv_events, parse_overrides(self.hf_overrides)
        if self.most_tokens < self.most_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.most_tokens}) must be at least --max-num-seqs "
                f"({self.most_seqs}): every running sequence needs one token a step."
            )

    def _check_ranks(self) -> None:
        """Check that no option requires several ranks to do something that only a single one supports."""
        if self.num_ranks == 1:
            return
        in_stages, drafts = self.pipeline_parallel_size > 1, self.speculative
        has_draft_in_stages = in_stages and drafts.model is not None
        weights = self.quantization is not None and self.quantization.startswith("int8")  # with scales of whole rows
        found = {
            f"--quantization {self.quantization}": weights and self.tensor_parallel_size > 1,
            "--model-impl transformers": self.model_impl == "transformers",
            "--batch-invariant": self.batch_invariant,
            f"method {drafts.method} of --speculative-config": drafts.method == "mtp" or has_draft_in_stages,
        }
        for what, is_set in found.items():
            if is_set:
                raise ConfigError(
                    f"{self.ranks_option} cannot be used with {what}, which runs on a single rank. Remove one of the "
                    "two."
                )

    def _check_tiers(self) -> None:
        if (self.kv_disk or self.kv_host_gib) and not self.enable_prefix_caching:
            flag = "--kv-disk" if self.kv_disk else "--kv-host-gib"
            raise ConfigError(f"{flag} stores cached prefixes: it needs --enable-prefix-caching.")
        if self.kv_disk_key_file and not self.kv_disk:
            raise ConfigError("--kv-disk-key-file needs --kv-disk.")

    def _check_adapters(self) -> None:
        for spec in fields(self):
            is_set = getattr(self, spec.name) != spec.default
            if spec.metadata["group"] == "adapters" and is_set and not self.enable_lora:
                raise ConfigError(f"--{spec.name.replace('_', '-')} needs --enable-lora.")
        if len(self.named_adapters) < len(self.lora_modules):
            raise ConfigError("--lora-modules has two adapters with the same name.")
        if len(self.lora_modules) > self.max_adapters:
            count = len(self.lora_modules)
            raise ConfigError(f"--lora-modules names {count} adapters, more than --max-adapters ({self.max_adapters}).")
        if self.max_adapter_cache_bytes < self.max_adapter_bytes:
            raise ConfigError(
                f"--max-adapter-cache-bytes ({self.max_adapter_cache_bytes}) must be at least --max-adapter-bytes "
                f"({self.max_adapter_bytes}), so that the cache can hold each adapter."
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras ({self.max_cpu_loras}) must be at least --max-loras ({self.max_loras}): adapters "
                "on the device are also kept on the host."
            )


def config_of_json(values: dict[str, Any]) -> EngineConfig:
    """Return the options from JSON values, in which tuples are lists."""
    options: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
    return EngineConfig(**options)


def _named_adapter(module: str) -> tuple[str, str]:
    """Return name and source of ``NAME=SOURCE`` or of vLLM's JSON. Raises ConfigError."""
    name, _, folder = module.partition("=")
    if module.startswith("{"):
        try:
            fields_given = json.loads(module)
            name, folder = fields_given["name"], fields_given["path"]
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f'--lora-modules: JSON must be such as {{"name": "sql", "path": "/adapters/sql"}}, not {module}.'
            ) from error
    if not (isinstance(name, str) and isinstance(folder, str) and name and folder):
        raise ConfigError(f"--lora-modules must be NAME=SOURCE, not {module}.")
    return name, folder


def check_options(config: Any) -> None:
    """Raise ``ConfigError`` for the first option of a dataclass that is out of bounds."""
    for spec in fields(config):
        _check(spec.name, getattr(config, spec.name), spec.metadata)


def _check(name: str, value: Any, metadata: Any) -> None:
    flag = "--" + name.replace("_", "-")
    if value is None:
        return
    if metadata["choices"] and value not in metadata["choices"]:
        raise ConfigError(f"{flag} must be one of {', '.join(map(str, metadata['choices']))}, not {value}.")
    low, high = metadata["low"], metadata["high"]
    if low is not None and not value >= low:
        raise ConfigError(f"{flag} must be at least {low}, not {value}.")
    if high is not None and not value <= high:
        raise ConfigError(f"{flag} must be at most {high}, not {value}.")
