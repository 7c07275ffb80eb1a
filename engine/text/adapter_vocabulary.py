"""Adapter vocabulary: identifies an adapter's own tokenizer files, and checks that its embedding has as many tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ..errors import ModelError
from .tokenizer_files import DEFINITION, FURTHER_TEMPLATES

MOST_BYTES = 64 << 20
"""Limit of the size of all tokenizer files of an adapter, in bytes."""
MOST_TOKEN_BYTES, MOST_TEXT_BYTES = 1024, 8 << 20
"""Limits on the bytes of one token's text and of all texts together.

They exist because grammars process the texts byte by byte.
"""

_FILES = (
    *(DEFINITION, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)


def digest_tokenizer_files(folder: Path, root: Path | None) -> str:
    """Return the SHA-256 of the files of an adapter's tokenizer; "" for a folder without a tokenizer.

    Args:
        root: folder of adapters; links in it must not lead outside of it. None if there is no such folder.

    Raises:
        ModelError: a link leads outside of ``root``, or the files are too large.
        OSError: the files cannot be read.
    """
    named = [folder / name for name in _FILES]
    present = [file for file in (*named, *sorted((folder / FURTHER_TEMPLATES).glob("*.jinja"))) if file.is_file()]
    if not present or present[0].name != DEFINITION:
        return ""
    root = None if root is None else root.resolve()
    if root is not None and folder.is_relative_to(root):
        for file in present:
            if not file.resolve().is_relative_to(root):
                raise ModelError(f"{file.name} is a link that leads outside the folder of adapters.")
    if (size := sum(file.stat().st_size for file in present)) > MOST_BYTES:
        raise ModelError(f"its files have {size:,} bytes; the limit is {MOST_BYTES:,}.")
    digest = hashlib.sha256()
    for file in present:
        data = file.read_bytes()
        name = file.relative_to(folder).as_posix()
        digest.update(f"{name} {len(data)} ".encode(errors="surrogateescape") + data)
    return digest.hexdigest()


def tokenizer_identity(files: str, vocab_size: int, base_size: int) -> str:
    """Return the identity of an adapter's tokenizer; "" if its tokenizer and vocabulary are the base model's.

    Args:
        files: digest of the adapter's tokenizer files, "" if there are none.
        vocab_size: number of tokens of the adapter's vocabulary.
        base_size: number of tokens of the base model.
    """
    return f"{files}@{vocab_size}" if files or vocab_size != base_size else ""


def check_lengths(lengths: Sequence[int]) -> None:
    """Raise ModelError if an adapter's tokens exceed ``MOST_TOKEN_BYTES`` or ``MOST_TEXT_BYTES``.

    Args:
        lengths: number of bytes of each token.
    """
    longest, total = max(lengths, default=0), sum(lengths)
    if longest > MOST_TOKEN_BYTES:
        raise ModelError(f"a token has {longest:,} bytes; a token of an adapter may have at most {MOST_TOKEN_BYTES:,}.")
    if total > MOST_TEXT_BYTES:
        raise ModelError(
            f"its tokens have {total:,} bytes together; the tokens of an adapter may have at most {MOST_TEXT_BYTES:,}."
        )


def vocabulary_fault(rows: int, num_tokens: int, base_size: int, *, is_download: bool) -> str | None:
    """Return a message on what is wrong with an adapter's vocabulary; None if it is valid.

    Args:
        rows: number of tokens of the adapter's own embedding, 0 without one.
        num_tokens: number of tokens of the tokenizer in its folder, 0 without one.
        base_size: number of tokens of the base model.
        is_download: whether the adapter was downloaded. The tokenizer of a downloaded adapter is not read.
    """
    if rows and num_tokens > rows:
        return (
            f"The adapter's tokenizer.json has {num_tokens:,} tokens, but its embed_tokens has {rows:,} rows: save "
            "the adapter with the tokenizer that it was trained with."
        )
    if is_download and not num_tokens and rows > base_size:
        return (
            f"The adapter has {rows - base_size:,} more tokens than the base model, and tokenizers are not read from "
            "a remote source: download its files to a folder, and load it from there."
        )
    return None
