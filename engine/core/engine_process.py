"""The engine process: receives messages, runs steps, sends messages. ``EngineClient`` starts one for each model.

    python -P -m rootgraft.engine.core.engine_process PARENT [FD LIVENESS PATH OPTIONS]

PARENT: id of the process that starts it. FD: its end of a socketpair. LIVENESS: its end of a pipe for signs of life.
PATH: folder or file of the model. OPTIONS: an `EngineConfig` as JSON. Without the optional arguments it imports the
engine, and then receives them from the socket that is its standard input (`EnginePreload`).

The process exits when the channel closes, and is killed when the thread that started it ends, so it never outlives its
parent process. It ignores SIGINT, SIGTERM and SIGHUP, which the parent handles. Exit codes: 0 after Shutdown or when
the client is gone, 70 after an error.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...grammar.parent_death import end_with_parent
from ...kernels.device_memory import is_out_of_memory
from .. import process_memory
from ..config import EngineConfig, config_of_json
from ..end_limit import EndLimit
from ..error_stream import write_last_line
from ..errors import ConfigError, EngineError
from ..ipc import Channel
from ..machine.resources import check_room
from ..machine.software import requirement
from ..machine.visible_gpus import takes_gpu
from ..messages import Failed, Heartbeat, Message, Shutdown, decode, encode
from .engine_core import EngineCore
from .liveness_thread import LivenessThread

if TYPE_CHECKING:
    from ..executor.load_weights import Weights

HEARTBEAT_SECONDS = 0.25
GOODBYE_SECONDS = 5.0  # Seconds for the client to read the last frame.
ORPHAN_SECONDS = 4.0  # Seconds for a process whose server is gone to end by itself.
CLOSE_SECONDS = 8.0  # Seconds for threads to end; less than the client waits before it kills the process.
START_FAILED = -1  # Id of the Failed message that is sent in place of Ready.
EXIT_SOFTWARE = 70
# Bytes of address space that importing torch takes. A lack of them could break the import at any point.
_TORCH_BYTES = 640 << 20
MOST_BYTES = 1 << 18  # Largest size in bytes of arguments from a socket; more than the system passes in one message.
# Environment variables for torch's allocator on a GPU, with its new and its old name.
_ALLOCATOR_SETTINGS = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
SWITCH_SECONDS = 0.0005  # Longest time in seconds for which the mask thread keeps the GIL from the step loop.


def serve(core: EngineCore, channel: Channel, liveness: LivenessThread) -> None:
    """Run steps until Shutdown, which fails all open sequences. Raises ConnectionError if the client ends.

    On a device that computes while the host continues (a GPU), a step's messages are sent after the launch of the next
    step. On a CPU they are sent at once: the client then reads them while only one thread plans the next step, before
    the kernels of that step occupy all cores.
    """
    due = 0.0
    told: frozenset[int] = frozenset()  # The sequences that the last heartbeat reported as waiting.
    out: list[Message] = []
    trim = process_memory.IdleTrim(_trim_heap)
    while True:
        liveness.num_passes += 1
        waiting = 0.0 if core.has_work or out else max(0.0, due - time.monotonic())
        messages = [message for payload in channel.receive(waiting) for message in decode(payload)]
        core.handle(messages)
        if core.has_work:
            trim.work()
        elif waiting and not messages:
            trim.idle()
        if any(isinstance(message, Shutdown) for message in messages):
            channel.send(encode(out + core.close()))
            return channel.drain(GOODBYE_SECONDS)
        launched = core.launch() if core.has_work else None
        is_due = time.monotonic() >= due
        queued = core.waiting if told or is_due else ()
        if is_due or not told.issubset(queued):
            out.append(Heartbeat(core.stats(), core.take_observations(), core.adapters_in_use(), queued))
            told = frozenset(queued)
            due = time.monotonic() + HEARTBEAT_SECONDS
        if out:
            channel.send(encode(out))
        out = core.finish(launched) if launched or core.has_work else []
        if out and not core.overlaps:
            channel.send(encode(out))
            out = []


def _trim_heap() -> None:
    # This imports torch, which the core has imported by now.
    importlib.import_module("...kernels.memory", __package__).trim_heap()


def start(
    config: EngineConfig, model_path: Path, channel: Channel, weights: Weights | None = None
) -> EngineCore | None:
    """Load the engine, except weights that are given, and send Ready, or the error that prevents it."""
    try:
        core = _load(config, model_path, weights)
    except EngineError as error:
        _tell_failure(channel, error)
        return None
    channel.send(encode([core.ready]))
    process_memory.freeze()
    return core


def _tell_failure(channel: Channel, error: EngineError) -> None:
    """Send the error that prevents the start."""
    channel.send(encode([Failed(START_FAILED, type(error).__name__, str(error))]))
    channel.drain(GOODBYE_SECONDS)


def start_liveness(fd: int, channel: Channel) -> LivenessThread | None:
    """Start the thread that gives signs of life. If the system refuses a thread, send the error and return None."""
    try:
        return LivenessThread(fd, end_orphan)
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
    _tell_failure(channel, ConfigError("The system gives the engine no thread: raise the limits ulimit -v and -u"))
    return None


def _load(config: EngineConfig, model_path: Path, weights: Weights | None = None) -> EngineCore:
    """Load the engine. Raises EngineError, also if torch cannot be imported or memory is exhausted."""
    # The text is made before the start, because there may be no memory for it after a failure.
    advice = _advice(config)
    try:
        _import_torch()
        return EngineCore.load(config, model_path, weights, _end_engine)
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    # Raised outside of the handler, so that the memory held by the error's frames is free.
    raise ConfigError(f"The model does not fit the memory ({reason}): {advice}")


def _end_engine(reason: str) -> None:
    """End the process, because its model has lost a rank. The client notices the end of the channel."""
    write_last_line(f"The engine ends: {reason}")
    os._exit(EXIT_SOFTWARE)


def _import_torch() -> None:
    """Import the modules that the core needs to load.

    Raises:
        ConfigError: a library is missing.
        OSError: there is not enough memory for the imports.
    """
    try:
        check_room(_TORCH_BYTES)
        with process_memory.uncollected():
            importlib.import_module("torch")
    except (ImportError, OSError) as error:
        if is_out_of_memory(error):
            raise
        name = getattr(error, "name", None) or "torch"
        raise ConfigError(
            f"The package {name} cannot be imported: {error}. Try: {sys.executable} -m pip install --force-reinstall "
            f"'{requirement(name)}', or rootgraft doctor"
        ) from error


def _advice(config: EngineConfig) -> str:
    """Return advice for the user on a model that does not fit on the device of the options."""
    if takes_gpu(config.device):
        return (
            "end what else uses the GPU, or take a smaller model or shorter steps. "
            "Try: rootgraft serve --max-num-batched-tokens 512 --max-num-seqs 16"
        )
    return "take a smaller one, or keep its weights in 8 bits. Try: rootgraft serve --quantization int8_weight_only"


def parse_config(options: str) -> EngineConfig:
    """Parse options given as JSON."""
    return config_of_json(json.loads(options))


def set_up_process() -> None:
    """Make the settings that an engine process needs before it starts a thread or imports torch."""
    if not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        # Adapters of many sizes are loaded and unloaded. In segments of fixed size this leaves holes that are too small
        # for later adapters; segments that can grow leave no such holes.
        os.environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})
    sys.setswitchinterval(SWITCH_SECONDS)
    process_memory.share_heap()


def end_orphan() -> None:
    """End the process, whose server is gone, after ``ORPHAN_SECONDS`` at the latest, whatever its threads do."""
    EndLimit(ORPHAN_SECONDS, EXIT_SOFTWARE, "An engine whose server is gone")


def run(fd: int, liveness_fd: int, config: EngineConfig, path: Path, weights: Weights | None = None) -> int:
    """Run an engine until its client shuts it down. Returns the exit code of its process.

    Args:
        fd, liveness_fd: the process's ends of the channel and of the pipe for signs of life.
        weights: weights that are already loaded.
    """
    channel = Channel(socket.socket(fileno=fd))
    try:
        liveness_thread = start_liveness(liveness_fd, channel)
        if liveness_thread is None:
            return EXIT_SOFTWARE
        with closing(liveness_thread) as liveness:
            core = start(config, path, channel, weights)
            if core is None:
                return EXIT_SOFTWARE
            # The core is closed even if the client is gone, because its waiting threads would keep the process alive.
            with closing(core):
                try:
                    serve(core, channel, liveness)
                finally:
                    # The limit is never cancelled, so it also covers what the interpreter does at exit.
                    EndLimit(CLOSE_SECONDS, EXIT_SOFTWARE, "What the engine closes")
    except ConnectionError:
        return 0
    except Exception:
        write_last_line(traceback.format_exc())
        return EXIT_SOFTWARE
    return 0


def preload() -> list[str]:
    """Import the engine and wait for the process's arguments. Returns none if the client disconnects."""
    # Errors of imports are ignored here, as the start reports them.
    with suppress(Exception), process_memory.uncollected():
        importlib.import_module("torch")
        importlib.import_module("..executor.worker", __package__)
    try:
        with socket.socket(fileno=os.dup(0)) as client:
            message, fds, _, _ = socket.recv_fds(client, MOST_BYTES, 2)
    except MemoryError:
        # The client starts another process, which reports that memory is exhausted.
        return []
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return [*map(str, fds), *json.loads(message)] if len(fds) == 2 else []


def main(arguments: list[str]) -> int:
    """Run the engine process. Returns its exit code."""
    parent, *arguments = arguments
    end_with_parent(int(parent))
    set_up_process()
    if not (arguments or (arguments := preload())):
        return 0
    fd, liveness_fd, path, options = arguments
    return run(int(fd), int(liveness_fd), parse_config(options), Path(path))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
