"""Fixtures of this folder: vocabularies and grammars over them."""

from __future__ import annotations

from support.grammar.grammar_fixtures import grammars, hardly_larger_limits, real_grammars, real_vocabulary, vocabulary

__all__ = ("grammars", "hardly_larger_limits", "real_grammars", "real_vocabulary", "vocabulary")
