"""Fleet: replicas that act as one engine for the API. Starts replicas, replaces lost ones, passes messages on.

    AsyncEngine  <--on_frame--  Fleet  <--on_frame--  ReplicaClient x n
                 ---submit--->         ---submit--->

A fleet has the interface of ``EngineClient``. ``Dispatcher``, which does no I/O, decides where messages are sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ..engine.errors import EngineDead, EngineError
from ..engine.messages import ForgetTokens, Heartbeat, Message, Ready, Submit, TokenTexts
from ..engine.serving.background_tasks import BackgroundTasks
from ..engine.serving.replica_status import FleetStatus, ReplicaStatus
from ..engine.snapshot import EngineSnapshot
from ..engine.types import AdapterInfo
from ..engine.weighted_adapters import names_in
from .dispatcher import Dispatcher, DispatcherLimits
from .fleet_adapters import FleetAdapters, ask_first
from .replica_client import ReplicaClient, send
from .replica_launcher import ReplicaLauncher, start_beside
from .replica_roster import Member, ReplicaRoster, mute
from .scaling.autoscaling import AutoscalePolicy, Autoscaler, FleetLoad

T = TypeVar("T")

TICK_SECONDS = 0.25
DRAIN_SECONDS = 30.0
"""Seconds that the sequences of a draining replica have to end there."""
HAND_OVER_SECONDS = 10.0
"""Further seconds in which the KV of sequences that have not ended is copied to the replicas that continue them."""
MOST_FAILED_STARTS = 3
"""Number of failed starts in a row, while no replica serves, after which the fleet is dead."""
RESUME_SECONDS = 2.0
"""Longest time in seconds that the start of a new replica waits until the streams of a lost one have new tokens."""
_RESUME_POLL_SECONDS = 0.05

logger = logging.getLogger("rootgraft.fleet")


class Fleet:
    """Runs a number of replicas. All methods must be called on one event loop.

    Args:
        launcher: starts and stops replicas.
        count: number of replicas, at least one; with a policy, the number at the start.
        limits: limits of the dispatcher.
        seed: seed of the generator that draws seeds for requests without one.
        policy: decides how many replicas there should be; None for a fixed number.
        roles: roles of the replicas, as in ``ReplicaInfo``; empty if all replicas do all work.

    Attributes:
        on_frame, on_heartbeat, on_death, death: as in ``EngineClient``; the fleet dies if no replica can be started.
    """

    def __init__(
        self,
        launcher: ReplicaLauncher,
        count: int,
        limits: DispatcherLimits | None = None,
        *,
        seed: int = 0,
        policy: AutoscalePolicy | None = None,
        roles: Sequence[str] = (),
    ) -> None:
        self._launcher = launcher
        self._count = count
        self._dispatcher = Dispatcher(limits or DispatcherLimits(), seed)
        self._roster = ReplicaRoster(roles)
        self._adapters = FleetAdapters(self._roster, self._dispatcher)
        self._autoscaler = None if policy is None else Autoscaler(policy)
        self._starts = BackgroundTasks()
        # Tasks that end replicas and unload adapters.
        self._tasks = BackgroundTasks()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._ready: Ready | None = None
        self.on_frame: Callable[[list[Message]], None] = lambda messages: None
        self.on_heartbeat: Callable[[Heartbeat], None] = lambda heartbeat: None
        self.on_death: Callable[[EngineDead], None] = lambda error: None
        self.death: EngineDead | None = None

    @property
    def is_alive(self) -> bool:
        return self._ready is not None and self.death is None and not self._closing

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last sign of life of any replica; 0 without a replica, while one is starting."""
        return min((member.client.silent_seconds for member in self._roster), default=0.0)

    @property
    def stats(self) -> dict[str, float]:
        """Sums of the replicas' gauges and counters."""
        return self._roster.stats

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Loaded adapters by name, each as reported by one of the replicas."""
        return self._adapters.infos

    @property
    def replicas(self) -> Mapping[str, ReplicaClient]:
        """The running replicas, by name."""
        return self._roster.clients

    @property
    def num_replays(self) -> int:
        """Number of sequences that continued on another replica."""
        return self._dispatcher.num_replays

    @property
    def num_lost(self) -> int:
        """Number of lost replicas, without those that were no longer needed."""
        return self._dispatcher.num_lost

    def status(self) -> FleetStatus:
        """Return the replicas, and counts of their events since the start."""
        now = time.monotonic()
        return FleetStatus(
            tuple(self._status_of(member, now) for member in self._roster),
            wanted=self._count,
            num_starting=len(self._starts),
            num_held=self._dispatcher.num_held,
            bounds=None if self._autoscaler is None else self._autoscaler.bounds,
            num_started=self._roster.num_joined,
            num_lost=self._dispatcher.num_lost,
            num_replays=self._dispatcher.num_replays,
            num_drained=self._roster.num_drained,
            num_scaled_up=0 if self._autoscaler is None else self._autoscaler.num_up,
            num_scaled_down=0 if self._autoscaler is None else self._autoscaler.num_down,
        )

    def engine_stats(self) -> Mapping[int, Mapping[str, float]]:
        """Return gauges and counters by the replica's index; counters of an index never decrease."""
        return self._roster.stats_by_index()

    async def start(self) -> Ready:
        """Start all replicas and wait for them. Raises as ``EngineClient.start``, after ending the running ones."""
        starts = [asyncio.ensure_future(self._launcher.launch()) for _ in range(self._count)]
        try:
            started = await asyncio.gather(*starts)
        except BaseException:
            self._closing = True
            await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(*(self._launcher.stop(task.result()[0]) for task in starts if not _failed(task)))
            await self._launcher.close()
            raise
        self._ready = started[0][1]
        self._adapters.begin(self._ready.adapters)
        for client, ready in started:
            self._join(client, ready)
        self._tick()
        return self._ready

    def scale(self, count: int) -> None:
        """Set the number of replicas: further ones are started, or the least loaded ones are drained.

        A draining replica takes no new sequences; sequences that have not ended within ``DRAIN_SECONDS`` continue
        elsewhere. If a replica is needed again, a draining one is reopened before another is started.

        Raises:
            ValueError: ``count`` is below 1 in a fleet without a policy, which alone could start a replica again.
        """
        if count < 1 and self._autoscaler is None:
            raise ValueError(f"count must be at least 1, not {count}")
        self._count = count
        replicas, serving = self._dispatcher.replicas, self._roster.serving
        until = time.monotonic() + DRAIN_SECONDS
        for name in sorted(serving, key=lambda each: replicas[each].rows)[: max(0, len(serving) - count)]:
            self._dispatcher.drain(name)
            self._roster[name].drains_until = until
        for member in [each for each in self._roster if each.drains_until is not None][: max(0, self._num_missing)]:
            member.drains_until = None
            self._dispatcher.reopen(member.name, time.monotonic())
        self._pump()

    def describe_tokens(self, message: TokenTexts | ForgetTokens) -> None:
        """Send the replicas the bytes of all tokens, which the first grammar needs, or make them drop these bytes."""
        self._dispatcher.describe_tokens(message)
        self._pump()

    def submit(self, submits: Sequence[Submit]) -> None:
        """Start sequences.

        Raises:
            EngineDead: the fleet is dead.
            CapacityError: the fleet has no room for more sequences.
            UnknownModel: an adapter's name is an internal name of the replicas, such as ``sql@2``.
        """
        if not self.is_alive:
            raise EngineDead("The engine is not running." if self.death is None else str(self.death))
        adapters = {submit.adapter for submit in submits if submit.adapter is not None}
        self._adapters.check_public({name for adapter in adapters for name in names_in(adapter)})
        now = time.monotonic()
        self._dispatcher.submit(submits, now)
        if self._count == 0:
            self._follow_load(now)
        self._pump()

    def abort(self, ids: Iterable[int]) -> None:
        """End sequences."""
        self._dispatcher.abort(ids)
        self._pump()

    async def load_adapter(
        self, name: str, path: str, *, replace: bool = False, trusted: bool = False, num_tokens: int = 0
    ) -> None:
        """Load an adapter on all replicas; new requests use it once all have it. See ``EngineClient``."""
        with self._adapters.loading():
            await self._wait_for_replica()
            await self._adapters.load(name, path, replace_name=replace, trusted=trusted, num_tokens=num_tokens)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; running sequences keep it. Raises UnknownModel."""
        await self._adapters.unload(name)

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """Return all adapters, as reported by the replica that has the most of them. Raises as ``EngineClient``."""
        return await self._adapters.list()

    async def take_snapshot(self) -> EngineSnapshot:
        """Return the state of the replica with the most sequences. Raises EngineDead if no replica is left."""
        busiest = sorted(self.replicas.values(), key=lambda client: client.stats.get("running", 0.0), reverse=True)
        return await ask_first(busiest, lambda client: client.take_snapshot())

    async def reset_cache(self) -> None:
        """Remove the cached KV of all running replicas; a replica that is lost meanwhile has none."""
        await self._ask_all(lambda client: client.reset_cache())

    async def release_session(self, tenant: str, session: str) -> bool:
        """End a session on all replicas. Returns whether any replica held it."""
        return any(await self._ask_all(lambda client: client.release_session(tenant, session)))

    async def export_session(self, tenant: str, session: str) -> tuple[int, bytes]:
        """Return tokens and file of a session from the replica that holds the most of it; 0 and b"" if none does."""
        found = await self._ask_all(lambda client: client.export_session(tenant, session))
        return max(found, key=lambda each: each[0], default=(0, b""))

    async def import_session(self, data: bytes) -> int:
        """Load a session file on all replicas, as any may get its next request. Returns the fewest tokens loaded."""
        return min(await self._ask_all(lambda client: client.import_session(data)), default=0)

    async def _ask_all(self, ask: Callable[[ReplicaClient], Awaitable[T]]) -> list[T]:
        """Return the answers of all running replicas; a replica that is lost meanwhile gives none."""
        outcomes = await asyncio.gather(*map(ask, self.replicas.values()), return_exceptions=True)
        answers: list[T] = []
        for outcome in outcomes:
            if not isinstance(outcome, BaseException):
                answers.append(outcome)
            elif not isinstance(outcome, EngineDead):
                raise outcome
        return answers

    def kill(self) -> None:
        """Kill all replicas."""
        self._closing = True
        for client in self.replicas.values():
            client.kill()

    async def close(self) -> None:
        """Shut down all replicas and wait until they have ended."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._starts.cancel()
        await self._starts.wait()
        await self._tasks.wait()
        # The fleet ends these replicas itself, so their ends are not losses.
        for client in self.replicas.values():
            mute(client)
        try:
            await asyncio.gather(*(self._launcher.stop(client) for client in self.replicas.values()))
        finally:
            await self._launcher.close()

    def _join(self, client: ReplicaClient, ready: Ready, lacking: frozenset[str] = frozenset()) -> None:
        """Let a started replica take sequences, except sequences of adapters that it lacks."""
        now = time.monotonic()
        member = self._roster.add(client, now)
        name = member.name
        client.on_frame = partial(self._take, name)
        client.on_heartbeat = partial(self._beat, name)
        client.on_death = partial(self._lose, name)
        self._dispatcher.join(name, ready, now, lacking, member.role)
        self._pump()

    def _take(self, name: str, messages: list[Message]) -> None:
        self._dispatcher.take(name, self._roster.next_frame(name), messages, time.monotonic())
        self._pump()

    def _beat(self, name: str, heartbeat: Heartbeat) -> None:
        self._roster[name].busy = heartbeat.adapters
        self._take(name, [heartbeat])
        self.on_heartbeat(Heartbeat(self.stats, heartbeat.histograms, self._adapters.busy()))

    def _lose(self, name: str, error: EngineDead) -> None:
        """Give up a replica whose client reports that it is dead."""
        logger.warning("%s is lost: %s", name, error)
        self._dispatcher.leave(name, time.monotonic())
        self._pump()

    def _tick(self) -> None:
        now = time.monotonic()
        for member in self._roster:
            self._dispatcher.hear(member.name, now - member.client.silent_seconds)
        self._dispatcher.tick(now)
        self._stop_drained(now)
        self._follow_load(now)
        self._pump()
        if self._adapters.has_unused:
            self._tasks.begin(self._adapters.unload_retired())
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _follow_load(self, now: float) -> None:
        """Set the number of replicas to the policy's decision, if there is a policy and no adapter is being loaded."""
        if self._autoscaler is None or self._closing or self._adapters.num_loading:
            return
        load = FleetLoad(self._dispatcher.num_open, self._dispatcher.queue_seconds, self._count)
        if (wanted := self._autoscaler.decide(load, now)) != self._count:
            if wanted:
                logger.info("%d replicas instead of %d, for %d sequences", wanted, self._count, load.busy)
            else:
                logger.info("no request for a while: ending the engine, which frees its memory until the next request")
            self.scale(wanted)

    async def _wait_for_replica(self) -> None:
        """Wait until a replica serves; start one if needed. Raises EngineDead if none can be started."""
        while not self._roster.serving and self.is_alive:
            if self._count == 0:
                self.scale(1)
            await asyncio.sleep(TICK_SECONDS)

    def _pump(self) -> None:
        """Act on the dispatcher's output: replace lost replicas, send messages to the others, deliver to clients."""
        for name in self._dispatcher.take_lost():
            client = self._let_go(name)
            client.kill()
            self._tasks.begin(self._launcher.stop(client))
        self._start_missing()
        by_replica: dict[str, list[Message]] = {}
        for name, message in self._dispatcher.take_sent():
            by_replica.setdefault(name, []).append(message)
        for name, messages in by_replica.items():
            if name in self._roster:
                send(self._roster[name].client, messages)
        if delivered := self._dispatcher.take_delivered():
            self.on_frame(delivered)

    def _start_missing(self) -> None:
        """Start replicas until the wanted number serve or are starting."""
        while self._timer is not None and not self._closing and self._num_missing > 0:
            self._starts.begin(self._start_another())

    @property
    def _num_missing(self) -> int:
        return self._count - len(self._roster.serving) - len(self._starts)

    def _stop_drained(self, now: float) -> None:
        """Stop the draining replicas that have no sequences left.

        If a replica's time for draining is over, its remaining sequences continue on other replicas. A replica is
        stopped when its KV has been copied to other replicas, or the time for the copies is over.
        """
        for member in self._roster:
            until = member.drains_until
            if until is None:
                continue
            if now >= until:
                self._dispatcher.hand_over(member.name, now)
            is_empty = self._dispatcher.is_drained(member.name) and not self._dispatcher.hands_sessions_over(
                member.name
            )
            if is_empty or now >= until + HAND_OVER_SECONDS:
                self._dispatcher.retire(member.name, now)
                self._tasks.begin(self._launcher.stop(self._let_go(member.name, is_drained=True)))

    def _let_go(self, name: str, *, is_drained: bool = False) -> ReplicaClient:
        """Remove a replica that no longer serves, and return its client."""
        self._adapters.remember(self._roster[name].client)
        return self._roster.remove(name, is_drained=is_drained)

    def _status_of(self, member: Member, now: float) -> ReplicaStatus:
        info = self._dispatcher.replicas[member.name]
        return ReplicaStatus(
            member.name,
            member.index,
            "serving" if member.drains_until is None else "draining",
            member.client.place,
            now - member.joined,
            member.client.silent_seconds,
            self._adapters.public_names(info.adapters),
            member.client.stats,
            member.role,
        )

    async def _start_another(self) -> None:
        """Start a replica beside the others, with the adapters that they have."""
        assert self._ready is not None
        await self._let_streams_go_on()
        while not self._closing and self.death is None and self._count > len(self._roster.serving):
            try:
                client, ready, lacking = await start_beside(self._launcher, self._ready, self._adapters.wanted)
            except EngineError as error:
                num_failed = self._roster.count_failed_start()
                logger.error("a replica could not be started: %s", error)
                if num_failed >= MOST_FAILED_STARTS and not self.replicas:
                    self.death = EngineDead(f"No replica of the engine can be started: {error}")
                    self.on_death(self.death)
                await asyncio.sleep(num_failed)
                continue
            if self._closing or self._count <= len(self._roster.serving):
                # The new replica is no longer needed.
                await self._launcher.stop(client)
            else:
                self._join(client, ready, lacking)
            return

    async def _let_streams_go_on(self) -> None:
        """Wait until all streams of lost replicas have a new token, at most ``RESUME_SECONDS``.

        The remaining replicas recompute these streams, and need the processor cores that a start would use.
        """
        until = time.monotonic() + RESUME_SECONDS
        while self._roster.serving and self._dispatcher.num_interrupted and time.monotonic() < until:
            await asyncio.sleep(_RESUME_POLL_SECONDS)


def _failed(task: asyncio.Future[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
