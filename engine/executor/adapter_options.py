"""Options of adapters, checked by configurations and headers of files before the weights are read."""

from __future__ import annotations

from pathlib import Path

import torch

from ...lora.base_projections import BaseLayout
from ...lora.errors import AdapterError
from ...lora.read_adapter import AdapterReader
from ...lora.safe_paths import check_name
from ..adapter_sources.named_sources import looked_in
from ..checkpoint.gguf import GgufFile
from ..config import EngineConfig
from ..errors import ConfigError
from ..loading.base_layout import planned_layout


def check_folder(config: EngineConfig) -> None:
    """Raise ConfigError unless ``--lora-dir`` is a folder, where it is given."""
    if config.lora_dir is not None and not Path(config.lora_dir).is_dir():
        raise ConfigError(f"--lora-dir must be a folder, which {config.lora_dir} is not.")


def check_adapters(config: EngineConfig, checkpoint: Path | GgufFile, dtype: torch.dtype) -> None:
    """Check names, configurations and shapes of the adapters of ``--lora-modules``; their values are not read.

    Raises:
        ConfigError: one cannot be loaded, in the words of its load.
    """
    if not config.named_adapters:
        return
    dummy = config.load_format == "dummy"
    reader = adapter_reader(config, planned_layout(checkpoint, dtype, dummy=dummy))
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


def adapter_reader(config: EngineConfig, layout: BaseLayout) -> AdapterReader:
    """Return the reader of adapters that the options ask for."""
    root = None if config.lora_dir is None else Path(config.lora_dir)
    return AdapterReader(layout, config.max_lora_rank, root=root)
