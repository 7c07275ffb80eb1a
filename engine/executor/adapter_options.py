"""Adapters of a worker: the checks of their options before the weights are read, and the pool that these ask for."""

from __future__ import annotations

from pathlib import Path

import torch

from ...kernels.collectives import ALONE, Ranks
from ...lora.adapter_pool import AdapterPool
from ...lora.base_projections import BaseLayout
from ...lora.errors import AdapterError
from ...lora.lora_step import AdapterBank
from ...lora.read_adapter import AdapterReader
from ...lora.safe_paths import check_name
from ..adapter_sources.named_sources import looked_in
from ..checkpoint.gguf import GgufFile
from ..checkpoint.read_config import read_model_config
from ..config import EngineConfig
from ..errors import ConfigError
from ..loading.base_layout import adapter_bytes, matrix_bytes, planned_layout
from ..loading.model_impl import layout_of
from ..models.model import Model
from .rank_adapters import AdapterParts, RankMirror, SplitBank

_SLOT_PATIENCE = 64  # steps that an adapter waits for a slot before one is closed for it


def check_folder(config: EngineConfig) -> None:
    """Raise ConfigError if ``--lora-dir`` is given and is not a folder."""
    if config.lora_dir is not None and not Path(config.lora_dir).is_dir():
        raise ConfigError(f"--lora-dir must be a folder, which {config.lora_dir} is not.")


def check_adapters(config: EngineConfig, checkpoint: Path | GgufFile, dtype: torch.dtype) -> None:
    """Check names, configurations and shapes of the adapters of ``--lora-modules``; their values are not read.

    Raises:
        ConfigError: an adapter cannot be loaded; the message is the error that loading it would raise.
    """
    if not config.named_adapters:
        return
    dummy = config.load_format == "dummy"
    planned = planned_layout(checkpoint, dtype, dummy=dummy, max_positions=config.max_model_len)
    reader = _adapter_reader(config, planned)
    for name, folder in config.named_adapters.items():
        try:
            check_name(name)
            reader.check(folder, trusted=True)
        except AdapterError as error:
            where = (
                "" if _is_there(folder, config.lora_dir) else f" There is neither {looked_in(folder, config.lora_dir)}."
            )
            raise ConfigError(f"--lora-modules {name}={folder}: {error}{where}") from None


def _is_there(folder: str, root: str | None) -> bool:
    try:
        return (Path(root or "") / folder).exists()
    except OSError:
        return False


def make_adapters(
    config: EngineConfig,
    model: Model,
    checkpoint: Path | GgufFile,
    ranks: Ranks = ALONE,
    mirror: RankMirror | None = None,
) -> tuple[AdapterPool | None, int]:
    """Return the empty pool of adapters of a model, None without ``enable_lora``, and the bytes of its full slots.

    Adapters are read whole. With several ranks, each rank holds its part of an adapter in its slots.
    """
    if not config.enable_lora:
        return None, 0
    own = layout_of(model, checkpoint, dummy=config.load_format == "dummy")
    layout, bank = own, AdapterBank(own, config.max_loras)
    if ranks.size > 1:
        longest, dummy = config.max_model_len, config.load_format == "dummy"
        layout = planned_layout(checkpoint, model.dtype, model.device, dummy=dummy, max_positions=longest)
    if mirror is not None:
        sizes = config.tensor_parallel_size, config.pipeline_parallel_size
        bank = SplitBank(AdapterParts(read_model_config(checkpoint), layout, *sizes), mirror, own, config.max_loras)
    pool = AdapterPool(
        _adapter_reader(config, layout),
        max_loras=config.max_loras,
        max_adapters=config.max_adapters,
        max_cpu_bytes=(config.max_cpu_loras or 4 * config.max_loras) * adapter_bytes(layout, config.max_lora_rank),
        patience=_SLOT_PATIENCE,
        max_own=_most_own(config, layout),
        bank=bank,
    )
    return pool, _slot_bytes(config, own)


def _slot_bytes(config: EngineConfig, layout: BaseLayout) -> int:
    """Return the bytes of full slots; on a GPU also of embeddings and heads that adapters bring."""
    matrices = 0 if layout.device.type == "cpu" else _most_own(config, layout) * matrix_bytes(layout)
    return config.max_loras * adapter_bytes(layout, config.max_lora_rank) + matrices


def _most_own(config: EngineConfig, layout: BaseLayout) -> int:
    """Return how many adapters in slots may bring an embedding or a head."""
    default = config.max_loras if layout.device.type == "cpu" else 1
    return default if config.max_lora_embeddings is None else min(config.max_lora_embeddings, config.max_loras)


def _adapter_reader(config: EngineConfig, layout: BaseLayout) -> AdapterReader:
    """Return the reader of adapters that the options ask for."""
    root = None if config.lora_dir is None else Path(config.lora_dir)
    return AdapterReader(layout, config.max_lora_rank, root=root)
