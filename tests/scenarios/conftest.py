"""Fixtures of this folder: servers on fake engines, and a tiny tokenizer."""

from __future__ import annotations

from support.api.live_fixtures import live, real_server, serve_with, session_live
from support.models.tiny_fixtures import tiny, tiny_folder

__all__ = ("live", "real_server", "serve_with", "session_live", "tiny", "tiny_folder")
