"""The types of Anthropic's own client as an oracle: which fields there are, and what every event must hold."""

from __future__ import annotations

from typing import Any

import anthropic.types as sdk
import anthropic.types.beta as beta
import pydantic
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from support.api.api_live import Live
from support.api.messages_asks import TOOLS, events_of, post, say
from support.api.reply_checks import declared, known, undeclared
from support.api.tool_asks import TWO

from rootgraft.api.anthropic import content_blocks as blocks
from rootgraft.api.anthropic.message_request import (
    AnyToolChoice,
    CountTokensRequest,
    CustomTool,
    JsonOutputFormat,
    MessagesRequest,
    OneToolChoice,
    OutputConfig,
    Thinking,
)
from rootgraft.api.protocol.cache_control import CacheControl
from rootgraft.engine.errors import EngineDead

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(sdk.RawMessageStreamEvent)

# Fields of tools that Anthropic defines: they are unknown here, and named in the 400.
UNKNOWN = {blocks.ToolUseBlock: {"toolset_name"}, blocks.ToolResultBlock: {"toolset_name"}}


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (message_create_params.MessageCreateParamsBase, MessagesRequest),
        (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
        (sdk.TextBlockParam, blocks.TextBlock),
        (sdk.ThinkingBlockParam, blocks.ThinkingBlock),
        (sdk.RedactedThinkingBlockParam, blocks.RedactedThinkingBlock),
        (sdk.ToolUseBlockParam, blocks.ToolUseBlock),
        (sdk.ToolResultBlockParam, blocks.ToolResultBlock),
        (sdk.ToolParam, CustomTool),
        (sdk.ToolChoiceAutoParam, AnyToolChoice),
        (sdk.ToolChoiceToolParam, OneToolChoice),
        (sdk.ThinkingConfigEnabledParam, Thinking),
        (sdk.OutputConfigParam, OutputConfig),
        (sdk.JSONOutputFormatParam, JsonOutputFormat),
        (sdk.CacheControlEphemeralParam, CacheControl),
        (beta.BetaToolParam, CustomTool),
    ],
)
def test_every_field_of_the_client_is_known_or_known_to_be_unknown(kind: Any, model: type[pydantic.BaseModel]) -> None:
    assert declared(kind) - known(model) == UNKNOWN.get(model, set())


def test_fields_that_are_tried_out_are_known() -> None:
    """``betas`` is a header."""
    assert declared(beta_create_params.MessageCreateParamsBase) - known(MessagesRequest) == {"betas"}


def test_answers_are_those_of_the_client_to_the_field(live: Live) -> None:
    """Every kind of block and event is one of the client's types, without a field that the type does not declare."""
    live.async_engine.tokenizer.thinks = "qwen3"
    say(live, f"<think>\nHm.\n</think>\n\nWell. {TWO}")
    found = events_of(live, tools=TOOLS, max_tokens=400)
    message = sdk.Message.model_validate(post(live, tools=TOOLS, max_tokens=400))
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert not undeclared(message)
    kinds = set()
    for event in found:
        kinds.add(event["type"])
        if event["type"] != "ping":
            assert not undeclared(EVENT.validate_python(event)) or event["type"] == "message_delta", event
    assert kinds == {
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    }
    live.async_engine.fail_after = (2, EngineDead("The engine is not running."))
    error = events_of(live)[-1]
    assert not undeclared(sdk.ErrorResponse.model_validate(error))
