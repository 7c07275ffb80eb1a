"""Every string and list of a request has a limit: its own, or that of prompts, grammars or stop strings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from support.api.api_live import make_state

from rootgraft.api.http.app import create_app
from rootgraft.api.protocol.base import StrictModel

# More than a body may have, and more than the longest list.
LONG = "x" * (5 << 20)
MANY = ["x"] * 5_000


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Parts of prompts: their length is checked against the model's before they are encoded.
OF_PROMPTS = _names("""
    AssistantMessage.content ChatMessage.content ChatMessage.reasoning ChatMessage.reasoning_content
    CallItem.arguments Choice.description CompletionRequest.prompt CountInputTokensRequest.input Custom.description
    CustomCall.input CustomCallItem.input CustomResponseTool.description CustomTool.description
    DecisionCall.arguments DecisionCall.input DecisionMessage.content DecisionOutput.output DecisionRequest.input
    Function.description FunctionCall.arguments FunctionTool.description InputFields.input InputText.text
    MessageItem.content OllamaEmbedRequest.input OllamaEmbeddingsRequest.prompt OllamaGenerateRequest.prompt
    OllamaGenerateRequest.system OllamaMessage.content OllamaMessage.thinking OutputItem.output
    PairRequest.instruction PairRequest.text_1 PairRequest.text_2 PromptFields.system QuestionFields.instructions
    ReasoningText.text RefusalPart.refusal RerankDocument.text RerankRequest.instruction RerankRequest.query
    ResponsePrompt.instructions ResponseRequest.input ResponseTextPart.text ScoreLevel.description
    ScoreRequest.items ScoreRequest.query SystemMessage.content SystemOneRequest.instructions SystemOneRequest.state
    Asked.instructions NoulCriteria.true NoulCriteria.false TextBlock.text TextPart.text ThinkingBlock.thinking
    TgiRequest.inputs TokenizeRequest.prompt ToolResultBlock.content UserMessage.content
""")
# Grammars, by their limits: ``grammar.schema.static_limits``.
OF_GRAMMARS = _names("""
    StructuredFields.ebnf StructuredFields.guided_choice StructuredFields.guided_grammar
    StructuredFields.guided_json StructuredFields.guided_regex StructuredFields.regex StructuredOutputs.choice
    StructuredOutputs.grammar StructuredOutputs.json_ StructuredOutputs.regex StructuredOutputs.structural_tag
    ResponseFormat.structures ResponseFormat.triggers TgiGrammar.value
""")
# Stop strings, by ``engine.serving.request``.
STOPS = _names("""
    MessagesRequest.stop_sequences OllamaOptions.stop ResponseRequest.stop SamplingFields.stop
""")
# Taken and dropped: they reach neither prompt nor answer.
DROPPED = _names("""
    JsonSchemaFormat.description PromptFields.mcp_servers ReasoningItem.encrypted_content RedactedThinkingBlock.data
    ResponseTextPart.annotations ResponseTextPart.logprobs TextBlock.citations TextFormat.description
    ThinkingBlock.signature ToolUseBlock.caller
""")
# Read from files of the operator, and numbers as many as the shape says.
OTHERS = _names("""
    KeyEntry.adapters InferTensor.data
""")
LISTED = OF_PROMPTS | OF_GRAMMARS | STOPS | DROPPED | OTHERS


def models() -> list[type[StrictModel]]:
    create_app(make_state())  # which imports all routes

    def below(model: type[StrictModel]) -> Iterator[type[StrictModel]]:
        for each in model.__subclasses__():
            yield each
            yield from below(each)

    return sorted(set(below(StrictModel)), key=lambda each: each.__qualname__)


def takes(model: type[StrictModel], name: str, value: object) -> bool:
    """Whether a value is no fault at this field, whatever else the body lacks."""
    field = model.model_fields[name].alias or name
    try:
        model.model_validate({field: value})
    except ValidationError as error:
        faults = error.errors(include_input=False)
        return not any(field in (*fault["loc"][:2], *fault.get("ctx", {}).get("field", ())[:1]) for fault in faults)
    return True


def owner(model: type[StrictModel], name: str) -> str:
    """The field by the class that declares it."""
    declaring = next(each for each in model.__mro__ if name in inspect.get_annotations(each))
    return f"{declaring.__name__}.{name}"


@pytest.fixture(scope="module")
def without_limits() -> set[str]:
    ours = [model for model in models() if model.__module__.startswith("rootgraft.")]
    fields = {owner(model, name): (model, name) for model in ours for name in model.model_fields}
    return {field for field, at in fields.items() if takes(*at, LONG) or takes(*at, MANY)}


def test_every_field_without_a_length_is_limited_elsewhere(without_limits: set[str]) -> None:
    assert not without_limits - LISTED, "give it a length (Field(max_length=...)), with tests on both sides"


def test_nothing_is_listed_that_has_a_length(without_limits: set[str]) -> None:
    assert not LISTED - without_limits


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    """The alternatives of a field's JSON schema."""
    if isinstance(node, dict):
        yield node
        for part in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
            yield from nodes(part)


BEYOND: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any], str]] = {
    "maxLength": (lambda most, _: "x" * most, lambda most, _: "x" * (most + 1), "string_too_long"),
    "maxItems": (lambda most, item: [item] * most, lambda most, item: [item] * (most + 1), "too_long"),
    "maximum": (lambda most, _: most, lambda most, _: most + 1, "less_than_equal"),
    "minimum": (lambda least, _: least, lambda least, _: least - 1, "greater_than_equal"),
    "exclusiveMinimum": (lambda least, _: least + 1e-9, lambda least, _: least, "greater_than"),
    "exclusiveMaximum": (lambda most, _: most - 1e-9, lambda most, _: most, "less_than"),
}
"""By keyword: the last value that is taken, one beyond it, and what the fault of that is called, if not "rejected"."""
ITEMS = {"string": "x", "integer": 1, "array": [1]}


def bounds() -> Iterator[tuple[str, type[StrictModel], str, str, Any, Any]]:
    """Each bound that a field declares: the field, its model and name, the keyword, the last value, one beyond."""
    seen: set[str] = set()
    for model in models():
        if not model.__module__.startswith("rootgraft."):
            continue
        properties = model.model_json_schema().get("properties", {})
        for name, field in model.model_fields.items():
            if (own := owner(model, name)) in seen:
                continue
            seen.add(own)
            for node in nodes(properties.get(field.alias or name)):
                item = ITEMS.get(node.get("items", {}).get("type"))
                for keyword, (last, beyond, _) in BEYOND.items():
                    if keyword in node:
                        number = node[keyword]
                        yield own, model, field.alias or name, keyword, last(number, item), beyond(number, item)


def fault_types(model: type[StrictModel], field: str, value: Any) -> set[str]:
    try:
        model.model_validate({field: value})
    except ValidationError as error:
        faults = error.errors(include_input=False, include_url=False)
        return {fault["type"] for fault in faults if field in fault["loc"][:2]}
    return set()


def test_every_bound_holds_on_both_sides() -> None:
    """What is declared is what is checked, wherever validators, unions and aliases stand before it."""
    checked, wrong = 0, []
    for own, model, field, keyword, last, beyond in bounds():
        name = BEYOND[keyword][2]
        checked += 1
        if name in fault_types(model, field, last) or fault_types(model, field, beyond).isdisjoint((name, "rejected")):
            wrong.append((own, keyword))
    assert checked > 200 and not wrong
