"""Bodies and chunks of long answers: their work is cut into parts, or leaves the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest

from rootgraft.api.generate.envelope import Envelope, chunk_events, long_response
from rootgraft.api.generate.logprob_formats import PIECE, CompletionLogprobs, chat_logprobs, written_chat_logprobs
from rootgraft.api.large_bodies import LARGE_BODY
from rootgraft.api.observe.token_usage import UsageCount
from rootgraft.engine.serving.output_processor import SequenceOutput, TextDelta, TokenLogprob, TopLogprob


def scored(count: int) -> tuple[TokenLogprob, ...]:
    top = tuple(TopLogprob(token, f"{token}é", f"{token}é".encode(), -float(token)) for token in range(3))
    return tuple(TokenLogprob(at, f"{at} ", f"{at} ".encode(), -0.5, 1, top) for at in range(count))


@pytest.mark.parametrize("count", [0, 1, PIECE, PIECE + 1, 2 * PIECE + 5])
def test_what_is_serialized_in_pieces_is_the_same(count: int) -> None:
    tokens = scored(count)
    whole = orjson.dumps(chat_logprobs(tokens, 2))
    assert orjson.dumps(written_chat_logprobs(tokens, 2)) == whole
    assert orjson.dumps(CompletionLogprobs(2).written(tokens)) == orjson.dumps(CompletionLogprobs(2).piece(tokens))


@pytest.mark.parametrize(
    ("output", "is_long"),
    [
        (SequenceOutput(texts=["short"], logprobs=[*scored(PIECE)]), False),
        (SequenceOutput(logprobs=[*scored(PIECE)], prompt_logprobs=[*scored(1)]), True),
        (SequenceOutput(texts=["x" * LARGE_BODY]), False),
        (SequenceOutput(texts=["x" * LARGE_BODY, "x"]), True),
    ],
)
async def test_a_long_body_is_built_off_the_event_loop(output: SequenceOutput, is_long: bool) -> None:
    """Sixteen answers with 20 logprobs for each of 8,000 tokens took ten seconds on the event loop."""
    threads = []

    def build() -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {"id": "1"}

    response = await long_response(build, [output])
    assert bytes(response.body) == b'{"id":"1"}'
    assert (threads[0] is not threading.current_thread()) is is_long


class NumberedChunks:
    envelope, include_usage = Envelope("1", "chunk", 0, "m", "f"), False

    def events(self, delta: TextDelta) -> bytes:
        return b"" if delta.index % 7 == 6 else b"%d," % delta.index


@pytest.mark.parametrize(("positions", "parts"), [(0, 1), (PIECE // 2, 14), (PIECE + 1, 40)])
async def test_deltas_that_have_gathered_for_long_are_sent_in_parts(positions: int, parts: int) -> None:
    """A client that reads slowly gets many deltas at once. Between parts with many logprobs, others have their turn."""

    async def gathered() -> AsyncGenerator[list[TextDelta], None]:
        yield [TextDelta(index, "", prompt_logprobs=scored(positions)) for index in range(40)]

    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    got = [item async for item in chunk_events(gathered(), NumberedChunks(), UsageCount())]
    task.cancel()
    assert b"".join(got) == b"".join(b"%d," % at for at in range(40) if at % 7 != 6) + b"data: [DONE]\n\n"
    assert turns >= parts - 1 and len(got) <= parts + 1
