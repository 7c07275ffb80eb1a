"""Adapter checks: checks an adapter's vocabulary against its tokenizer, and a sequence's tokens against both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...lora.errors import AdapterError
from ...lora.safe_paths import find_folder
from ..adapter_sources.cached_adapters import adapter_cache_folder
from ..config import EngineConfig
from ..errors import AdapterUnavailable, ModelError, RequestError
from ..messages import Submit
from ..text.adapter_vocabulary import digest_tokenizer_files, tokenizer_identity, vocabulary_fault

if TYPE_CHECKING:
    from ...lora.prepare_factors import PreparedAdapter
    from ...lora.registry import AdapterVersion


@dataclass(frozen=True, slots=True)
class VocabularyCheck:
    """Checks the vocabulary of an adapter that was read, before requests can name it.

    Runs on the thread that reads adapters.

    Attributes:
        config: the engine's options, which name the folders of adapters and of downloads.
        path: path of the adapter's folder.
        base_size: number of tokens of the base model's vocabulary.
        num_tokens: number of tokens of the tokenizer in the adapter's folder; 0 without a tokenizer.
    """

    config: EngineConfig
    path: str
    base_size: int
    num_tokens: int = 0

    def __call__(self, adapter: PreparedAdapter) -> str:
        """Return the identity of the tokenizer in the adapter's folder.

        Raises:
            AdapterError: the adapter's embedding does not fit the tokenizer that its requests would use, or the
                tokenizer's files cannot be read.
        """
        rows = (adapter.own.vocab_size if adapter.own else None) or 0
        root = None if self.config.lora_dir is None else Path(self.config.lora_dir)
        folder = find_folder(str((root or Path()) / self.path), None)
        is_download = folder.is_relative_to(adapter_cache_folder(self.config.adapter_cache_dir).resolve())
        if rows and (fault := vocabulary_fault(rows, self.num_tokens, self.base_size, is_download=is_download)):
            raise AdapterError(fault)
        try:
            files = digest_tokenizer_files(folder, root)
        except (ModelError, OSError) as error:
            reason = error if isinstance(error, ModelError) else f"{error.strerror}."
            raise AdapterError(f"The tokenizer in its folder: {reason}") from None
        return tokenizer_identity(files, rows or self.base_size, self.base_size)


def check_tokens(submit: Submit, version: AdapterVersion, base_size: int) -> None:
    """Check that a sequence was tokenized with the tokenizer of its adapter.

    Args:
        version: the version of the adapter that the sequence would use.
        base_size: number of tokens of the base model.

    Raises:
        AdapterUnavailable: the sequence was tokenized with another tokenizer.
        RequestError: a token id is not in the adapter's vocabulary.
    """
    if submit.tokenizer != version.tokenizer:
        raise AdapterUnavailable(
            f"The tokenizer of the adapter {submit.adapter!r} differs from the one that read this request. If the "
            "adapter was replaced meanwhile, try again; if its tokenizer's files changed after it was loaded, load "
            "it again."
        )
    vocab_size = version.own.vocab_size or base_size
    biased = [token for token, _ in submit.params.logit_bias]
    for name, tokens in (("prompt", submit.tokens), ("generated", submit.generated), ("logit_bias", biased)):
        if tokens and (largest := max(tokens)) >= vocab_size:
            raise RequestError(
                f"{name} has the token id {largest}, but the adapter {submit.adapter!r} has tokens 0 to "
                f"{vocab_size - 1}.",
                param=name,
            )
