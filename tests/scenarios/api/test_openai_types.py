"""The types of OpenAI's own client as an oracle: which fields there are, and what every event must hold."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import openai.types.responses as sdk
import pydantic
import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses
from support.api.api_live import Live
from support.api.reply_checks import declared, known, undeclared
from support.api.responses_asks import TOOLS, events_of, say
from support.api.tool_asks import TWO

from rootgraft.api.protocol.chat import ChatRequest
from rootgraft.api.protocol.completions import CompletionRequest
from rootgraft.api.protocol.response_items import CallItem, MessageItem, OutputItem, ResponseTextPart
from rootgraft.api.protocol.responses import (
    CountInputTokensRequest,
    FunctionTool,
    ResponseRequest,
    TextConfig,
    TextFormat,
)
from rootgraft.engine.errors import EngineDead

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(sdk.ResponseStreamEvent)
PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "api.md").read_text()

# Fields of parts that mean something with tools on OpenAI's servers alone: they are unknown here, and named in the 400.
UNKNOWN = {
    FunctionTool: {"allowed_callers", "async", "defer_loading", "output_schema"},
    CallItem: {"async", "caller", "namespace"},
    OutputItem: {"caller", "name", "namespace"},
}


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (chats.CompletionCreateParamsBase, ChatRequest),
        (completions.CompletionCreateParamsBase, CompletionRequest),
        (responses.ResponseCreateParamsBase, ResponseRequest),
        (sdk.InputTokenCountParams, CountInputTokensRequest),
        (sdk.ResponseTextConfigParam, TextConfig),
        (sdk.ResponseFormatTextJSONSchemaConfigParam, TextFormat),
        (sdk.FunctionToolParam, FunctionTool),
        (sdk.ResponseFunctionToolCallParam, CallItem),
        (sdk.response_input_item_param.FunctionCallOutput, OutputItem),
        (sdk.EasyInputMessageParam, MessageItem),
        (sdk.ResponseOutputMessageParam, MessageItem),
        (sdk.ResponseOutputTextParam, ResponseTextPart),
        (sdk.ResponseInputTextParam, ResponseTextPart),
    ],
)
def test_every_field_of_the_client_is_known_or_known_to_be_unknown(kind: Any, model: type[pydantic.BaseModel]) -> None:
    assert declared(kind) - known(model) == UNKNOWN.get(model, set())


def test_what_can_be_included_is_what_the_client_knows(live: Live) -> None:
    names = typing.get_args(sdk.ResponseIncludable)
    with live.http() as http:
        assert http.post("/v1/responses", json={"input": "hi", "include": names}).status_code == 200


def test_events_are_those_of_the_client_to_the_field(live: Live) -> None:
    """Every kind of stream; each event is one of the client's types, without a field that the type does not declare."""
    live.async_engine.tokenizer.thinks = "qwen3"
    found = events_of(live, top_logprobs=2, include=["message.output_text.logprobs"], metadata={"a": "b"})
    found += events_of(live, max_output_tokens=2)
    say(live, "Well. " + TWO)
    found += events_of(live, tools=TOOLS)
    say(live, "not JSON")
    found += events_of(live, text={"format": {"type": "json_object"}})
    say(live, "<think>hm</think>Yes")
    found += events_of(live, reasoning={"effort": "low", "summary": "auto"})
    live.async_engine.fail_after = (2, EngineDead("The engine is not running."))
    found += events_of(live)
    for name, data in found:
        event = EVENT.validate_python(data)
        # OpenAI's server sends "store" and a name too, Open Responses has the penalties, ours the bytes of tokens and
        # what calls had in common; the client declares none of them.
        extra = {path.rpartition(".")[2] for path in undeclared(event)}
        ours = {"bytes", "forked_tokens", "pinned_tokens", "drafted_tokens", "forced_tokens"}
        assert event.type == name and extra <= {"store", "name", "presence_penalty", "frequency_penalty"} | ours
    [stream] = re.findall(r"^A stream is (.*)$", PAGE, re.MULTILINE)
    written = set(re.findall(r"`(response\.[a-z_.]+)`", stream)) | {"error"}
    written |= {"response.function_call_arguments.done", "response.reasoning_text.done"}
    assert {name for name, _ in found} == written
