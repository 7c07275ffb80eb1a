"""Fixtures of this folder: servers on fake engines, vocabularies and grammars."""

from __future__ import annotations

from support.api.live_fixtures import live, real_server, serve_with, session_live
from support.grammar.grammar_fixtures import grammars, hardly_larger_limits, real_grammars, real_vocabulary, vocabulary

__all__ = (
    "grammars",
    "hardly_larger_limits",
    "live",
    "real_grammars",
    "real_server",
    "real_vocabulary",
    "serve_with",
    "session_live",
    "vocabulary",
)
