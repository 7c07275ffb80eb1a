"""Current tenant: whose request this task or thread works for, as a context variable.

The server sets the tenant once, where it knows the key. So no call on the way to a shared bound has to pass the tenant
on, and no call can omit it. Tasks inherit it; a thread gets it by ``contextvars.copy_context().run``.
"""

from __future__ import annotations

from contextvars import ContextVar

CURRENT_TENANT: ContextVar[str] = ContextVar("current_tenant", default="")
"""The tenant; "" for the server's own work, and for all requests where no keys are in use."""
