"""Routers: the routers of all routes, and those whose routes do not need the framework."""

from __future__ import annotations

from fastapi import APIRouter

from . import (
    adapters,
    admin_models,
    anthropic,
    batches,
    cache,
    chat,
    completions,
    decisions,
    files,
    health,
    inference,
    models,
    ollama,
    pooled,
    replicas,
    responses,
    scores,
    tgi,
    tokenize,
    ui,
)

DIRECT: tuple[APIRouter, ...] = tuple(
    module.router
    for module in (chat, completions, decisions, scores, pooled, responses, anthropic, ollama, tgi, files, batches)
)
"""Routers whose routes are handled without the framework if a body is their only parameter."""
ROUTERS: tuple[APIRouter, ...] = (
    *DIRECT,
    *(module.router for module in (models, adapters, admin_models, cache, replicas, tokenize, health, inference, ui)),
)
