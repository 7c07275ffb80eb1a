"""``docs/reference/api.md`` against the routes and the models of requests: nothing is missing, nothing is made up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from support.foreign_fields_page import section
from support.sampling_options_page import rewritten

from rootgraft.api.anthropic.message_request import CountTokensRequest, MessagesRequest
from rootgraft.api.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from rootgraft.api.protocol.base import StrictModel
from rootgraft.api.protocol.batches import BatchBody
from rootgraft.api.protocol.chat import ChatRequest
from rootgraft.api.protocol.chat_messages import ChatMessage, TextPart, ToolCall
from rootgraft.api.protocol.completions import CompletionRequest
from rootgraft.api.protocol.foreign_fields import ForeignField, foreign_table
from rootgraft.api.protocol.responses import CountInputTokensRequest, ResponseRequest
from rootgraft.api.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from rootgraft.api.protocol.tools import Tool
from rootgraft.api.routes.routers import ROUTERS

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()
MODELS: dict[str, type[StrictModel]] = {
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/responses": ResponseRequest,
    "POST /v1/responses/input_tokens": CountInputTokensRequest,
    "POST /v1/messages": MessagesRequest,
    "POST /v1/messages/count_tokens": CountTokensRequest,
    "POST /v1/batches": BatchBody,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
    "POST /v1/load_lora_adapter": LoadAdapterRequest,
    "POST /v1/unload_lora_adapter": UnloadAdapterRequest,
}
PLACES = {
    "POST /v1/chat/completions": ("generation", "chat"),
    "POST /v1/completions": ("generation", "completions"),
    "POST /v1/responses": ("responses",),
}
KINDS = {"supported": "supported", "accepted without effect": "ignored", "refused": "refused"}


def fields_of(route: str) -> dict[str, str]:
    """Field -> kind, as the section of the route says."""
    section = TEXT.partition(f"\n## `{route}`\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (supported|accepted without effect|refused)[^|]* \|", section, re.MULTILINE)
    found: dict[str, str] = {}
    for names, kind in rows:
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, f"{route}: {name} appears twice"
            found[name] = KINDS[kind]
    return found


@pytest.mark.parametrize("route", MODELS)
def test_every_field_is_told_of_as_it_is(route: str) -> None:
    model = MODELS[route]
    expected = {field.alias or name: "supported" for name, field in model.model_fields.items()}
    expected |= dict.fromkeys(model.ignored, "ignored") | dict.fromkeys(model.refused, "refused")
    foreign = {row.name: _kind(row) for place in PLACES.get(route, ()) for row in foreign_table()[place]}
    told = fields_of(route)
    assert told.keys().isdisjoint(foreign)
    assert told | foreign == expected


@pytest.mark.parametrize(
    ("place", "model"), [("message", ChatMessage), ("part", TextPart), ("tool_call", ToolCall), ("tool", Tool)]
)
def test_every_foreign_field_inside_is_taken_as_it_is_told(place: str, model: type[StrictModel]) -> None:
    by_kind = {"supported": set(model.model_fields), "ignored": model.ignored, "refused": set(model.refused)}
    rows = foreign_table()[place]
    assert all(row.name in by_kind[_kind(row)] for row in rows)
    assert model.ignored | model.refused.keys() <= {row.name for row in rows}


def test_the_section_on_foreign_fields_is_current() -> None:
    told = TEXT.partition("\n## Fields of other servers and clients\n")[2].partition("\n## ")[0]
    assert told.strip() == section().strip(), "run tests/support/foreign_fields_page.py"


def test_the_rows_on_sampling_options_are_current() -> None:
    assert rewritten(TEXT) == TEXT, "run PYTHONPATH=tests python tests/support/sampling_options_page.py"


def test_a_foreign_field_is_one_of_three_things() -> None:
    for place, rows in foreign_table().items():
        for row in rows:
            assert [bool(row.mapped), bool(row.inert), bool(row.refuse)].count(True) == 1, (place, row.name)
            assert row.by and (row.inert + row.refuse + ".").endswith("."), (place, row.name)
            assert row.refuse or not row.same, (place, row.name)


def _kind(row: ForeignField) -> str:
    return "supported" if row.mapped else "ignored" if row.inert else "refused"


def test_every_route_is_told_of() -> None:
    told = set(re.findall(r"^\| `((?:GET|POST|DELETE) /[^`]*)` \|", TEXT, re.MULTILINE))
    methods = {f"{method} {route.path.replace(':path}', '}')}" for route in _routes() for method in route.methods or ()}
    heads = {
        f"HEAD {path}" for path in ("/health", "/health/live", "/health/ready", "/ready", "/ping")
    }  # told of in the rows of GET
    assert heads < methods and told == methods - heads


def _routes() -> list[APIRoute]:
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
