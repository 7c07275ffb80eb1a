"""Fixtures of this folder: a tiny tokenizer."""

from __future__ import annotations

from support.models.tiny_fixtures import tiny, tiny_folder

__all__ = ("tiny", "tiny_folder")
