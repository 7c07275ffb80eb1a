"""Request threads: run long work for requests on threads, in turns by tenant, so that the event loop is not blocked.

The threads of ``asyncio.to_thread`` are kept for the server itself. Otherwise a few requests of one tenant could occupy
all of them, and both the server's own work on files and processes and the other tenants would wait.
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
"""Number of threads. It may exceed the number of cores, because some threads wait for other processes.

One tenant may use half of the threads.
"""
MOST_CALLS = 1024
"""Largest number of calls that wait for a thread. One tenant may have half of them."""
THREADS = TenantThreads(MOST_THREADS, "requests", MOST_CALLS)

T = TypeVar("T")


async def on_request_thread(call: Callable[[], T]) -> T:
    """Run ``call`` on another thread when it is the current tenant's turn. Returns its result or raises its exception.

    Raises:
        CapacityError: the tenant's limit of waiting calls is reached, or no thread can be started.
    """
    try:
        return await THREADS.call(CURRENT_TENANT.get(), call)
    except ShareFull:
        raise CapacityError("Too many long requests are waiting: try again later.") from None
    except NoThread:
        raise CapacityError("No thread can be started now for long requests: try again.") from None
