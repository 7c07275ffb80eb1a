"""Streams: runs the generation of one HTTP request: admission, deltas, usage records, abort on disconnect."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from starlette.types import Receive

from ...engine.errors import DeadlineExceeded, EngineError, UnknownModel
from ...engine.serving.output_processor import Finish, SequenceOutput, TextDelta
from ...engine.types import FinishReason
from ...fleet.catalog.model_versions import engine_name
from ...grammar.spec import GrammarSpec
from ..access.caller import Caller, GenerationFacts
from ..errors import Rejection, error_code
from ..observe.request_observer import RequestEnd, RequestObserver
from ..observe.token_usage import UsageCount
from ..observe.usage_ledger import UsageRecord
from ..structured.field_readers import FieldReaders
from ..structured.output_check import OutputCheck
from ..structured.output_format import OutputFormat
from ..structured.reasoning_parser import ReasoningParser
from ..structured.thought_plan import ThoughtPlan
from .server_state import ServerState

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine
    from ...engine.serving.request import TextRequest

T = TypeVar("T")

Deltas = AsyncGenerator[list[TextDelta], None]
"""Each item holds the deltas of all sequences that arrived together."""


class DeltaSource(Protocol):
    """Interface of an object that runs the engine requests of one HTTP request, such as ``AsyncEngine``."""

    def stream(self, *requests: TextRequest) -> AsyncGenerator[list[TextDelta], None]: ...


class ClientGone(Exception):
    """Raised if the client has closed its connection before the end of the response."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. If the client closes its connection, cancel the work and raise ClientGone.

    The work starts at once in the caller's task. So if requests arrive together, the engine gets the first one while
    the others are being parsed.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelling, is_gone = task.cancelling(), False

    async def watch() -> None:
        nonlocal is_gone
        # An error of the connection also means that the client has disconnected.
        with suppress(Exception):
            await _disconnected(receive)
        is_gone = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await work
    except (asyncio.CancelledError, Exception):
        if is_gone and task.uncancel() <= cancelling:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def generate(
    state: ServerState,
    async_engine: DeltaSource,
    requests: Sequence[TextRequest],
    caller: Caller,
    output_format: OutputFormat | None = None,
    usage: UsageCount | None = None,
    thought: ThoughtPlan | None = None,
) -> Deltas:
    """Run checked requests together. Closing the generator before its end aborts all of them.

    If there is a usage ledger, the generator ends only when the usage is recorded in it. Errors of the engine about the
    grammar name the field of the request. An answer that does not have the output format ends with the reason
    ``error``.

    Args:
        async_engine: the engine, or reader, for which the requests were built.
        caller: the caller, to whom places in the queue and tokens are charged. At the end, counts and times are added
            to its facts.
        output_format: the output format of every answer.
        usage: gets the sums of the token counts; complete when the generator has ended.
        thought: rules for separating the reasoning from the answer; None without reasoning.

    Raises:
        Rejection: the requests are not admitted.
    """
    state.engine.serving()
    try:
        ticket = await state.limits.admit(caller, requests)
    except Rejection as error:
        state.observers.metrics.count_rejection(error.reason)
        raise
    observer = RequestObserver(state.observers.metrics, requests, ticket, usage or UsageCount())
    check = None
    if output_format is not None:
        state.observers.metrics.count_structured(output_format.kind)
        check = OutputCheck(output_format, state.stores.validators)
    parser = (
        None if thought is None else ReasoningParser(thought, cast("AsyncEngine", async_engine).tokenizer.token_bytes)
    )
    fields = None
    if output_format is not None and output_format.form is not None and requests[0].params.allowed_logprobs:
        fields = _field_readers(cast("AsyncEngine", async_engine), requests[0], output_format.form, thought)
    # The parsers decide by the text which tokens belong to the reasoning or to a call. Token by token, the logprobs of
    # the others do not depend on how many tokens arrive together.
    parses = parser is not None or (output_format is not None and output_format.tools is not None)
    splits = parses and requests[0].params.logprobs is not None
    state.limits.active += 1
    reason, is_unknown = "abort", False
    try:
        with nullcontext() if output_format is None else output_format.locating_errors():
            async with aclosing(async_engine.stream(*requests)) as stream:
                async for deltas in stream:
                    if fields is not None:
                        deltas = [fields.read(delta) for delta in deltas]
                    if splits:
                        deltas = [part for delta in deltas for part in delta.by_token()]
                    if parser is not None:
                        deltas = [parser.parse(delta) for delta in deltas]
                    checked = deltas if check is None else await check.check(deltas)
                    observer.observe(checked)
                    yield checked
    except Exception as error:
        reason = "timeout" if isinstance(error, DeadlineExceeded) else "error"
        caller.facts.error, is_unknown = error_code(error), isinstance(error, UnknownModel)
        raise
    finally:
        state.limits.active -= 1
        if check is not None and check.num_broken:
            state.observers.metrics.count_broken(check.num_broken)
            caller.facts.error = "structured_answer_broken"
        # Clients choose model names. The name of a model that does not exist would stay in the ledger for ever, so it
        # is not counted.
        counts = not is_unknown and (caller.usage_id is None or observer.is_complete)
        end = observer.end(reason)
        _tell(state, caller, requests, end)
        written = _record(state, caller, end) if counts else None
    if written is not None and (recorder := state.stores.recorder) is not None:
        await recorder.until_written(written)


