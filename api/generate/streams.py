"""The deltas of all sequences of one HTTP request, measured and counted, and given up when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive

from ...engine.errors import DeadlineExceeded
from ...engine.types import FinishReason
from ..access.caller import Caller
from ..errors import Rejection
from ..observe.request_timer import RequestTimer
from ..observe.usage_ledger import until_written
from ..structured.output_check import OutputCheck
from ..structured.output_format import OutputFormat
from .server_state import ServerState
from .usage_record import record_usage

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine
    from ...engine.serving.output_processor import TextDelta
    from ...engine.serving.request import TextRequest

T = TypeVar("T")

Deltas = AsyncGenerator[tuple[int, "list[TextDelta]"], None]
"""(number of the prompt, what came for its sequences in one go)."""


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled, and ClientGone raised, when the client closes its connection."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def generate(
    state: ServerState,
    requests: Sequence[TextRequest],
    caller: Caller,
    output_format: OutputFormat | None = None,
    *,
    drop_completion: bool = False,
) -> Deltas:
    """Run requests that ``Frontend.check`` has passed, all at once. Closing it early aborts all of them.

    It comes to its end only when what was used is in the ledger, if there is one.

    Args:
        caller: whose queue places and tokens they use; counts and times are added to its facts at the end.
        promise: the form of every answer, watched over here.
        drop_completion: generated tokens were not asked for, and are not counted as used.

    Raises:
        Rejection: they are not taken now.
    """
    async_engine = state.serving()
    try:
        ticket = state.admission.admit(caller, requests)
    except Rejection as error:
        state.metrics.count_rejection(error.reason)
        raise
    timer = RequestTimer(state.metrics, requests, drop_completion=drop_completion)
    for request in requests:
        state.metrics.prompt_tokens.observe(len(request.tokens))
        state.metrics.params_n.observe(request.n)
        state.metrics.params_max_tokens.observe(request.params.max_tokens)
    state.active += 1
    reason = "abort"
    try:
        stream_of_all = _merged(async_engine, requests)
        if output_format is not None:
            state.metrics.count_structured(output_format.kind)
            stream_of_all = _watched(state, stream_of_all, output_format)
        async with aclosing(stream_of_all) as stream:
            async for prompt, deltas in stream:
                timer.note(prompt, deltas)
                ticket.note(prompt, deltas)
                yield prompt, deltas
    except DeadlineExceeded:
        reason = "timeout"
        raise
    except Exception:
        reason = "error"
        raise
    finally:
        state.active -= 1
        ticket.close()
        counted = record_usage(state, caller, requests, timer.end(reason))
    if counted is not None:
        await until_written(counted)


async def silenced(deltas: Deltas) -> Deltas:
    """The deltas without what was generated: each answer is empty and at its limit."""
    async with aclosing(deltas) as stream:
        async for prompt, several in stream:
            yield prompt, [_silent(delta) for delta in several]


def _silent(delta: TextDelta) -> TextDelta:
    finish = delta.finish and replace(delta.finish, reason=FinishReason.LENGTH, stop_reason=None)
    return replace(delta, text="", tokens=(), logprobs=(), finish=finish)


async def _watched(state: ServerState, deltas: Deltas, output_format: OutputFormat) -> Deltas:
    """Refusals name the request's field, and answers that break the promise end in ``error``."""
    net = OutputCheck(output_format, state.validators)
    try:
        with output_format.locating_errors():
            async with aclosing(deltas) as stream:
                async for prompt, several in stream:
                    yield prompt, await net.check(prompt, several)
    finally:
        state.metrics.count_broken(net.num_broken)


async def _merged(async_engine: AsyncEngine, requests: Sequence[TextRequest]) -> Deltas:
    if len(requests) == 1:
        async with aclosing(async_engine.stream(requests[0])) as stream:
            async for deltas in stream:
                yield 0, deltas
        return
    # Not bounded by itself: each sequence puts at most max_tokens items here.
    arrived: asyncio.Queue[tuple[int, list[TextDelta]] | None] = asyncio.Queue()

    async def pump(number: int, request: TextRequest) -> None:
        async with aclosing(async_engine.stream(request)) as stream:
            async for deltas in stream:
                arrived.put_nowait((number, deltas))

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number, request in enumerate(requests):
                    group.create_task(pump(number, request))
        finally:
            arrived.put_nowait(None)

    pumps = asyncio.create_task(pump_all())
    try:
        while (item := await arrived.get()) is not None:
            yield item
        await pumps
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        pumps.cancel()
        await asyncio.gather(pumps, return_exceptions=True)
