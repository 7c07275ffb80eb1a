"""Sequences that come together reach an idle engine in one frame; one that comes alone waits for no clock."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable

from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.messages import Done, Submit
from rootgraft.engine.serving.submit_gatherer import GATHER_SECONDS, SubmitGatherer
from rootgraft.engine.types import FinishReason, SamplingParams, Usage


class Sent:
    """A gatherer and the frames that it sends."""

    def __init__(self) -> None:
        self.frames: list[list[int]] = []
        self.now = 100.0  # stands still unless a test moves it
        self.gatherer = SubmitGatherer(self._send, lambda: self.now)

    def _send(self) -> None:
        self.frames.append([submit.id for submit in self.gatherer.take()])

    def add(self, *ids: int) -> None:
        self.gatherer.add([Submit(number, array("i", [1]), SamplingParams()) for number in ids])

    def end(self, *ids: int) -> None:
        self.gatherer.see([Done(number, FinishReason.LENGTH, Usage(1, 0, 1)) for number in ids])


def run(work: Callable[[Sent], Awaitable[None]]) -> list[list[int]]:
    sent = Sent()

    async def main() -> None:
        await work(sent)

    asyncio.run(main())
    return sent.frames


async def rounds(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_one_alone_is_sent_after_some_rounds() -> None:
    async def work(sent: Sent) -> None:
        sent.add(1)
        assert not sent.frames
        await rounds()
        assert sent.frames == [[1]]

    assert run(work) == [[1]]


def test_those_of_several_rounds_go_together() -> None:
    async def work(sent: Sent) -> None:
        for number in range(1, 9):
            sent.add(number)
            await rounds(2)
        await rounds()

    assert run(work) == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_they_are_held_for_a_bounded_time() -> None:
    async def work(sent: Sent) -> None:
        sent.add(1)
        sent.now += GATHER_SECONDS * 0.9
        sent.add(2)
        sent.now += GATHER_SECONDS * 0.2
        sent.add(3)
        assert sent.frames == [[1, 2, 3]]
        sent.add(4)
        assert sent.frames == [[1, 2, 3], [4]]

    assert run(work) == [[1, 2, 3], [4]]


def test_an_engine_with_work_gets_them_at_once() -> None:
    async def work(sent: Sent) -> None:
        sent.add(1, 2)
        await rounds()
        sent.end(1)
        sent.add(3)
        assert sent.frames == [[1, 2], [3]]
        sent.end(2, 3)
        sent.add(4)
        assert sent.frames == [[1, 2], [3]]
        await rounds()

    assert run(work) == [[1, 2], [3], [4]]


def test_what_is_taken_meanwhile_is_not_sent_again() -> None:
    async def work(sent: Sent) -> None:
        sent.add(1)
        assert [submit.id for submit in sent.gatherer.take()] == [1]
        await rounds()

    assert run(work) == []


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.floats(0, 0.01)), max_size=30))
def test_each_is_sent_once_and_in_order(events: list[tuple[int, int, float]]) -> None:
    """Whatever comes, ends and passes meanwhile."""
    total = 0

    async def work(sent: Sent) -> None:
        nonlocal total
        for count, ended, seconds in events:
            sent.add(*range(total, total + count))
            total += count
            done = [number for frame in sent.frames for number in frame]
            sent.end(*done[:ended])
            sent.now += seconds
            await rounds(ended)
        await rounds()

    assert [number for frame in run(work) for number in frame] == list(range(total))
