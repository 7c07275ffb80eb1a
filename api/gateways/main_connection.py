"""Main connection: the main process's end of the link to one gateway, with its sequences, calls and tickets.

When the link ends, for any reason, the gateway's sequences are aborted, and the resources of its requests are released
and counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import psutil

from ...engine.errors import EngineDead, EngineError
from ...engine.messages import Abort, ForgetTokens, Message, Submit, TokenTexts, failure_of
from ...engine.serving.watchdog import Watchdog
from ...engine.types import Priority
from ...engine.weighted_adapters import names_in
from ...tenancy.current_tenant import CURRENT_TENANT
from ..access.api_keys import Key
from ..access.caller import Caller, RequestFacts
from ..access.request_admission import Demand, QueueTicket
from ..errors import HTTPError
from ..generate.server_state import ServerState
from ..observe.token_usage import TokenCounts
from ..observe.usage_ledger import UsageRecord
from .call_errors import pack_error
from .engine_multiplexer import EngineChannel, EngineMultiplexer
from .main_spawn import GatewayProcess
from .process_link import ProcessLink
from .relayed_metrics import observe_relayed

SILENT_SECONDS = 10.0
"""Seconds without a sign of life and without processor use after which a gateway counts as hung."""
BUSY_SECONDS = 60.0
"""Seconds of one pass of its event loop after which a gateway counts as hung."""

logger = logging.getLogger("rootgraft.gateways")


class MainTicket:
    """The resources of a gateway's request that the main process has admitted, and the usage that is known so far.

    Args:
        ticket: the request's places in the queue, and its tokens within the key's rate limit.
        demand: the demand of the request.
        key: name of the API key.
        model: name of the model under which the usage is counted.
        adapter: name of the adapter; None for the base model.

    Attributes:
        num_generated: number of tokens of the answers that the gateway has reported.
    """

    def __init__(self, ticket: QueueTicket, demand: Demand, key: str, model: str, adapter: str | None) -> None:
        self._ticket = ticket
        self._demand = demand
        self._begun: list[tuple[int, int]] = []
        self.key, self.model, self.adapter = key, model, adapter
        self.num_generated = 0

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompts whose answers have begun. Each prompt counts once."""
        return sum(self._demand.prompts[prompt][0] for prompt in {prompt for prompt, _ in self._begun})

    def begin(self, sequence: tuple[int, int], num_tokens: int) -> None:
        """Count the first tokens of a sequence (prompt, index), or its end without any token."""
        self._begun.append(sequence)
        self.num_generated += num_tokens
        self._ticket.take(sequence, num_tokens)

    def add(self, num_tokens: int) -> None:
        """Count further tokens of a request whose answer has begun."""
        if self._begun:
            self.num_generated += num_tokens
            self._ticket.take(self._begun[0], num_tokens)

    def end(self, num_tokens: int) -> None:
        """Count the last tokens, and release the resources of the request."""
        self.add(num_tokens)
        self._ticket.close()


