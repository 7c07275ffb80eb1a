"""``Followers``: the other ranks of a tensor-parallel model, as rank 0 sees them: started, told each step, and ended.

Rank 0 is the engine's process. It alone schedules, compiles grammars, draws tokens, and exchanges messages with the
client. A follower only computes its shard of each step that rank 0 sends. No rank goes on without the others: if one
has ended, or gives no sign of life, all end.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...kernels.collectives import ProcessGroup
from ...lora.prepare_factors import PreparedAdapter
from ..batch import Batch, PageCopy, PageLoad, StateLoad
from ..config import EngineConfig
from ..errors import ConfigError, EngineDead
from .adapter_messages import pack_adapter
from .rank_link import ENDED, SignsOfLife, read_line
from .rank_messages import Kind, RankMessage, pack_batch, pack_numbers
from .rank_pages import RankPages

T = TypeVar("T")

COLLECTIVE_SECONDS = 1800.0
"""Seconds that a rank waits for others in a collective. The slowest load takes less; hangs are found otherwise."""
START_SECONDS = 1800.0
"""Seconds that rank 0 waits until a follower is ready. A follower that gives no sign of life is given up earlier."""
_END_SECONDS = 2.0
# Seconds in which rank 0, while it loads, notices by itself that another rank is gone. It does at once in a call of a
# collective; while it reads weights it would not, and this time is added to that in which all processes end.
_FAIL_SECONDS = 1.0


class Followers:
    """Starts followers, and sends them messages in one order. Called by one thread.

    Args:
        config: the options, complete.
        model_path: path of the model as the followers open it.
        identity: digest of program and files, which each follower compares with its own.
        devices: devices of the ranks.
        lost: called once, on a thread, with the reason, when a rank is gone and the followers have been killed.

    Attributes:
        pages: pages of all ranks, once the model is loaded.

    Raises:
        ConfigError: a follower cannot start, or has another program or other files.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        identity: Sequence[str],
        devices: Sequence[torch.device],
        lost: Callable[[str], None] | None = None,
    ) -> None:
        self._reason = ""
        self._on_lost = lost
        self._is_started = False
        self._all_heard = threading.Event()
        self._start_ended = threading.Event()
        self._meeting: Future[ProcessGroup] = Future()
        self._number = 0
        self._option = config.ranks_option.partition(" ")[0]
        self._signs: SignsOfLife | None = None
        self._links: dict[int, socket.socket] = {}
        self._life: dict[int, socket.socket] = {}
        self._page_links: dict[int, socket.socket] = {}
        self.pages: RankPages | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        # Without it a process at its end and its followers would wait for each other.
        atexit.register(self.close)
        self._folder = Path(tempfile.mkdtemp(prefix="rootgraft-ranks-"))
        store = self._folder / "store"
        try:
            for rank in range(1, len(devices)):
                self._start(rank)
            self._signs = SignsOfLife(
                self._life, {rank: each.pid for rank, each in self._processes.items()}, self._lose
            )
            for rank, device in enumerate(devices):
                if rank:
                    self._greet(rank, config, model_path, identity, store, device, len(devices))
            self._hear_all()
            self._all_heard.set()
            self._signs.started()
            width = config.tensor_parallel_size
            self._meet(
                lambda: ProcessGroup(
                    0, len(devices), store, devices[0], COLLECTIVE_SECONDS, width, may_end=lost is not None
                )
            )
            if devices[0].type == "cpu":
                # On a CPU the store is not needed once all ranks have joined. It is removed now, because a rank 0 that
                # is killed later could not remove it. NCCL reads the store later too.
                shutil.rmtree(self._folder, ignore_errors=True)
        except RuntimeError as error:
            self.fail("The ranks cannot reach one another.")
            raise ConfigError(f"{self._option}: the ranks cannot reach one another: {_line(error)}") from error
        except BaseException:
            self.fail("A rank could not start.")
            raise

    @property
    def group(self) -> ProcessGroup:
        """The process group from the view of rank 0, once all ranks have joined it."""
        return self._meeting.result()

    @property
    def reason(self) -> str:
        """Why the ranks have ended; "" while they compute."""
        return self._reason

    @property
    def num_sent(self) -> int:
        """Number of messages sent so far."""
        return self._number

    @property
    def page_links(self) -> Mapping[int, socket.socket]:
        """The links for pages by rank."""
        return self._page_links

    def step(self, batch: Batch) -> Batch:
        """Have the followers run the forward pass of a batch; return rank 0's part of it. Raises EngineDead."""
        if all(isinstance(each, PageCopy) for each in batch.copies):
            self._send(Kind.STEP, pack_batch(batch))
            return batch
        assert self.pages is not None
        parts = [replace(batch, copies=self.pages.part(batch.copies, rank)) for rank in range(len(self._links) + 1)]
        self._send_parts(Kind.STEP, [pack_batch(part) for part in parts[1:]])
        return parts[0]

    def load(self, loads: Sequence[PageLoad | StateLoad]) -> None:
        """Have the followers fill their parts of pages and slots, between two steps. Raises EngineDead."""
        assert self.pages is not None
        parts = [Batch((), (), self.pages.part(loads, rank)) for rank in self._links]
        self._send_parts(Kind.LOAD, [pack_batch(part) for part in parts])

    def head(self, tokens: Sequence[int], *, best: bool) -> None:
        """Have followers compute logits, or only the largest ones, for tokens of the last step. Raises EngineDead."""
        self._send(Kind.BEST if best else Kind.LOGITS, pack_numbers(tokens))

    def install(self, slot: int, shards: Sequence[PreparedAdapter]) -> None:
        """Write shards of an adapter, in the order of the followers, into their slots. Raises EngineDead."""
        self._send_parts(Kind.INSTALL, (pack_adapter(slot, shard) for shard in shards))

    def clear(self, slot: int) -> None:
        """Empty a slot, if the followers are still there. Raises EngineDead."""
        if not self._reason:
            self._send(Kind.CLEAR, pack_numbers([slot]))

    def together(self, compute: Callable[[], T]) -> T:
        """Compute a step of all ranks.

        Raises:
            EngineDead: not all ranks have computed the step, so no further step is possible.
        """
        try:
            found = compute()
            if self._reason:  # Sums that were aborted on a device return wrong values.
                raise EngineDead(self._reason)
            return found
        except EngineDead:
            raise
        except Exception as error:
            self.fail(f"A step failed on rank 0 ({type(error).__name__}: {_line(error)}): ending all ranks.")
            raise EngineDead(self._reason) from error

    def started(self) -> None:
        """Record that all ranks have loaded the model: if a rank is lost from now on, ``lost`` is called."""
        self._is_started = True
        self._start_ended.set()

    def fail(self, reason: str) -> None:
        """End the followers: rank 0 has left the common order, and no further step can be computed."""
        self._reason = self._reason or reason
        self._all_heard.set()
        self._start_ended.set()
        if self._signs is not None:
            self._signs.close()
        self._leave()
        self.kill()

    def close(self) -> None:
        """End the followers, between two steps or after the last, and leave the group, so that another may begin."""
        self._all_heard.set()
        if self._signs is not None:
            self._signs.close()
        if not self._reason:
            with suppress(EngineDead):
                self._send(Kind.END, b"")
            self._reason = self._reason or "The ranks have been closed."
            for process in self._processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
        with suppress(RuntimeError):
            self.group.close()
        self.kill()

    def kill(self) -> None:
        """Kill the followers that still run, close the links, and remove the folder with the group's store."""
        atexit.unregister(self.close)
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()
        for link in (*self._links.values(), *self._life.values(), *self._page_links.values()):
            link.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int) -> None:
        kinds = self._links, self._life, self._page_links
        theirs = []
        for links in kinds:
            links[rank], end = socket.socketpair()
            theirs.append(end)
        numbers = [end.fileno() for end in theirs]
        command = [sys.executable, "-P", "-m", "rootgraft.engine.executor.follower_process"]
        engine = os.getpid() if self._on_lost else 0
        try:
            self._processes[rank] = subprocess.Popen(
                [*command, *map(str, (*numbers, os.getpid(), engine))],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise ConfigError(
                f"{self._option}: the process of rank {rank} could not be started: {error.strerror}."
            ) from error
        finally:
            for end in theirs:
                end.close()

    def _greet(
        self,
        rank: int,
        config: EngineConfig,
        model_path: Path,
        identity: Sequence[str],
        store: Path,
        device: torch.device,
        size: int,
    ) -> None:
        """Send a follower the description of its part."""
        hello = {
            "rank": rank,
            "size": size,
            "store": str(store),
            "device": str(device),
            "path": str(model_path),
            "identity": list(identity),
            "config": asdict(config),
        }
        # ``_hear`` reports what is wrong with the link.
        with suppress(OSError):
            self._links[rank].sendall(json.dumps(hello).encode() + b"\n")

    def _meet(self, make: Callable[[], ProcessGroup]) -> None:
        """Wait until all ranks are in the group.

        The call that joins the group cannot be interrupted while it waits for another rank. So it is made on a daemon
        thread: if a rank is lost meanwhile, this method raises although the call still waits.

        Raises:
            RuntimeError: the group does not come about, or a rank is lost before.
        """

        def run() -> None:
            try:
                made = make()
            except BaseException as error:
                with suppress(InvalidStateError):
                    self._meeting.set_exception(error)
                return
            try:
                self._meeting.set_result(made)
            except InvalidStateError:  # a rank was lost meanwhile
                made.close()

        threading.Thread(target=run, name="rank-meeting", daemon=True).start()
        self._meeting.result()

    def _hear_all(self) -> None:
        """Wait for the answers of all followers in the order of arrival, so that an ended follower is noticed at once.

        Raises:
            ConfigError: a follower is not ready; the message is that of the first such follower.
        """
        ranks: dict[Any, int] = {link: rank for rank, link in self._links.items()}
        deadline = time.monotonic() + START_SECONDS
        while ranks:
            found = wait(list(ranks), max(0.0, deadline - time.monotonic()))
            for link in found or [next(iter(ranks))]:
                self._hear(ranks.pop(link), is_there=bool(found))

    def _hear(self, rank: int, *, is_there: bool) -> None:
        link = self._links[rank]
        link.settimeout(START_SECONDS if is_there else 0.0)
        try:
            answer = read_line(link)
        except (BlockingIOError, TimeoutError):
            answer = f"has not answered within {START_SECONDS:g} s"
        except OSError:
            answer = f"has ended with code {self._processes[rank].wait()}"
        link.settimeout(None)
        if self._reason:
            raise ConfigError(f"{self._option}: {self._reason}")
        if answer != "ready":
            raise ConfigError(f"{self._option}: rank {rank} {answer}.")

    def _send(self, kind: Kind, content: bytes) -> None:
        self._number += 1
        message = RankMessage(self._number, kind, content)
        for rank in self._links:
            self._write(rank, message)

    def _send_parts(self, kind: Kind, contents: Iterable[bytes]) -> None:
        """Send each follower a message of its own, in their order."""
        self._number += 1
        for rank, content in zip(self._links, contents, strict=True):
            self._write(rank, RankMessage(self._number, kind, content))

    def _write(self, rank: int, message: RankMessage) -> None:
        if self._reason:
            raise EngineDead(self._reason)
        try:
            self._links[rank].sendall(message.to_bytes())
        except OSError as error:
            self._lose(rank, ENDED)
            raise EngineDead(self._reason) from error

    def _lose(self, rank: int, reason: str) -> None:
        """End all ranks, because one has ended or is silent."""
        if reason == ENDED:
            # Until then the thread that starts the ranks reads the answer of each, including this rank's last words.
            self._all_heard.wait()
        if self._reason:
            return
        words = self._last_words(rank) if self._all_heard.is_set() else ""
        self._reason = words or f"Rank {rank} of {len(self._links) + 1} {reason}: ending all ranks."
        for process in self._processes.values():
            process.kill()
        self._leave()
        # While rank 0 still loads, its own call of a collective fails too, and the start reports the reason.
        is_told = not self._is_started and self._start_ended.wait(_FAIL_SECONDS)
        if self._on_lost is not None and not is_told:
            self._on_lost(self._reason)

    def _leave(self) -> None:
        """Make the calls fail that wait for a lost rank: ``_meet``, or a collective of the group."""
        try:
            self._meeting.set_exception(RuntimeError(self._reason))
        except InvalidStateError:
            if self._meeting.exception() is None:
                self.group.abort()

    def _last_words(self, rank: int) -> str:
        """Return a rank's last message about its end, "" for none."""
        link = self._links[rank]
        link.settimeout(0.0)
        try:
            return read_line(link)
        except (OSError, ValueError):
            return ""


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
