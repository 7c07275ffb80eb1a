"""What is written down at the end of a request: facts for the log, counters of its key, a ledger entry, a span."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..access.caller import Caller
from ..observe.request_timer import RequestEnd
from ..observe.usage_ledger import UsageRecord
from .server_state import ServerState

if TYPE_CHECKING:
    from ...engine.serving.request import TextRequest


def record_usage(
    state: ServerState, caller: Caller, requests: Sequence[TextRequest], end: RequestEnd
) -> asyncio.Future[None] | None:
    """Write down a request that has ended. Returns what is done when the ledger has it, if there is a ledger."""
    facts = caller.facts
    facts.update(end.facts(), tenant=caller.key.tenant, adapter=requests[0].adapter)
    model = str(facts.get("model", state.names[0]))
    tokens = end.tokens
    state.metrics.count_usage(caller.key.name, tokens)
    if state.tracer is not None:
        facts["trace_id"] = state.tracer.record(caller, requests, end)
    if state.ledger is None:
        return None
    return state.ledger.put(
        UsageRecord(
            id=uuid.uuid4().hex,
            ended=time.time(),
            key=caller.key.name,
            model=model,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            completion_tokens=tokens.completion,
        )
    )
