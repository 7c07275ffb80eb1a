"""Every string and list of a request has a limit: its own, or that of prompts, grammars or stop strings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

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
