"""Fixtures of this folder: servers on fake engines, and a tiny tokenizer."""

from __future__ import annotations

from support.api.live_fixtures import live, real_server, serve_with, session_live
from support.kernels.kernel_choice import native_kernels_again
from support.models.tiny_fixtures import tiny, tiny_folder

__all__ = ("live", "native_kernels_again", "real_server", "serve_with", "session_live", "tiny", "tiny_folder")
