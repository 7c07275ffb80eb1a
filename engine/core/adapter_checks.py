"""Adapter checks: an adapter's vocabulary against its tokenizer, and a sequence's tokens against the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...lora.errors import AdapterError
from ...lora.safe_paths import check_name, find_folder
from ..adapter_sources.cached_adapters import adapter_cache_folder
from ..config import EngineConfig
from ..errors import RequestError
from ..messages import Submit
from ..text.adapter_vocabulary import vocabulary_fault

if TYPE_CHECKING:
    from ...lora.prepare_factors import PreparedAdapter


@dataclass(frozen=True, slots=True)
class VocabularyCheck:
    """Check of an adapter that has been read, before its name stands for it.

    Attributes:
        config: has the folders of adapters and of downloads.
        path: of the adapter's folder.
        base_size: tokens of the base model.
        num_tokens: of the tokenizer in its folder, 0 without one.
    """

    config: EngineConfig
    path: str
    base_size: int
    num_tokens: int = 0

    def __call__(self, adapter: PreparedAdapter) -> None:
        """Raise AdapterError if its embedding does not suit the tokenizer that it would be served with."""
        rows = (adapter.own.vocab_size if adapter.own else None) or 0
        if not rows:
            return
        folder = find_folder(str(Path(self.config.lora_dir or "") / self.path), None)
        is_download = folder.is_relative_to(adapter_cache_folder(self.config.adapter_cache_dir).resolve())
        fault = vocabulary_fault(rows, self.num_tokens, self.base_size, is_download=is_download)
        if fault is not None:
            raise AdapterError(fault)


def is_adapter(folder: Path, name: str) -> bool:
    """Return whether the folder of adapters has a folder of that name; the loader checks its content."""
    try:
        check_name(name)
        return (folder / name).is_dir()
    except (AdapterError, OSError):
        return False


def check_tokens(submit: Submit, vocab_size: int) -> None:
    """Raise RequestError for token ids that an adapter's vocabulary lacks."""
    biased = [token for token, _ in submit.params.logit_bias]
    for name, tokens in (("prompt", submit.tokens), ("generated", submit.generated), ("logit_bias", biased)):
        if tokens and (largest := max(tokens)) >= vocab_size:
            raise RequestError(
                f"{name} has the token id {largest}; the adapter {submit.adapter!r} has tokens 0 to {vocab_size - 1}.",
                param=name,
            )
