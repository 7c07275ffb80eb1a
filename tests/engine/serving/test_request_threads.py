"""Long requests are worked on beside the event loop, and one tenant's leave threads to others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rootgraft.engine.errors import CapacityError
from rootgraft.engine.serving import request_threads
from rootgraft.engine.serving.request_threads import MOST_THREADS, on_request_thread
from rootgraft.tenancy.current_tenant import CURRENT_TENANT
from rootgraft.tenancy.tenant_threads import TenantThreads


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """Calls that wait for it end with the test."""
    event = threading.Event()
    yield event
    event.set()


async def of(tenant: str, call: Any) -> Any:
    CURRENT_TENANT.set(tenant)
    return await on_request_thread(call)


async def test_calls_of_one_tenant_that_do_not_end_keep_no_other_waiting(hang: threading.Event) -> None:
    many = [asyncio.create_task(of("a", hang.wait)) for _ in range(3 * MOST_THREADS)]
    await asyncio.sleep(0)
    assert await asyncio.create_task(of("b", CURRENT_TENANT.get)) == "b", "with the context of the request"
    assert not any(each.done() for each in many)
    assert request_threads.THREADS.slots.num_held == MOST_THREADS // 2
    hang.set()
    await asyncio.gather(*many)


async def test_calls_that_wait_are_bounded(hang: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_threads, "THREADS", TenantThreads(2, "few", 4))
    running = [asyncio.create_task(of("a", hang.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityError, match="try again"):
        await asyncio.create_task(of("a", hang.wait))
    assert await asyncio.create_task(of("b", lambda: 1)) == 1
    hang.set()
    await asyncio.gather(*running)