def _field_readers(
    async_engine: AsyncEngine, request: TextRequest, form: GrammarSpec, thought: ThoughtPlan | None
) -> FieldReaders:
    tokenizer = async_engine.tokenizer
    ends = frozenset((*tokenizer.special_ids, *request.params.stop_token_ids))
    return FieldReaders(form, tokenizer.token_bytes, ends, thought)


def _tell(state: ServerState, caller: Caller, requests: Sequence[TextRequest], end: RequestEnd) -> None:
    """Record the end of a request in the log, in the usage of its key, and in its trace."""
    facts, adapter = caller.facts, requests[0].adapter
    facts.tenant, facts.generation = caller.key.tenant, _generation_facts(end, adapter)
    state.observers.metrics.count_usage(caller.key.name, adapter, end.tokens, state.models.adapters)
    if state.observers.tracer is not None:
        facts.trace_id = state.observers.tracer.record(caller, requests, end)


def _generation_facts(end: RequestEnd, adapter: str | None) -> GenerationFacts:
    tokens, facts = end.tokens, GenerationFacts()
    if (measured := end.measured) is not None:
        facts = GenerationFacts(
            queue_seconds=_rounded(measured.queued, 6),
            prefill_seconds=_rounded(measured.prefill, 6),
            decode_seconds=_rounded(measured.decode, 6),
            batch_size=_rounded(measured.batch_size, 2),
            kv_pages=measured.kv_pages,
            preemptions=measured.preemptions,
        )
    return replace(
        facts,
        first_token_seconds=_rounded(end.first_token_seconds, 6),
        tokens_per_second=_rounded(end.tokens_per_second, 2),
        completion_tokens=tokens.completion,
        cached_tokens=tokens.cached,
        drafted_tokens=tokens.drafted,
        finished=end.finished,
        adapter=adapter,
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _record(state: ServerState, caller: Caller, end: RequestEnd) -> asyncio.Future[None] | None:
    """Record the token counts of a finished request in the ledger. Returns None if there is no ledger."""
    recorder = state.stores.recorder
    if recorder is None:
        return None
    tokens = end.tokens
    return recorder.put(
        UsageRecord(
            id=caller.usage_id or uuid.uuid4().hex,
            ended=time.time(),
            key=caller.key.name,
            model=ledger_model(state, caller),
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            completion_tokens=tokens.completion,
        )
    )


def ledger_model(state: ServerState, caller: Caller) -> str:
    """Return the model name under which usage is counted.

    For a catalogue version, it includes the digest's first digits.
    """
    model, version = caller.facts.model or state.models.names[0], caller.facts.version
    return model if version is None else engine_name(model, version)


def at_intervals(deltas: Deltas, num_tokens: int) -> Deltas:
    """Join deltas, so that each holds at least ``num_tokens`` tokens of a sequence (vLLM's stream interval).

    The first tokens of a sequence are yielded at once, and the last ones with the end of the sequence or before an
    error. With 1, nothing is changed.
    """
    return deltas if num_tokens == 1 else _gathered(deltas, num_tokens)


async def _gathered(deltas: Deltas, num_tokens: int) -> Deltas:
    held: dict[tuple[int, int], TextDelta] = {}
    begun: set[tuple[int, int]] = set()
    try:
        async with aclosing(deltas) as stream:
            async for arrived in stream:
                due = []
                for new in arrived:
                    sequence = new.prompt, new.index
                    delta = _joined(held.pop(sequence), new) if sequence in held else new
                    if sequence in begun and delta.finish is None and len(delta.tokens) < num_tokens:
                        held[sequence] = delta
                    else:
                        due.append(delta)
                    if delta.tokens:
                        begun.add(sequence)
                if due:
                    yield due
    except Exception:
        if held:
            yield list(held.values())
        raise


def _joined(first: TextDelta, second: TextDelta) -> TextDelta:
    """Join two successive deltas of a sequence."""
    return replace(
        second,
        text=first.text + second.text,
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        reasoning=first.reasoning + second.reasoning,
        pooled=first.pooled + second.pooled,
        fields=first.fields + second.fields,
        pieces=(),
    )


async def silenced(deltas: Deltas) -> Deltas:
    """Yield the deltas of a request for no tokens.

    They have no generated text and no tokens, and each answer ends with reason ``length``.
    """
    async with aclosing(deltas) as stream:
        async for arrived in stream:
            yield [_silent(delta) for delta in arrived]


def _silent(delta: TextDelta) -> TextDelta:
    finish = delta.finish and replace(delta.finish, reason=FinishReason.LENGTH, stop_reason=None, stop_token=None)
    return replace(delta, text="", reasoning="", tokens=(), logprobs=(), fields=(), finish=finish)


def failure_of(finish: Finish | None) -> EngineError | None:
    """Return the error of an answer that a failure has cut off; None for a complete or a running answer."""
    match None if finish is None else finish.reason:
        case FinishReason.TIMEOUT:
            return DeadlineExceeded("The request timed out.")
        case FinishReason.ABORT:
            return EngineError("The engine aborted the answer.")
        case FinishReason.ERROR:
            return EngineError("The answer does not match the requested format.")
    return None


class ReplyEnd:
    """The end of an answer, in the form that the replies of all protocols use."""

    _finish: Finish | None = None

    @property
    def failure(self) -> EngineError | None:
        """Return the error of an answer that a failure has cut off; None if there was no failure."""
        return failure_of(self._finish)

    def ended(self) -> Finish:
        """Return the end of a complete answer.

        Raises ``failure`` if it is set, and EngineError if the answer has not ended.
        """
        if self._finish is None:
            raise EngineError("The engine did not finish the answer.")
        if self.failure is not None:
            raise self.failure
        return self._finish


async def take_all(deltas: Deltas, take: Callable[[TextDelta], object]) -> None:
    """Call ``take`` with every delta. For requests without streaming."""
    async with aclosing(deltas) as stream:
        async for arrived in stream:
            for delta in arrived:
                take(delta)


async def collect(deltas: Deltas) -> dict[tuple[int, int], SequenceOutput]:
    """Collect the whole outputs by (prompt, index). For requests without streaming."""
    outputs: defaultdict[tuple[int, int], SequenceOutput] = defaultdict(SequenceOutput)
    await take_all(deltas, lambda delta: outputs[delta.prompt, delta.index].add(delta))
    return outputs
