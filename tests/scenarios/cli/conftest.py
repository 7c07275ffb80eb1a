"""Fixtures of this folder: a small server for commands."""

from __future__ import annotations

from support.cli.cli_fixtures import fake_server

__all__ = ("fake_server",)
