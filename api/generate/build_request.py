"""Builds checked engine requests from a parsed body: chat template, tokens, sampling parameters, output format."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.errors import ContextTooLong, RequestError
from ...engine.serving.request import TextRequest
from ...engine.text.prompt_cache import Owner
from ...engine.types import SamplingParams
from ...grammar.spec import GrammarSpec
from ..access.caller import Caller
from ..protocol.chat import ChatRequest
from ..protocol.chat_messages import ChatMessage, for_template
from ..protocol.completions import CompletionRequest
from ..protocol.sampling import SamplingFields
from ..protocol.tools import Tool
from ..structured.output_format import OutputFormat, requested_format
from ..structured.reasoning_formats import ReasoningFormat, ThoughtPlan, plan_thought
from ..structured.tool_dialects import Dialect, for_dialect
from ..structured.tool_grammar import tool_output_format
from .completion_answers import EchoedPrompt
from .logprob_formats import Unscored
from .prompt_pins import prefix_pins
from .template_roles import with_known_roles

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine
    from ...engine.text.tokenizer import Tokenizer


# Conversations beyond these are rendered on another thread, so that streams do not wait for them.
_MANY_MESSAGES = 64
_LONG_TEXT = 50_000


class PreparedChat(NamedTuple):
    """The request of a chat, and how to parse its answers.

    Attributes:
        output_format: of the answers, None for free text.
        thought: how to tell thoughts from answers; None if there are none.
    """

    request: TextRequest
    output_format: OutputFormat | None
    thought: ThoughtPlan | None


class ChatPrompt(NamedTuple):
    """The prompt of a chat, and how to parse its answers: as in ``PreparedChat``."""

    tokens: array[int]
    output_format: OutputFormat | None
    thought: ThoughtPlan | None


async def chat_request(
    async_engine: AsyncEngine,
    dialect: Dialect,
    reasoning: ReasoningFormat | None,
    body: ChatRequest,
    adapter: str | None,
    caller: Caller,
    *,
    strict: bool = False,
) -> PreparedChat:
    """Return the request of a chat.

    Args:
        reasoning: how the model marks its thoughts, None for one that does not think.
        strict: refuse more tokens than fit after the prompt, and do not ask for as many as fit.

    Raises:
        RequestError: with the names of the body's fields.
    """
    tokens, output_format, thought = await chat_prompt(async_engine, dialect, reasoning, body, caller)
    with _naming_field("messages"):
        asked = 1 if body.is_prefill_only else body.max_new_tokens
        defaults = async_engine.defaults
        if strict and asked is not None:
            async_engine.limits.check_room(body.length_field, asked, len(tokens))
        max_tokens = async_engine.limits.default_max_tokens(
            len(tokens), defaults.max_tokens if asked is None else asked
        )
        params = body.sampling(
            defaults, max_tokens=max_tokens, logprobs=body.num_logprobs, prompt_logprobs=body.prompt_logprobs
        )
        grammar = None if output_format is None else output_format.spec
        # Checked before the marks, each of which has a part of the prompt rendered again.
        request = async_engine.limits.check(_text_request(body, tokens, params, grammar, adapter, caller))
        encode = partial(_beginning, async_engine, dialect, body, _owner(body, caller))
        if pins := await prefix_pins(body, tokens, encode):
            request = async_engine.limits.check(replace(request, prefix_pins=pins))
        if output_format is not None and output_format.tools is not None:
            # A tool call may open with a special token, and the grammar permits no other special token.
            request = replace(request, skip_special_tokens=False)
        if thought is not None:
            request = await _with_thought(request, thought, body.thought_budget, async_engine)
        return PreparedChat(request, output_format, thought)


async def _beginning(
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


async def chat_prompt(
    async_engine: AsyncEngine, dialect: Dialect, reasoning: ReasoningFormat | None, body: ChatRequest, caller: Caller
) -> ChatPrompt:
    """Return the tokens of a chat as its request would have them. Raises as ``chat_request`` does."""
    output_format = requested_format(body)
    if body.functions:
        output_format = tool_output_format(
            body.tools, body.tool_choice, dialect.format, output_format, parallel=body.parallel_tool_calls
        )
    # The engine always draws one token; where none is asked for, it is dropped, and has no output format.
    output_format = None if body.is_prefill_only else output_format
    plan = None if output_format is None else output_format.tools
    with _naming_field("messages"):
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
        tokens = await async_engine.encode(text, add_special_tokens=body.add_special_tokens, owner=_owner(body, caller))
        return ChatPrompt(tokens, output_format, thought)


async def _with_thought(
    request: TextRequest, thought: ThoughtPlan, budget: int | None, async_engine: AsyncEngine
) -> TextRequest:
    """Return the request with what the engine has to know of the thought, and marks that have text."""
    form = thought.format
    texts = (form.start, form.end, form.lead)
    marks = [await async_engine.encode(mark, add_special_tokens=False, owner=Owner()) for mark in texts]
    shown = frozenset(token for mark in marks for token in mark) & async_engine.tokenizer.special_ids
    rules = thought.rules(budget) if request.grammar is not None or budget is not None else None
    return replace(request, shown_tokens=shown, reasoning=rules)


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


async def completion_requests(
    async_engine: AsyncEngine,
    body: CompletionRequest,
    grammar: GrammarSpec | None,
    adapter: str | None,
    caller: Caller,
    *,
    strict: bool = False,
) -> list[TextRequest]:
    """Return one request for each prompt, all checked before any is submitted. Raises RequestError.

    Args:
        strict: refuse more tokens than fit after a prompt, and do not ask for as many as fit.
    """
    requests = []
    for number, prompt in enumerate(body.prompts):
        name = "prompt" if len(body.prompts) == 1 else f"prompt[{number}]"
        with _naming_field(name):
            request = await _completion_request(
                async_engine, body, name, prompt, grammar, adapter, caller, strict=strict
            )
            requests.append(request)
    return requests


async def _completion_request(
    async_engine: AsyncEngine,
    body: CompletionRequest,
    name: str,
    prompt: str | list[int],
    grammar: GrammarSpec | None,
    adapter: str | None,
    caller: Caller,
    *,
    strict: bool,
) -> TextRequest:
    if isinstance(prompt, str):
        async_engine.check_length(prompt)
        tokens = await async_engine.encode(
            prompt, add_special_tokens=body.add_special_tokens, owner=_owner(body, caller)
        )
    else:
        if len(prompt) > async_engine.max_model_len:  # before every id is looked at
            raise ContextTooLong(len(prompt), max(1, body.max_tokens), async_engine.max_model_len)
        tokens = token_array(name, prompt, async_engine.vocab_size)
    max_tokens = max(1, body.max_tokens)  # the engine always draws one token; where none is asked for, it is dropped
    if strict:
        async_engine.limits.check_room("max_tokens", max_tokens, len(tokens))
    elif tokens:
        max_tokens = async_engine.limits.default_max_tokens(len(tokens), max_tokens)
    scored = [count for count in (body.echoed_logprobs, body.prompt_logprobs) if count is not None]
    params = body.sampling(
        async_engine.defaults,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max(scored, default=None),
        logprob_start_len=body.logprob_start_len,
    )
    return async_engine.limits.check(_text_request(body, tokens, params, grammar, adapter, caller))


def token_array(field: str, ids: list[int], vocab_size: int) -> array[int]:
    """Return a client's token ids. Raises RequestError, with the field's name, for one outside of the vocabulary."""
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"'{field}' must hold token ids from 0 to {vocab_size - 1}, not {token} (at position {position}).",
                param=field,
            )
    return array("i", ids)


def _owner(body: SamplingFields, caller: Caller) -> Owner:
    return Owner(caller.cache_tenant, body.cache_salt or "")


def _text_request(
    body: SamplingFields,
    tokens: array[int],
    params: SamplingParams,
    grammar: GrammarSpec | None,
    adapter: str | None,
    caller: Caller,
) -> TextRequest:
    return TextRequest(
        tokens=tokens,
        params=params,
        stop=body.stop_strings,
        include_stop=body.include_stop_str_in_output,
        n=body.n,
        adapter=adapter,
        salt=body.cache_salt or "",
        skip_special_tokens=body.skip_special_tokens,
        grammar=grammar,
        tenant=caller.key.tenant,
        cache_tenant=caller.cache_tenant,
        priority=caller.priority(body.priority_class),
        timeout=caller.seconds_left,
        session=body.session,
        pin_seconds=body.pin_seconds,
    )


def echoed_prompts(
    async_engine: AsyncEngine, body: CompletionRequest, requests: Sequence[TextRequest]
) -> list[EchoedPrompt]:
    """Return the prompts for ``echo``: a text unchanged, token ids as their text."""
    return [
        _echoed_prompt(async_engine.tokenizer, body, prompt, request)
        for prompt, request in zip(body.prompts, requests, strict=True)
    ]


def _echoed_prompt(
    tokenizer: Tokenizer, body: CompletionRequest, prompt: str | list[int], request: TextRequest
) -> EchoedPrompt:
    skip = body.skip_special_tokens
    head = request.tokens[: max(1, body.logprob_start_len)]
    unscored = tuple(Unscored(token, tokenizer.token_bytes(token)) for token in head)
    silent = tokenizer.special_ids if skip else frozenset()
    shown = request.tokens if body.return_token_ids else ()
    if not body.echo:
        return EchoedPrompt("", (), len(request.tokens), silent, tokens=shown)
    text = prompt if isinstance(prompt, str) else tokenizer.decode(request.tokens, skip)
    lead = len(tokenizer.join_bytes(request.tokens, skip).decode(errors="replace")) - len(text)
    return EchoedPrompt(text, unscored, len(request.tokens), silent, max(0, lead), shown)


@contextmanager
def _naming_field(field: str) -> Iterator[None]:
    """Make errors about the prompt name the request's field."""
    try:
        yield
    except RequestError as error:
        if error.param in (None, "prompt"):
            error.param = field
        raise
