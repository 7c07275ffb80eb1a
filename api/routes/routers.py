"""The routers of all routes, and those of them that are answered without the framework."""

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
"""Those whose routes are answered without the framework where a body is all that they take."""
ROUTERS: tuple[APIRouter, ...] = (
    *DIRECT,
    *(module.router for module in (models, adapters, admin_models, cache, replicas, tokenize, health, inference, ui)),
)
