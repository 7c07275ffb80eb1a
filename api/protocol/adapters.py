"""Request bodies of vLLM's routes to load and unload LoRA adapters."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from .base import StrictModel
from .sampling import MAX_MODEL_NAME

MAX_PATH = 4096


class LoadAdapterRequest(StrictModel):
    """Load an adapter. ``lora_path`` is relative to ``--lora-dir``."""

    ignored: ClassVar[frozenset[str]] = frozenset({"base_model_name"})

    lora_name: str = Field(min_length=1, max_length=MAX_MODEL_NAME)
    lora_path: str = Field(min_length=1, max_length=MAX_PATH)
    load_inplace: bool = False


class UnloadAdapterRequest(StrictModel):
    """Unload an adapter."""

    ignored: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: str = Field(min_length=1, max_length=MAX_MODEL_NAME)
