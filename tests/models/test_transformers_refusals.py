"""What is refused by name where the transformers library computes, and which implementation computes what."""

from __future__ import annotations

from support.models.tiny_llama import TinyLlama  # noqa: F401
