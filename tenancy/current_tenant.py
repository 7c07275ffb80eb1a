"""Current tenant: the tenant for whose request this task or thread works, as a context variable.

The server sets the tenant once, when it has checked the API key. Code that limits what a tenant may use reads it from
here, so callers need not pass the tenant on and cannot forget to. Tasks inherit the variable; a thread gets it by
``contextvars.copy_context().run``.
"""

from __future__ import annotations

from contextvars import ContextVar

CURRENT_TENANT: ContextVar[str] = ContextVar("current_tenant", default="")
"""The tenant; "" for the server's own work, and for all requests where no keys are in use."""
