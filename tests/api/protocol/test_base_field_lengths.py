"""Every string field of every protocol has a length; what is content is bounded by the body it comes in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import rootgraft.api.anthropic.message_request
import rootgraft.api.protocol.adapters
import rootgraft.api.protocol.batches
import rootgraft.api.protocol.tokenize  # noqa: F401
from rootgraft.api.anthropic.content_blocks import OtherBlock
from rootgraft.api.protocol.adapter_parts import MAX_MODEL_NAME
from rootgraft.api.protocol.adapters import (
    MAX_PATH,
    MAX_SOURCE,
    MAX_VERSION,
    AddVersionRequest,
    LoadAdapterRequest,
    PromoteRequest,
)
from rootgraft.api.protocol.base import MAX_FORMAT_NAME, MAX_ID
from rootgraft.api.protocol.chat_messages import MAX_NAME
from rootgraft.api.protocol.completions import CompletionRequest
from rootgraft.api.protocol.pooled import ClassifyRequest, EmbeddingRequest, RerankRequest
from rootgraft.api.protocol.response_items import CallItem, OtherItem, OutputItem, ReasoningItem, ReferenceItem
from rootgraft.api.protocol.responses import (
    MAX_SAFETY_IDENTIFIER,
    MAX_USER,
    FunctionTool,
    NamedFunction,
    ResponseRequest,
    TextFormat,
)
from rootgraft.api.protocol.scores import ScoreRequest
from rootgraft.api.protocol.structured import JsonSchemaFormat
from rootgraft.api.protocol.tools import FunctionName, OtherChoice, OtherTool

CONTENT = frozenset(
    {
        *("arguments", "content", "data", "description", "encrypted_content", "input", "instructions", "output"),
        *("prompt", "reasoning", "reasoning_content", "refusal", "signature", "summary", "system", "text", "thinking"),
        *("documents", "instruction", "items", "labels", "query", "text_1", "text_2"),
        *("ebnf", "grammar", "guided_grammar", "guided_regex", "regex", "choice", "guided_choice"),
    }
)
"""Texts for the model and grammars, which have limits of their own."""

CHECKED = frozenset(
    {
        *("allowed_callers", "cache_salt", "metadata", "role", "stop", "stop_sequences", "ttl"),
        "Function.name",
    }
)
"""Fields whose length a validator checks; each has a test of its own."""


def models(base: type[BaseModel] = BaseModel) -> Iterator[type[BaseModel]]:
    for each in base.__subclasses__():
        yield each
        yield from models(each)


def has_endless_string(node: Any) -> bool:
    """Whether a value of a JSON schema may be, or hold, a string of any length."""
    if not isinstance(node, dict):
        return False
    if node.get("type") == "string" and not node.keys() & {"maxLength", "enum", "const", "pattern"}:
        return True
    parts = [*node.get("anyOf", ()), *node.get("oneOf", ()), node.get("items"), node.get("additionalProperties")]
    return any(map(has_endless_string, parts))


def test_every_string_field_has_a_length() -> None:
    endless = {
        f"{model.__name__}.{name}"
        for model in models()
        if model.__module__.startswith(("rootgraft.api.protocol.", "rootgraft.api.anthropic."))
        for name, node in model.model_json_schema(ref_template="{model}").get("properties", {}).items()
        if has_endless_string(node) and name not in CONTENT | CHECKED
    }
    assert endless - CHECKED == set()


@pytest.mark.parametrize(
    ("model", "given", "field", "most"),
    [
        (ResponseRequest, {"input": "x"}, "user", MAX_USER),
        (ResponseRequest, {"input": "x"}, "safety_identifier", MAX_SAFETY_IDENTIFIER),
        (ResponseRequest, {"input": "x"}, "previous_response_id", MAX_ID),
        (ResponseRequest, {"input": "x"}, "prompt_cache_key", 256),
        (CompletionRequest, {"prompt": "x"}, "prompt_cache_key", 256),
        (CallItem, {"type": "function_call", "name": "f", "arguments": "{}"}, "call_id", MAX_ID),
        (CallItem, {"type": "function_call", "call_id": "c", "arguments": "{}"}, "name", MAX_ID),
        (OutputItem, {"type": "function_call_output", "output": "x"}, "call_id", MAX_ID),
        (OutputItem, {"type": "function_call_output", "output": "x", "call_id": "c"}, "id", MAX_ID),
        (ReasoningItem, {"type": "reasoning"}, "id", MAX_ID),
        (ReferenceItem, {}, "id", MAX_ID),
        (FunctionTool, {"type": "function"}, "name", MAX_ID),
        (NamedFunction, {"type": "function"}, "name", MAX_ID),
        (FunctionName, {}, "name", MAX_ID),
        (TextFormat, {"type": "text"}, "name", MAX_FORMAT_NAME),
        (JsonSchemaFormat, {"schema": {}}, "name", MAX_FORMAT_NAME),
        (OtherItem, {}, "type", MAX_ID),
        (OtherItem, {"type": "x"}, "id", MAX_ID),
        (OtherItem, {"type": "x"}, "call_id", MAX_ID),
        (OtherTool, {}, "type", MAX_ID),
        (OtherTool, {"type": "x"}, "name", MAX_ID),
        (OtherChoice, {}, "type", MAX_ID),
        (OtherBlock, {}, "type", MAX_ID),
        (CompletionRequest, {"prompt": "x"}, "model", MAX_MODEL_NAME),
        (LoadAdapterRequest, {"lora_path": "x"}, "lora_name", MAX_MODEL_NAME),
        (LoadAdapterRequest, {"lora_name": "x"}, "lora_path", MAX_PATH),
        (AddVersionRequest, {"name": "x"}, "source", MAX_SOURCE),
        (AddVersionRequest, {"source": "x"}, "name", 256),
        (PromoteRequest, {}, "version", MAX_VERSION),
        (EmbeddingRequest, {"input": "x"}, "model", MAX_MODEL_NAME),
        (EmbeddingRequest, {"input": "x"}, "prompt_name", MAX_NAME),
        (ClassifyRequest, {"input": "x"}, "model", MAX_MODEL_NAME),
        (RerankRequest, {"query": "x", "documents": ["x"]}, "model", MAX_MODEL_NAME),
        (ScoreRequest, {"query": "x", "items": "x", "label_token_ids": [1]}, "model", MAX_MODEL_NAME),
        (ScoreRequest, {"query": "x", "items": "x", "label_token_ids": [1]}, "prompt_cache_key", 256),
    ],
)
def test_a_length_is_taken_and_one_more_is_refused(
    model: type[BaseModel], given: dict[str, Any], field: str, most: int
) -> None:
    model.model_validate({**given, field: "x" * most})
    with pytest.raises(ValidationError) as error:
        model.model_validate({**given, field: "x" * (most + 1)})
    assert error.value.errors()[0]["type"] == "string_too_long"
