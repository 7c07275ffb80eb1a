"""End tokens: reads which tokens end an answer, from the tokenizer and from the model's files."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.gguf import GgufFile
from ..checkpoint.gguf_end_tokens import gguf_end_tokens
from ..checkpoint.model_config import ModelShape
from ..checkpoint.read_config import config_end_tokens
from .tokenizer_files import has_definition, read_folder, refusing_malformed


def read_end_tokens(config: ModelShape, model: Path, tokenizer: Path | None = None) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer, the tokenizer's own end token first.

    As in vLLM, the tokenizer's end token always counts, because chat fine-tunes often change only this one. If
    ``generation_config.json`` names end tokens too, a token of ``config.json`` counts only if it is a special token: an
    id that was left over from another model may be an ordinary word.

    Args:
        config: the model's configuration, with the end tokens that its files name.
        model: the model's folder or GGUF file.
        tokenizer: another folder or GGUF file that holds the tokenizer.

    Raises:
        ModelError: the files are malformed.
    """
    if tokenizer is None and not model.is_dir():
        # The configuration was read from the same GGUF file, so it has the end tokens of the tokenizer.
        return config.eos_token_ids
    with refusing_malformed():
        own, special = _tokenizer_ends(tokenizer or model)
    ends = [*own, *config.eos_token_ids]
    if model.is_dir():
        ends += [token for token in config_end_tokens(model, config.vocab_size) if token in special]
    return tuple(token for token in dict.fromkeys(ends) if token < config.vocab_size)


def _tokenizer_ends(source: Path) -> tuple[list[int], frozenset[int]]:
    """Return the end tokens and the special tokens of a tokenizer; both are empty for a folder without a tokenizer."""
    if not source.is_dir():
        return [int(token) for token in gguf_end_tokens(GgufFile.open(source).metadata)], frozenset()
    if not has_definition(source):
        return [], frozenset()
    files = read_folder(source)
    added = files.definition["added_tokens"]
    ends = [token["id"] for token in added if token["content"] == files.special.get("eos_token")]
    return ends, frozenset(token["id"] for token in added if token["special"])
