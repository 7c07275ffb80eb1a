"""Alternating measurement: each repeat of a workload goes to every server of a class in turn, once the others are idle.

The speed of a shared machine changes from minute to minute, and so all servers meet the same. A server that does not
start, or ends, or does not come to an end with a repeat, is recorded with its reason, and the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.serve.load_run import Adapters, connected, run_repeat, warm_up
from benchmarks.serve.run_record import RunRecord
from benchmarks.serve.server import Server, memory_mib
from benchmarks.serve.workloads import workload
from rootgraft.api.cli.remote_server import RemoteError, RemoteServer

REST = 3.0  # seconds before each repeat: threads of vLLM's OpenMP spin on for more than one after their last step
START_SECONDS = 600.0
REPEAT_SECONDS = 1200.0
NO_DRAFTS = "drafts off"  # name of our server without speculative decoding


class Unavailable(Exception):
    """A server cannot be started here: it is not installed, or a form of the model cannot be made."""


@dataclass(frozen=True, slots=True)
class ServedForm:
    """A server with a model in one form: a column of the table.

    Attributes:
        name: heading of its column.
        command: returns its words, with ``{port}``, once what it reads is made; raises Unavailable.
        url: where it answers, if it runs already.
        adapters: how it is asked for adapters.
        is_peer: whether it is another project's.
    """

    name: str
    command: Callable[[], str] | None = None
    url: str | None = None
    adapters: Adapters = field(default_factory=lambda: Adapters(()))
    is_peer: bool = False


@dataclass(frozen=True, slots=True)
class PrecisionClass:
    """Servers that compute alike, and are compared with each other alone.

    Attributes:
        name: a word, for the record and the results.
        title: what the servers have in common.
        workloads: names of the loads.
        servers: ours first; one without drafts is called ``NO_DRAFTS``.
    """

    name: str
    title: str
    workloads: Sequence[str]
    servers: Sequence[ServedForm]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How often and how.

    Attributes:
        temperatures: of the requests; each is measured for itself.
        budget: seconds of a workload on a server after which it is not repeated again.
        seed: of the prompts.
    """

    repeats: int = 3
    temperatures: Sequence[float] = (1.0,)
    budget: float = 180.0
    seed: int = 0


@dataclass(slots=True)
class _Live:
    """A server that answers."""

    form: ServedForm
    server: Server
    remote: RemoteServer
    process: subprocess.Popen[bytes] | None


class Alternation:
    """The measurement of one class, continued from the record."""

    def __init__(self, measured: PrecisionClass, plan: RunPlan, record: RunRecord) -> None:
        self._class = measured
        self._plan = plan
        self._record = record
        self._lost: set[tuple[str, str]] = set()  # server and workload, of repeats that did not end

    async def run(self) -> None:
        """Start the servers that lack a repeat, measure, and stop them."""
        plan = self._plan
        async with contextlib.AsyncExitStack() as stack:
            live = [each for form in self._class.servers if (each := await self._start(stack, form)) is not None]
            for temperature in plan.temperatures:
                for load in self._class.workloads:
                    for repeat in range(plan.repeats):
                        for each in live if repeat % 2 == 0 else live[::-1]:
                            if each in live and self._wants(each.form.name, load, temperature, repeat):
                                await asyncio.sleep(REST)
                                await self._repeat(each, load, temperature, repeat)
                        live = [each for each in live if self._is_alive(each)]
            for each in live:
                if each.process is not None:
                    self._note(each.form, memory_mib=memory_mib(each.process))

    async def _start(self, stack: contextlib.AsyncExitStack, form: ServedForm) -> _Live | None:
        plan = self._plan
        cases = [(load, t, n) for load in self._class.workloads for t in plan.temperatures for n in range(plan.repeats)]
        if not any(self._wants(form.name, *case) for case in cases):
            return None
        try:
            return await stack.enter_async_context(self._started(form))
        except Unavailable as error:
            self._note(form, failed=str(error))
            return None
        except (RemoteError, OSError) as error:
            self._note(form, failed=f"did not start: {error}")
            return None

    @contextlib.asynccontextmanager
    async def _started(self, form: ServedForm) -> AsyncIterator[_Live]:
        command = form.command() if form.command else None
        server = Server(command, form.url)
        with server.running() as (url, process):
            begin = time.perf_counter()
            async with contextlib.AsyncExitStack() as stack:
                try:
                    remote = await stack.enter_async_context(connected(url, process, START_SECONDS))
                except RemoteError as error:
                    raise RemoteError(error.kind, f"{error}: {_last_line(server)}") from error
                seconds = time.perf_counter() - begin
                await warm_up(remote)
                self._note(form, command=command or form.url, first_answer_s=seconds)
                _say(f"{self._class.name}, {form.name}: {remote.model}, answers after {seconds:.1f} s")
                yield _Live(form, server, remote, process)

    def _wants(self, server: str, load: str, temperature: float, repeat: int) -> bool:
        """Whether a repeat is missing, and the time spent on those before it leaves room for it."""
        fields = {"class": self._class.name, "server": server, "workload": load, "temperature": temperature}
        done = {entry["repeat"]: entry["figures"]["seconds"] for entry in self._record.entries("figures", **fields)}
        return repeat not in done and sum(done.values()) <= self._plan.budget and (server, load) not in self._lost

    async def _repeat(self, live: _Live, load: str, temperature: float, repeat: int) -> None:
        adapters = live.form.adapters
        asked = workload(load, repeat, self._plan.seed, len(adapters.names))
        try:
            async with asyncio.timeout(REPEAT_SECONDS):
                figures = await run_repeat(live.remote, asked, temperature, adapters, live.process)
        except TimeoutError:
            self._lose(live, load, f"{load} did not end within {REPEAT_SECONDS:.0f} s")
            return
        if not figures["completed"]:
            errors = ", ".join(figures["errors"])
            self._lose(live, load, f"no answer in {load}: {errors}: {_last_line(live.server)}")
            return
        self._note(live.form, workload=load, temperature=temperature, repeat=repeat, figures=figures)
        speed, errors = figures["output_tokens_per_s"], figures["errors"]
        _say(f"{self._class.name}, {live.form.name}: {load} repeat {repeat}: {speed:.1f} tokens/s {errors or ''}")

    def _lose(self, live: _Live, load: str, reason: str) -> None:
        self._lost.add((live.form.name, load))
        self._note(live.form, workload=load, failed=reason)

    def _is_alive(self, live: _Live) -> bool:
        if live.process is None or live.process.poll() is None:
            return True
        self._note(live.form, failed=f"ended with exit code {live.process.returncode}: {_last_line(live.server)}")
        return False

    def _note(self, form: ServedForm, **entry: Any) -> None:
        if "failed" in entry:
            _say(f"{self._class.name}, {form.name}: {entry['failed']}")
        self._record.add(**{"class": self._class.name, "server": form.name}, **entry)


def _last_line(server: Server) -> str:
    """Return the last line that a server wrote, and that of its last error if it is another."""
    lines = [line.strip() for line in server.log_tail(20_000).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return " | ".join(dict.fromkeys(line[-300:] for line in (*errors[-1:], *lines[-1:]))) or "it wrote nothing"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
