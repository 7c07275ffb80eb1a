"""Work for a client begins at once, and ends when the client leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rootgraft.api.generate.streams import ClientGone, while_connected


async def connected() -> dict[str, Any]:
    return await asyncio.get_running_loop().create_future()


async def left() -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"type": "http.disconnect"}


async def broken() -> dict[str, Any]:
    raise OSError("reset")


def test_work_of_the_first_begins_before_the_second_is_looked_at() -> None:
    order: list[str] = []

    async def work() -> None:
        order.append("begun")
        await asyncio.sleep(0)

    async def handle() -> None:
        order.append("parsed")
        await while_connected(connected, work())

    async def main() -> None:
        await asyncio.gather(handle(), handle(), handle())

    asyncio.run(main())
    assert order == ["parsed", "begun"] * 3


@pytest.mark.parametrize("receive", [left, broken])
def test_a_client_that_leaves_cancels_the_work_alone(receive: Any) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    async def main() -> int:
        with pytest.raises(ClientGone):
            await while_connected(receive, work())
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert asyncio.run(main()) == 0
    assert ended == ["work"]


def test_an_error_while_the_work_ends_is_not_told_to_nobody() -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("at the end")

    async def main() -> None:
        with pytest.raises(ClientGone):
            await while_connected(left, work())

    asyncio.run(main())


def test_errors_and_results_of_the_work_pass() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def main() -> None:
        assert await while_connected(connected, asyncio.sleep(0, 7)) == 7
        with pytest.raises(ValueError, match="no"):
            await while_connected(connected, fail())

    asyncio.run(main())


def test_a_task_that_is_cancelled_from_outside_stays_cancelled() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(while_connected(connected, asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
