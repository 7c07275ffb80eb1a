"""Request threads: what takes long with a request is done beside the event loop, in turns of tenants.

The threads of ``asyncio.to_thread`` are the server's own: a few requests of one tenant would hold all of them, and
whatever the server does with files or processes would wait behind, as would all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...tenancy.current_tenant import CURRENT_TENANT
from ...tenancy.tenant_slots import ShareFull
from ...tenancy.tenant_threads import TenantThreads
from ...tenancy.thread_calls import NoThread
from ..errors import CapacityError

MOST_THREADS = 8
"""Some of them wait for processes that run programs, so there are more than cores. A tenant leaves half of them."""
MOST_CALLS = 1024
"""Calls that wait for a thread, of which a tenant gets half."""
THREADS = TenantThreads(MOST_THREADS, "requests", MOST_CALLS)

T = TypeVar("T")


async def on_request_thread(call: Callable[[], T]) -> T:
    """Return what a call does, made on another thread in a turn of the current tenant. Raises as the call.

    Raises:
        CapacityError: as many calls of the tenant wait as may, or no thread can be started.
    """
    try:
        return await THREADS.call(CURRENT_TENANT.get(), call)
    except ShareFull:
        raise CapacityError("Too many long requests wait for their turn: ask again in a while.") from None
    except NoThread:
        raise CapacityError("No thread for long requests can be started now: ask again.") from None