class MainConnection:
    """The state of one gateway in the main process: its open sequences, running calls, and admitted requests.

    Belongs to the event loop of the main process.

    Args:
        name: unique name, which no earlier gateway had either.
        link: connection to the gateway's process; this object sets its callbacks.
        state: the state of the server.
        lost: called once when the link has ended.

    Attributes:
        serves: whether the gateway answers requests.
        started: monotonic time of the gateway's start in seconds.
        engine: the gateway's channel to the engine; None until the model is loaded.
    """

    def __init__(
        self,
        name: str,
        process: GatewayProcess,
        link: ProcessLink,
        state: ServerState,
        lost: Callable[[MainConnection], None],
    ) -> None:
        self.name = name
        self.process = process
        self.serves = False
        self.started = time.monotonic()
        self.engine: EngineChannel | None = None
        self._link = link
        self._state = state
        self._lost = lost
        self._tickets: dict[int, MainTicket] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._active = 0
        self._watchdog = Watchdog(SILENT_SECONDS, BUSY_SECONDS, self._processor_seconds)
        link.on_messages = self._take
        link.on_command = self._command
        link.on_closed = self._closed

    @property
    def silent_seconds(self) -> float:
        """Seconds since the gateway's last sign of life."""
        return self._watchdog.silent_seconds

    @property
    def num_active(self) -> int:
        """Number of answers that the gateway is generating."""
        return max(len(self._tickets), self._active)

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Send the gateway its settings."""
        self._link.tell("start", settings)

    def serve(self, model: Mapping[str, Any], engine: EngineMultiplexer) -> None:
        """Send the gateway the facts about the model, which has been loaded, and open an engine channel for it."""
        self.engine = engine.open_channel()
        self.engine.on_frame = self._link.send
        self.engine.on_death = lambda error: self.end(str(error))
        self._link.tell("serve", model)

    def drain(self) -> None:
        """Tell the gateway to accept no new requests."""
        self._link.tell("drain")

    def end(self, reason: str) -> None:
        """Tell the gateway to end. Its running answers end with an error whose text is ``reason``."""
        self._link.tell("end", reason)

    def hangs(self, now: float) -> bool:
        """Return whether the gateway hangs.

        Must be called every ``TICK_SECONDS`` with the monotonic time in seconds.
        """
        return self._watchdog.tick(now) is not None

    def _take(self, messages: list[Message]) -> None:
        """Pass messages to the engine.

        If a message is refused, the gateway gets the same reply as from the engine itself.
        """
        submits = [message for message in messages if isinstance(message, Submit)]
        try:
            if self.engine is None:
                raise EngineDead("The engine is not running.")
            for message in messages:
                if isinstance(message, (TokenTexts, ForgetTokens)):
                    self.engine.describe_tokens(message)
                elif isinstance(message, Abort):
                    self.engine.abort(message.ids)
            if submits:
                self.engine.submit(submits)
        except EngineError as error:
            if submits:
                self._link.send([failure_of(submit.id, error) for submit in submits])

    def _command(self, name: str, values: list[Any]) -> None:
        match name:
            case "alive":
                num_passes, self._active, observed, progress = values
                self._watchdog.sign_of_life(num_passes)
                observe_relayed(self._state.observers.metrics, observed, self._state.models.adapters)
                for number, num_tokens in progress:
                    if (ticket := self._tickets.get(number)) is not None:
                        ticket.add(num_tokens)
            case "begun":
                number, prompt, index, num_tokens = values
                if (ticket := self._tickets.get(number)) is not None:
                    ticket.begin((prompt, index), num_tokens)
            case "ended":
                number, num_tokens = values
                # A request that was refused has no ticket.
                if (ticket := self._tickets.pop(number, None)) is not None:
                    ticket.end(num_tokens)
            case "serving":
                self.serves = True
            case "call":
                number, method, *arguments = values
                self._answer(number, method, arguments)
            case _:
                raise ValueError(f"not a command of a gateway: {name}")

    def _answer(self, number: int, method: str, arguments: list[Any]) -> None:
        """Answer a call at once, or in a task if the answer has to wait for something."""
        match method:
            case "admit":
                self._reply(number, lambda: self._admit(*arguments))
            case "limit_headers":
                self._reply(number, lambda: dict(self._state.limits.admission.limits.headers(self._key(arguments[0]))))
            case "find_model":
                self._run(number, self._find_model(*arguments))
            case "record":
                self._record(number, UsageRecord(*arguments))
            case _:
                raise ValueError(f"not a call of a gateway: {method}")

    def _reply(self, number: int, call: Callable[[], Any]) -> None:
        try:
            self._link.tell("reply", number, call())
        except (EngineError, HTTPError) as error:
            self._link.tell("error", number, pack_error(error))

    def _run(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        async def run() -> None:
            try:
                self._link.tell("reply", number, await work)
            except (EngineError, HTTPError) as error:
                self._link.tell("error", number, pack_error(error))
            except Exception:
                logger.exception("a call of %s", self.name)
                problem = HTTPError(
                    500, "Internal server error; the server's log has the details.", code="internal_error"
                )
                self._link.tell("error", number, pack_error(problem))

        task = asyncio.create_task(run())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _key(self, name: str) -> Key:
        """Return a valid key. Raises HTTPError 401 for a key that was removed after the gateway had checked it."""
        key = self._state.limits.keys.named(name)
        if key is None:
            raise HTTPError(401, "The API key is not valid any more.", code="invalid_api_key")
        return key

    def _admit(self, number: int, key_name: str, asked: Sequence[Any], model: str, adapter: str | None) -> None:
        self._state.engine.serving()
        priority, prompts, marks, may_be_deferred, is_strict = asked
        whole = tuple((tokens, n, most) for tokens, n, most in prompts)
        demand = Demand(Priority(priority), whole, tuple(map(tuple, marks)), may_be_deferred, is_strict)
        held = self._state.limits.admission.admit(self._key(key_name), demand)
        self._tickets[number] = MainTicket(held, demand, key_name, model, adapter)

    async def _find_model(
        self, key_name: str, model: str | None, timeout: float | None, lora_path: str | None, session: str | None
    ) -> list[Any]:
        key, facts, state = self._key(key_name), RequestFacts(), self._state
        CURRENT_TENANT.set(key.tenant)  # This applies only to the task of this call.
        caller = Caller(key, state.limits.cache_tenant(key), timeout, facts)
        found = await state.models.find(model, caller, lora_path, session)
        info = None if found.adapter is None else state.models.adapters.get(names_in(found.adapter)[0])
        known = None if info is None else astuple(info)
        return [found.name, found.adapter, facts.version, facts.adapter_seconds, known]

    def _record(self, number: int, record: UsageRecord) -> None:
        """Accept a record at once, because the gateway may end at any moment. The reply follows when it is written."""
        if (ledger := self._state.stores.ledger) is not None:
            self._run(number, ledger.until_written(ledger.put(record)))

    def _closed(self) -> None:
        """End the sequences, calls and tickets of the gateway. Its requests count as aborted."""
        if self.engine is not None:
            self.engine.close()
        for call in self._calls:
            call.cancel()
        for ticket in self._tickets.values():
            ticket.end(0)
            self._count(ticket)
        self._tickets.clear()
        self._lost(self)

    def _count(self, ticket: MainTicket) -> None:
        state = self._state
        counts = TokenCounts(ticket.prompt_tokens, 0, ticket.num_generated)
        state.observers.metrics.count_usage(ticket.key, ticket.adapter, counts, state.models.adapters)
        if state.stores.ledger is not None:
            row = (time.time(), ticket.key, ticket.model, counts.prompt, counts.cached, counts.completion)
            state.stores.ledger.put(UsageRecord(uuid.uuid4().hex, *row))

    def _processor_seconds(self) -> float | None:
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return None
        return float(times.user + times.system)
