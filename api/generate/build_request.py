"""Request building: builds checked engine requests from parsed bodies: prompt, sampling parameters, output format."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ...engine.errors import ContextTooLong, RequestError
from ...engine.serving.request import TextRequest, spellings_of_bad_words
from ...engine.text.prompt_cache import Owner
from ...engine.types import SamplingParams
from ...grammar.spec import GrammarSpec
from ..access.caller import Caller
from ..large_bodies import beside_loop
from ..protocol.chat import ChatRequest
from ..protocol.completions import CompletionRequest
from ..protocol.sampling import SamplingFields
from ..structured.output_format import OutputFormat
from ..structured.thought_plan import ThoughtPlan
from .chat_prompt import chat_prompt, owner_of, plan_chat, prefix_pins
from .completion_answers import EchoedPrompt
from .logprob_formats import Unscored
from .model_directory import ModelTarget

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine
    from ...engine.text.tokenizer import Tokenizer


class PreparedChat(NamedTuple):
    """The engine request of a chat, and the rules for parsing its answers.

    Attributes:
        output_format: the output format of the answers, None for free text.
        thought: rules for separating the reasoning from the answer; None if the model does not reason.
    """

    request: TextRequest
    output_format: OutputFormat | None
    thought: ThoughtPlan | None


async def chat_tokens(target: ModelTarget, body: ChatRequest, caller: Caller) -> array[int]:
    """Return the prompt's tokens, which are those of ``chat_request``.

    Raises like ``plan_chat`` and ``chat_prompt``.
    """
    plan = await beside_loop(partial(plan_chat, target, body, caller))
    with _naming_field("messages"):
        return (await chat_prompt(target, plan)).tokens


async def chat_request(target: ModelTarget, body: ChatRequest, caller: Caller, *, strict: bool = False) -> PreparedChat:
    """Build the engine request of a chat.

    Args:
        strict: whether to refuse a request for more tokens than fit after the prompt, instead of reducing the number.

    Raises:
        RequestError: a field is refused; the message has the field's name in the body.
    """
    plan = await beside_loop(partial(plan_chat, target, body, caller))
    with _naming_field("messages"):
        prompt = await chat_prompt(target, plan)
        params = _chat_params(target, body, len(prompt.tokens), strict=strict)
        params = await _with_bad_words(target, body, params, caller)
        grammar = None if plan.output_format is None else plan.output_format.spec
        request = _text_request(body, prompt.tokens, params, grammar, target.adapter, caller)
        if plan.tools is not None:
            # A tool call may begin with a special token. The grammar permits no other special tokens.
            request = replace(request, skip_special_tokens=False)
        if prompt.thought is not None:
            request = await _with_thought(request, prompt.thought, body.thought_budget, target.engine)
        request = target.engine.limits.check(request)
        if plan.marks:
            # For each mark, a part of the prompt must be rendered again, so the pins are computed after all other
            # checks.
            request = replace(request, prefix_pins=await prefix_pins(target, plan, prompt.tokens))
        return PreparedChat(request, plan.output_format, prompt.thought)


def _chat_params(target: ModelTarget, body: ChatRequest, num_prompt: int, *, strict: bool) -> SamplingParams:
    """Return the sampling parameters of a chat. Raises like ``RequestLimits.check_room``."""
    limits, defaults = target.engine.limits, target.engine.defaults
    asked, field = body.asked_length()
    if strict and asked is not None:
        limits.check_room(field, asked, num_prompt)
    max_tokens = limits.default_max_tokens(num_prompt, defaults.max_tokens if asked is None else asked)
    return body.sampling(
        defaults, max_tokens=max_tokens, logprobs=body.num_logprobs, prompt_logprobs=body.prompt_logprobs
    )


async def _with_bad_words(
    target: ModelTarget, body: SamplingFields, params: SamplingParams, caller: Caller
) -> SamplingParams:
    """Return the parameters with the tokens of the body's ``bad_words`` added. Raises RequestError."""
    if not body.bad_words:
        return params
    texts = spellings_of_bad_words(body.bad_words)
    owner = owner_of(body, caller)
    words = [await target.engine.encode(text, add_special_tokens=False, owner=owner) for text in texts]
    return replace(params, bad_words=tuple(map(tuple, words)))


async def _with_thought(
    request: TextRequest, thought: ThoughtPlan, budget: int | None, async_engine: AsyncEngine
) -> TextRequest:
    """Return the request with the engine's rules for the reasoning. The marks of the reasoning are kept in the text."""
    form = thought.format
    texts = (form.start, form.end, form.lead)
    marks = [await async_engine.encode(mark, add_special_tokens=False, owner=Owner()) for mark in texts]
    shown = frozenset(token for mark in marks for token in mark) & async_engine.tokenizer.special_ids
    rules = thought.rules(budget) if request.grammar is not None or budget is not None else None
    return replace(request, shown_tokens=shown, reasoning=rules)


async def completion_requests(
    target: ModelTarget,
    body: CompletionRequest,
    grammar: GrammarSpec | None,
    caller: Caller,
    *,
    strict: bool = False,
) -> list[TextRequest]:
    """Build one request for each prompt. All are checked before any of them is submitted. Raises RequestError.

    Args:
        strict: whether to refuse more tokens than fit after a prompt, instead of reducing the number.
    """
    requests = []
    for number, prompt in enumerate(body.prompts):
        name = "prompt" if len(body.prompts) == 1 else f"prompt[{number}]"
        with _naming_field(name):
            request = await _completion_request(target, body, name, prompt, grammar, caller, strict=strict)
            requests.append(request)
    return requests


async def _completion_request(
    target: ModelTarget,
    body: CompletionRequest,
    name: str,
    prompt: str | list[int],
    grammar: GrammarSpec | None,
    caller: Caller,
    *,
    strict: bool,
) -> TextRequest:
    async_engine = target.engine
    if isinstance(prompt, str):
        async_engine.check_length(prompt)
        tokens = await async_engine.encode(
            prompt, add_special_tokens=body.add_special_tokens, owner=owner_of(body, caller)
        )
    else:
        # A prompt that is too long is refused before its ids are checked.
        if len(prompt) > async_engine.max_model_len:
            raise ContextTooLong(len(prompt), max(1, body.max_tokens), async_engine.max_model_len)
        tokens = token_array(name, prompt, async_engine.vocab_size)
    # The engine always samples at least one token. If the client requests none, the token is dropped.
    max_tokens = max(1, body.max_tokens)
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
    params = await _with_bad_words(target, body, params, caller)
    return async_engine.limits.check(_text_request(body, tokens, params, grammar, target.adapter, caller))


def token_array(field: str, ids: list[int], vocab_size: int) -> array[int]:
    """Convert a client's token ids. Raises RequestError, which names the field, for an id outside of the vocabulary."""
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"'{field}' must hold token ids from 0 to {vocab_size - 1}, not {token} (at position {position}).",
                param=field,
            )
    return array("i", ids)


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
        grammar=grammar,
        adapter=adapter,
        tenant=caller.key.tenant,
        cache_tenant=caller.cache_tenant,
        priority=caller.priority(body.priority_class),
        timeout=caller.seconds_left,
        **body.request_fields(),
    )


def echoed_prompts(
    async_engine: AsyncEngine, body: CompletionRequest, requests: Sequence[TextRequest]
) -> list[EchoedPrompt]:
    """Return the prompts in the form for ``echo``: texts unchanged, token ids decoded to text."""
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
    """Context manager: errors about the prompt that the block raises name this field of the request."""
    try:
        yield
    except RequestError as error:
        if error.param in (None, "prompt"):
            error.param = field
        raise
