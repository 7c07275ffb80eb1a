"""``LoRARequest``: the adapter of an offline request, in vLLM's format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class LoRARequest:
    """An adapter of a request, which is loaded under its name when it is first used.

    Attributes:
        lora_name: name of the adapter in this ``LLM``.
        lora_int_id: vLLM's number of the adapter, which is ignored.
        lora_path: a folder in PEFT's format, or a source as for ``LLM.load_adapter``; "" for an adapter that is already
            loaded.
        lora_local_path: the name of ``lora_path`` in older versions of vLLM.
        load_inplace: whether the content of the path replaces the adapter loaded under the name.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    lora_local_path: str | None = None
    long_lora_max_len: int | None = None
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path or self.lora_local_path or ""

    @property
    def local_path(self) -> str:
        return self.path
