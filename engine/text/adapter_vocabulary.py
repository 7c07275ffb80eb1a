"""Adapter vocabulary: whether an adapter's own embedding suits the tokenizer that the adapter is served with."""

from __future__ import annotations


def vocabulary_fault(rows: int, num_tokens: int, base_size: int, *, is_download: bool) -> str | None:
    """Return what is wrong with an adapter's vocabulary, in words for its owner; None if nothing is.

    Args:
        rows: tokens of its own embedding, 0 without one.
        num_tokens: tokens of the tokenizer in its folder, 0 without one.
        base_size: tokens of the base model.
        is_download: whether it was downloaded, in which case no tokenizer of its own is read.
    """
    if rows and num_tokens > rows:
        return (
            f"The adapter's tokenizer.json has {num_tokens:,} tokens, but its embed_tokens {rows:,} rows: save the "
            "adapter with the tokenizer that it was trained with."
        )
    if is_download and not num_tokens and rows > base_size:
        return (
            f"The adapter has {rows - base_size:,} tokens more than the base model, and of a source no tokenizer is "
            "read: download its files to a folder, and load it from there."
        )
    return None
