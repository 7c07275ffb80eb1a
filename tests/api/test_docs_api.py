"""``docs/api.md`` against the routes and the models of requests: nothing is missing, nothing is made up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from rootgraft.api.anthropic.message_request import CountTokensRequest, MessagesRequest
from rootgraft.api.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from rootgraft.api.protocol.base import RequestModel
from rootgraft.api.protocol.batches import BatchBody
from rootgraft.api.protocol.chat import ChatRequest
from rootgraft.api.protocol.completions import CompletionRequest
from rootgraft.api.protocol.responses import ResponseRequest
from rootgraft.api.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from rootgraft.api.routes import (
    adapters,
    anthropic,
    batches,
    chat,
    completions,
    files,
    health,
    models,
    responses,
    tokenize,
    ui,
)

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
MODELS: dict[str, type[RequestModel]] = {
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/responses": ResponseRequest,
    "POST /v1/messages": MessagesRequest,
    "POST /v1/messages/count_tokens": CountTokensRequest,
    "POST /v1/batches": BatchBody,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
    "POST /v1/load_lora_adapter": LoadAdapterRequest,
    "POST /v1/unload_lora_adapter": UnloadAdapterRequest,
}
KINDS = {"supported": "supported", "accepted without effect": "ignored", "refused": "refused"}


def fields_of(route: str) -> dict[str, str]:
    """Field -> kind, as the section of the route says."""
    section = TEXT.partition(f"\n## `{route}`\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (supported|accepted without effect|refused)[^|]* \|", section, re.MULTILINE)
    found: dict[str, str] = {}
    for names, kind in rows:
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, f"{route}: {name} is there twice"
            found[name] = KINDS[kind]
    return found


@pytest.mark.parametrize("route", MODELS)
def test_every_field_is_told_of_as_it_is(route: str) -> None:
    model = MODELS[route]
    expected = {field.alias or name: "supported" for name, field in model.model_fields.items()}
    expected |= dict.fromkeys(model.ignored, "ignored") | dict.fromkeys(model.refused, "refused")
    assert fields_of(route) == expected


def test_every_route_is_told_of() -> None:
    told = set(re.findall(r"^\| `((?:GET|POST|DELETE) /[^`]*)` \|", TEXT, re.MULTILINE))
    there = {f"{method} {route.path.replace(':path}', '}')}" for route in _routes() for method in route.methods or ()}
    assert told == there


def _routes() -> list[APIRoute]:
    modules = (adapters, anthropic, batches, chat, completions, files, health, models, responses, tokenize, ui)
    return [route for module in modules for route in module.router.routes if isinstance(route, APIRoute)]
