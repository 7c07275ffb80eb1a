"""Chat prompt: renders a conversation with the chat template, encodes it, and determines how to parse its answers."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.errors import RequestError
from ...engine.text.prompt_cache import Owner
from ..access.caller import Caller
from ..protocol.cache_control import CacheControl
from ..protocol.chat import ChatRequest, TemplateInput
from ..protocol.chat_messages import ChatMessage, for_template
from ..protocol.sampling import SamplingFields
from ..structured.output_format import OutputFormat, requested_format
from ..structured.thought_plan import ThoughtPlan, plan_thought
from ..structured.tool_dialects import definitions_for, for_dialect, without_second_end
from ..structured.tool_grammar import tool_output_format
from ..structured.tool_plan import ToolPlan
from .model_directory import ModelTarget

if TYPE_CHECKING:
    from ...engine.text.tokenizer import Tokenizer


_USUAL = ("system", "developer", "user", "assistant", "tool")
_NOTHING = ChatMessage(role="user", content="")


class ChatPlan(NamedTuple):
    """The parts of a chat's body that concern the prompt and the answers, read in one pass before rendering.

    Attributes:
        template: input of the chat template.
        output_format: the output format of the answers, None for free text.
        tools: rules for parsing tool calls out of the answers; None without tools.
        shows_thoughts: whether the client wants to see the reasoning.
        marks: beginnings of the conversation that are to be pinned in the prefix cache, with the duration of each pin.
        add_special_tokens: whether encoding adds the tokenizer's special tokens to the rendered text.
        owner: tenant and salt whose cached tokenizations the prompt may use.
    """

    template: TemplateInput
    output_format: OutputFormat | None
    tools: ToolPlan | None
    shows_thoughts: bool
    marks: Sequence[tuple[Sequence[ChatMessage], CacheControl]]
    add_special_tokens: bool
    owner: Owner


class ChatPrompt(NamedTuple):
    """The prompt of a chat in tokens.

    ``thought`` is the rules for separating reasoning from answers; None without reasoning.
    """

    tokens: array[int]
    thought: ThoughtPlan | None


def plan_chat(target: ModelTarget, body: ChatRequest, caller: Caller) -> ChatPlan:
    """Read the parts of a chat's body that concern the prompt and the answers.

    Raises:
        RequestError: the output format or a tool's schema is malformed or beyond the limits, or the two contradict.
    """
    template, marks, is_prefill_only = body.template_input(), tuple(body.cache_points()), body.is_prefill_only
    form = requested_format(body)
    if template.tools:
        form = tool_output_format(
            body.tools, body.tool_choice, target.dialect.format, form, parallel=body.parallel_tool_calls
        )
    # The engine samples one token in any case. That token is dropped, so it needs no format.
    if is_prefill_only:
        form = None
    tools = None if form is None else form.tools
    owner = owner_of(body, caller)
    return ChatPlan(template, form, tools, body.shows_thoughts, marks, body.add_special_tokens, owner)


async def chat_prompt(target: ModelTarget, plan: ChatPlan) -> ChatPrompt:
    """Render and encode the prompt of a chat. Raises like ``render``."""
    text = await render(target, plan.template)
    tools, thought = plan.tools, None
    if target.reasoning is not None:
        thought = plan_thought(
            target.reasoning,
            text,
            continued=plan.template.continued,
            output_format=plan.output_format,
            shown=plan.shows_thoughts,
        )
    if tools is not None and thought is None:
        text += tools.prefill
    elif tools is None and plan.template.continued is None:
        text += target.dialect.format.text_opening(text)
    tokens = await target.engine.encode(text, add_special_tokens=plan.add_special_tokens, owner=plan.owner)
    return ChatPrompt(tokens, thought)


async def render(target: ModelTarget, template: TemplateInput) -> str:
    """Render a conversation with the model's chat template.

    Raises:
        RequestError: the model has no chat template, or the template refuses the messages.
        ContextTooLong: the text cannot fit in the model's context length.
    """
    engine, dialect, tokenizer = target.engine, target.dialect, target.engine.tokenizer
    if not tokenizer.has_chat_template:
        raise RequestError("This model has no chat template: use /v1/completions.", param="messages")

    def rendered() -> str:
        definitions = template.definitions() if template.tools else []
        messages = with_known_roles(for_template(template.messages), tokenizer)
        text = tokenizer.render_chat(
            for_dialect(messages, definitions, dialect),
            add_generation_prompt=template.adds_header,
            continue_final_message=template.continued is not None,
            tools=definitions_for(definitions, dialect),
            kwargs={**dialect.defaults, **template.kwargs},
        )
        return without_second_end(text, dialect)

    # A long conversation is rendered on another thread, so that streams do not wait for it.
    text = await engine.render(rendered, at_once=not template.is_long)
    engine.check_length(text)
    return text


def with_known_roles(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Replace roles in messages that the chat template does not know.

    ``developer`` is OpenAI's newer name of ``system``. It is replaced by ``system`` unless the template mentions
    ``developer``.

    Raises:
        RequestError: the template does not render a role. The error names the roles that the template renders.
    """
    roles = {message["role"] for message in messages}
    for role in sorted(roles.difference(_USUAL)):
        if not tokenizer.renders_role(role):
            _refuse(role, messages, tokenizer)
    if "developer" not in roles:
        return list(messages)
    if "developer" in tokenizer.named_roles and tokenizer.renders_role("developer"):
        return list(messages)
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def _refuse(role: str, messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> None:
    number = next(number for number, message in enumerate(messages) if message["role"] == role)
    named = [name for name in sorted(tokenizer.named_roles - set(_USUAL)) if tokenizer.renders_role(name)]
    known = ", ".join(f"'{name}'" for name in (*_USUAL, *named))
    param = f"messages[{number}].role"
    raise RequestError(
        f"'{param}' must be one of {known}: the model's chat template does not render '{role}'.", param=param
    )


async def prefix_pins(target: ModelTarget, plan: ChatPlan, tokens: array[int]) -> tuple[tuple[int, float], ...]:
    """Return (tokens, seconds) for each mark: the number of prompt tokens up to the mark, and the pin's duration."""
    return tuple([(await _reach(target, plan, messages, tokens), mark.seconds) for messages, mark in plan.marks])


async def _reach(target: ModelTarget, plan: ChatPlan, messages: Sequence[ChatMessage], tokens: array[int]) -> int:
    """Return the number of the prompt's tokens up to the end of ``messages``, which begin the conversation.

    These messages are rendered alone, and the tokens that the result has in common with the prompt are counted. If the
    template refuses the messages alone, an empty user message is appended, which some templates require at the end. If
    the template refuses that too, all tokens of the prompt count.
    """
    for beginning in (messages, [*messages, _NOTHING]):
        try:
            if beginning:
                text = await render(target, plan.template.beginning(beginning))
                first = await target.engine.encode(text, add_special_tokens=plan.add_special_tokens, owner=plan.owner)
                return num_shared(first, tokens)
        except RequestError:
            continue
    return len(tokens)


def num_shared(first: array[int], second: array[int]) -> int:
    """Return the length of the longest common prefix."""
    most = min(len(first), len(second))
    return bisect_left(range(1, most + 1), True, key=lambda length: first[:length] != second[:length])


def owner_of(body: SamplingFields, caller: Caller) -> Owner:
    return Owner(caller.cache_tenant, body.cache_salt or "")
