"""Fixtures of this folder: sources of adapters."""

from __future__ import annotations

from support.adapter_sources.source_fixtures import authority, fetcher, hub, plain_surroundings, web

__all__ = ("authority", "fetcher", "hub", "plain_surroundings", "web")
