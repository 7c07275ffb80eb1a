"""Shared vocabulary: checks that a draft model and its target model have the same token for each id."""

from __future__ import annotations

from pathlib import Path

from .tokenizer import Tokenizer
from .tokenizer_files import DEFINITION, has_definition


def vocabulary_difference(model: Path, draft: Path) -> str | None:
    """Compare the bytes of each token of two models.

    Args:
        model, draft: folders in Hugging Face format or GGUF files, each with a model or only a tokenizer.

    Returns:
        A description of the first difference; None if there is no difference, or if neither model has a tokenizer.

    Raises:
        ModelError: a tokenizer is not supported exactly.
    """
    if not (has_tokenizer(model) and has_tokenizer(draft)):
        lacking = model if has_tokenizer(draft) else draft
        return f"{lacking} has no tokenizer to compare" if has_tokenizer(model) or has_tokenizer(draft) else None
    if model.resolve() == draft.resolve() or _same_definition(model, draft):
        return None
    left, right = Tokenizer.load(model), Tokenizer.load(draft)
    if left.vocab_size != right.vocab_size:
        return f"it has {left.vocab_size:,} tokens, and the draft model has {right.vocab_size:,}"
    for token in range(left.vocab_size):
        ours, theirs = left.token_bytes(token), right.token_bytes(token)
        if ours != theirs:
            return f"token {token} is {ours!r} in the model and {theirs!r} in the draft model"
    return None


def has_tokenizer(source: Path) -> bool:
    """Return whether a folder or GGUF file has a tokenizer."""
    return not source.is_dir() or has_definition(source)


def _same_definition(model: Path, draft: Path) -> bool:
    """Return whether both are folders with equal tokenizer files, as is usual for the sizes of one model family."""
    if not all((folder / DEFINITION).is_file() for folder in (model, draft)):
        return False
    return (model / DEFINITION).read_bytes() == (draft / DEFINITION).read_bytes()
