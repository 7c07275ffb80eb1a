"""Pooled reads: computes the pooled values of many texts, such as embeddings, as one admitted request."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...engine.errors import ContextTooLong, RequestError
from ...engine.serving.output_processor import Finish, TextDelta
from ...engine.serving.pooled_values import num_left_out
from ...engine.serving.request import TextRequest
from ...engine.serving.request_threads import on_request_thread
from ...engine.types import FinishReason, Pooling, SamplingParams, Usage
from ..access.caller import Caller
from ..protocol.pooled import InputFields, PooledFields
from .build_request import token_array
from .sequence_windows import WINDOW, deadline_of, run_window, usage_of

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine


class PooledReader:
    """Computes the pooled values of prompts. ``generate`` uses its ``stream`` instead of an engine's.

    Attributes:
        request: the request that represents all reads for admission.
        pooled: pooled values of each prompt, 32-bit floats; set when the stream has ended.
        cached: number of tokens whose KV was in the prefix cache.
    """

    def __init__(self, engine: AsyncEngine, requests: Sequence[TextRequest], caller: Caller) -> None:
        self._engine = engine
        self._requests = requests
        self._caller = caller
        self._num_tokens = sum(len(each.tokens) for each in requests)
        self.request = replace(requests[0], tokens=array("i", bytes(array("i").itemsize * self._num_tokens)))
        self.pooled: list[bytes] = []
        self.cached = 0

    async def stream(self, *_requests: TextRequest) -> AsyncGenerator[list[TextDelta], None]:
        """Compute all prompts, and yield one delta at the end. Raises like ``AsyncEngine.stream``."""
        deadline = deadline_of(self._caller)
        for begin in range(0, len(self._requests), WINDOW):
            for output in await run_window(self._engine, self._requests[begin : begin + WINDOW], deadline):
                self.cached += usage_of(output).cached
                self.pooled.append(output.pooled)
        usage = Usage(self._num_tokens, self.cached, 0)
        yield [TextDelta(0, "", finish=Finish(FinishReason.STOP, usage))]


async def plan_pooled(
    engine: AsyncEngine,
    adapter: str | None,
    body: InputFields,
    caller: Caller,
    pooling: Pooling,
    before: str = "",
    *,
    truncate: bool = False,
) -> PooledReader:
    """Build the reader for a request's texts.

    Args:
        before: text that is put before each input, unless the input is a list of token ids.
        truncate: whether to cut off the ends of inputs that are too long.

    Raises:
        RequestError: an input has no token, or a token is outside of the vocabulary.
        ContextTooLong: an input does not fit.
    """
    base = pooled_request(body, adapter, caller, pooling)

    def requests() -> list[TextRequest]:
        listed = enumerate(body.listed)
        return [text_request(engine, base, body.place(at), each, before, truncate=truncate) for at, each in listed]

    # Thousands of texts are encoded. On the event loop this would block other streams.
    return PooledReader(engine, await on_request_thread(requests), caller)


def pooled_request(body: PooledFields, adapter: str | None, caller: Caller, pooling: Pooling) -> TextRequest:
    """Return the request from which the requests of all prompts are derived."""
    return TextRequest(
        tokens=array("i"),
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=pooling),
        adapter=adapter,
        salt=body.cache_salt or "",
        tenant=caller.key.tenant,
        cache_tenant=caller.cache_tenant,
        priority=caller.priority(body.priority_class),
    )


def text_request(
    engine: AsyncEngine, base: TextRequest, field: str, given: str | list[int], before: str, *, truncate: bool = False
) -> TextRequest:
    """Return the request for a text after the prompt ``before``, or for token ids. Raises like ``plan_pooled``.

    Args:
        truncate: whether to cut off the end of a text that is too long.
    """
    longest = engine.pooler.max_length or engine.max_model_len
    try:
        if isinstance(given, str):
            tokens = _cut_tokens(engine, before + given) if truncate else _tokens_of(engine, before + given)
            base = _without_prompt(engine, base, before, len(tokens))
        else:
            # A prompt that is too long is refused before its ids are checked.
            if len(given) > engine.max_model_len:
                raise ContextTooLong(len(given), 1, engine.max_model_len)
            tokens = token_array(field, given, engine.vocab_size)
        if len(tokens) > longest:
            raise ContextTooLong(len(tokens), 0, longest)
        return engine.limits.check(replace(base, tokens=tokens))
    except RequestError as error:
        error.param = field
        raise


def _tokens_of(engine: AsyncEngine, text: str) -> array[int]:
    engine.check_length(text)
    return engine.tokenizer.encode(text, True)


def _cut_tokens(engine: AsyncEngine, text: str) -> array[int]:
    """Return the tokens of a text.

    If there are too many, return the first ones that fit, with the special tokens at the end.
    """
    # One token is sampled after every prompt, and it also needs a position.
    longest = min(engine.pooler.max_length or engine.max_model_len, engine.max_model_len - 1)
    tokenizer = engine.tokenizer
    while len(text) > longest and tokenizer.fewest_tokens(half := text[: len(text) // 2]) > longest:
        text = half
    tokens = tokenizer.encode(text, True)
    if len(tokens) <= longest:
        return tokens
    ends = next((at for at, token in enumerate(reversed(tokens)) if token not in tokenizer.special_ids), 0)
    return tokens[: longest - ends] + tokens[len(tokens) - ends :]


def _without_prompt(engine: AsyncEngine, base: TextRequest, before: str, num_tokens: int) -> TextRequest:
    """Return a request that excludes the prompt's tokens from pooling, if the checkpoint excludes them."""
    if not before or engine.pooler.includes_prompt:
        return base
    left_out = num_left_out(engine.tokenizer.encode(before, True), engine.tokenizer.special_ids, num_tokens)
    return replace(base, params=replace(base.params, pooled_from=left_out))
