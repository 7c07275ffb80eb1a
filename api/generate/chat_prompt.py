"""Chat prompt: a conversation as text by the model's chat template, as tokens, and how its answers are to be parsed."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.errors import RequestError
from ...engine.text.prompt_cache import Owner
from ..access.caller import Caller
from ..protocol.chat import ChatRequest
from ..protocol.chat_messages import ChatMessage, for_template
from ..protocol.sampling import SamplingFields
from ..protocol.tools import Tool
from ..structured.output_format import OutputFormat, requested_format
from ..structured.reasoning_formats import ThoughtPlan, plan_thought
from ..structured.tool_dialects import Dialect, for_dialect
from ..structured.tool_grammar import tool_output_format
from .model_directory import ModelTarget

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine
    from ...engine.text.tokenizer import Tokenizer

# Conversations beyond these are rendered on another thread, so that streams do not wait for them.
_MANY_MESSAGES = 64
_LONG_TEXT = 50_000
_USUAL = ("system", "developer", "user", "assistant", "tool")

Encode = Callable[[Sequence[ChatMessage]], Awaitable["array[int]"]]
"""Returns the tokens of some messages with the request's tools, without an answer's header."""
_NOTHING = ChatMessage(role="user", content="")


class ChatPrompt(NamedTuple):
    """The prompt of a chat, and how to parse its answers: as in ``PreparedChat``."""

    tokens: array[int]
    output_format: OutputFormat | None
    thought: ThoughtPlan | None


async def chat_prompt(target: ModelTarget, body: ChatRequest, caller: Caller) -> ChatPrompt:
    """Return the tokens of a chat as its request would have them. Raises as ``chat_request`` does."""
    async_engine, dialect, reasoning = target.engine, target.dialect, target.reasoning
    output_format = requested_format(body)
    if body.functions:
        output_format = tool_output_format(
            body.tools, body.tool_choice, dialect.format, output_format, parallel=body.parallel_tool_calls
        )
    # The engine always draws one token; where none is asked for, it is dropped, and has no output format.
    output_format = None if body.is_prefill_only else output_format
    plan = None if output_format is None else output_format.tools
    with naming_field("messages"):
        text = await render(
            async_engine,
            dialect,
            body.messages,
            tools=body.functions,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs={**body.thinking_kwargs, **body.chat_template_kwargs},
        )
        continued = body.messages[-1].text if body.continue_final_message else None
        shown = body.shows_thoughts
        thought = plan_thought(reasoning, text, continued=continued, output_format=output_format, shown=shown)
        if plan is not None and thought is None:
            text += plan.prefill
        elif plan is None and continued is None:
            text += dialect.format.text_opening(text)
        tokens = await async_engine.encode(
            text, add_special_tokens=body.add_special_tokens, owner=owner_of(body, caller)
        )
        return ChatPrompt(tokens, output_format, thought)


async def beginning_tokens(
    async_engine: AsyncEngine, dialect: Dialect, body: ChatRequest, owner: Owner, messages: Sequence[ChatMessage]
) -> array[int]:
    """Return the tokens of a chat's first messages."""
    text = await render(
        async_engine,
        dialect,
        messages,
        tools=body.functions,
        add_generation_prompt=False,
        continue_final_message=False,
        template_kwargs={**body.thinking_kwargs, **body.chat_template_kwargs},
    )
    return await async_engine.encode(text, add_special_tokens=body.add_special_tokens, owner=owner)


async def render(
    async_engine: AsyncEngine,
    dialect: Dialect,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Tool] = (),
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    template_kwargs: dict[str, Any],
) -> str:
    """Return the text of a conversation. By default it ends in a new answer's header, or in the continued message.

    Args:
        tools: functions that the model may call.

    Raises:
        ContextTooLong: the text cannot fit the model's length.
    """
    tokenizer = async_engine.tokenizer
    if not tokenizer.has_chat_template:
        raise RequestError("This model has no chat template: use /v1/completions.", param="messages")
    definitions = [tool.for_template() for tool in tools]

    def rendered() -> str:
        return tokenizer.render_chat(
            for_dialect(with_known_roles(for_template(messages), tokenizer), definitions, dialect),
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=definitions if dialect.by_template and definitions else None,
            kwargs={**dialect.defaults, **template_kwargs},
        )

    is_short = len(messages) <= _MANY_MESSAGES and _size(messages, definitions, template_kwargs) <= _LONG_TEXT
    text = await async_engine.render(rendered, at_once=is_short)
    async_engine.check_length(text)
    return text


def _size(messages: Sequence[ChatMessage], tools: list[dict[str, Any]], template_kwargs: dict[str, Any]) -> int:
    """Return the characters that a chat template is given, counted until there are too many for the event loop."""
    size = sum(len(value) for value in template_kwargs.values() if isinstance(value, str))
    for message in messages:
        size += len(message.text or "") + len(message.thought or "")
        size += sum(len(call.function.arguments) for call in message.tool_calls)
    return size if size > _LONG_TEXT or not tools else size + len(repr(tools))


def with_known_roles(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the messages with roles of the chat template.

    ``developer`` is OpenAI's newer name of ``system``: it becomes that where the template does not treat it by name.

    Raises:
        RequestError: the template does not render a role; names those that it does.
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


async def prefix_pins(body: ChatRequest, tokens: array[int], encode: Encode) -> tuple[tuple[int, float], ...]:
    """Return (tokens, seconds) for each mark. Up to a mark are the tokens that the prompt shares with its beginning."""
    return tuple([(await _reach(messages, tokens, encode), mark.seconds) for messages, mark in body.cache_points()])


async def _reach(messages: Sequence[ChatMessage], tokens: array[int], encode: Encode) -> int:
    """Return the number of tokens up to the end of some messages.

    Some templates want a user's message at the end, or refuse any such beginning: then all of the prompt counts.
    """
    for beginning in (messages, [*messages, _NOTHING]):
        try:
            if beginning:
                return num_shared(await encode(beginning), tokens)
        except RequestError:
            continue
    return len(tokens)


def num_shared(first: array[int], second: array[int]) -> int:
    """Return the length of the longest common beginning."""
    most = min(len(first), len(second))
    return bisect_left(range(1, most + 1), True, key=lambda length: first[:length] != second[:length])


def owner_of(body: SamplingFields, caller: Caller) -> Owner:
    return Owner(caller.cache_tenant, body.cache_salt or "")


@contextmanager
def naming_field(field: str) -> Iterator[None]:
    """Make errors about the prompt name the request's field."""
    try:
        yield
    except RequestError as error:
        if error.param in (None, "prompt"):
            error.param = field
        raise
