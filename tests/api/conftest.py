"""Fixtures of this folder: servers on fake engines."""

from __future__ import annotations

from support.api.live_fixtures import live, real_server, serve_with, session_live

__all__ = ("live", "real_server", "serve_with", "session_live")
