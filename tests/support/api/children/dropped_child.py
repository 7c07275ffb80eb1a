"""A server and its peers in a process of their own, of which most are dropped: what is left of them is counted.

``measure`` runs in a new process, so that memory and objects are those of the server and its peers alone.
"""

from __future__ import annotations

import asyncio
import gc
import json
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import psutil

from support.api.api_live import Live, make_state, serve
from support.api.dropped_peers import WAYS, neighbours, reset
from support.api.rpc_live import rpc_of
from support.machine.waits import wait_until

WAVE = 25
"""Connections that are open at a time."""


class Kept(NamedTuple):
    """What a process holds: descriptors, objects of Python, and its memory in bytes."""

    descriptors: int
    objects: int
    memory: int


def measure(way: str, waves: int, told: Connection) -> None:
    """Drop peers in waves, and send what the process held before and after as two lists.

    Raises:
        AssertionError: a peer that stays is told something else than before.
    """
    with contextmanager(serve)(make_state()) as live, rpc_of(live) as rpc, neighbours(live, rpc) as answers:
        wanted = answers()

        def wave() -> None:
            live.async_engine.gate = asyncio.Event()
            going = [WAYS[way](live, rpc) for _ in range(WAVE)]
            wait_until(lambda: live.state.limits.active == WAVE)
            for number, each in enumerate(going):
                reset(each) if number % 2 else each.close()
            wait_until(lambda: live.state.limits.active == 0 and live.state.sockets.connections.total == 1)
            live.async_engine.gate = None
            assert answers() == wanted

        for _ in range(max(2, waves // 4)):
            wave()  # what is made once is there now
        before = _kept(live)
        for _ in range(waves):
            wave()
        # Both ends are in this process, and gRPC closes its own a little later.
        wait_until(lambda: psutil.Process().num_fds() <= before.descriptors + 2)
        told.send_bytes(json.dumps([before, _kept(live)]).encode())


def _kept(live: Live) -> Kept:
    """Return what this process holds, without what the fake engine remembers."""
    for each in (live.async_engine.seen, live.async_engine.aborted, live.async_engine.checked):
        each.clear()
    gc.collect()
    process = psutil.Process()
    return Kept(process.num_fds(), len(gc.get_objects()), process.memory_info().rss)
