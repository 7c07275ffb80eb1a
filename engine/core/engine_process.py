"""Engine process: receives messages, runs steps and sends messages. ``EngineClient`` starts one for each model::

    python -P -m rootgraft.engine.core.engine_process PARENT [FD LIVENESS PATH OPTIONS]

PARENT: id of the process that starts the engine process. FD: descriptor of the process's end of a socketpair. LIVENESS:
descriptor of its end of a pipe for signs of life. PATH: folder or file of the model. OPTIONS: an `EngineConfig` as
JSON. Without the optional arguments, the process imports the engine, and then receives the arguments from the socket
that is its standard input (`EnginePreload`).

The process exits when the channel closes, and it is killed when the thread that started it ends. So it never outlives
its parent process. It ignores SIGINT, SIGTERM and SIGHUP, which the parent handles. Exit codes: 0 after Shutdown or
when the client is gone, 70 after an error.
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
GOODBYE_SECONDS = 5.0  # Seconds that the client has to read the last frame.
ORPHAN_SECONDS = 4.0  # Seconds that the process has to end by itself after its server has gone.
CLOSE_SECONDS = 8.0  # Seconds that threads have to end. The client waits longer than this before it kills the process.
START_FAILED = -1  # Id of the Failed message that is sent instead of Ready.
EXIT_SOFTWARE = 70
# Bytes of address space that importing torch needs. With less, the import could fail at any point and leave broken
# modules.
_TORCH_BYTES = 640 << 20
MOST_BYTES = 1 << 18  # Largest size in bytes of the arguments from a socket. The system passes less in one message.
# Environment variables for torch's CUDA allocator: the new name and the old name.
_ALLOCATOR_SETTINGS = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
# Longest time in seconds for which the mask thread may hold the GIL before the step loop gets it.
SWITCH_SECONDS = 0.0005


def serve(core: EngineCore, channel: Channel, liveness: LivenessThread) -> None:
    """Run steps until Shutdown, which fails all open sequences. Raises ConnectionError if the client ends.

    On a device that computes while the host continues (a GPU), the messages of a step are sent after the launch of the
    next step. On a CPU they are sent at once. The client can then read them while only one thread plans the next step,
    before the kernels of that step occupy all cores.
    """
    due = 0.0
    told: frozenset[int] = frozenset()  # Ids of the sequences that the last heartbeat reported as waiting.
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
    # This imports torch, which the engine core has already imported.
    importlib.import_module("...kernels.memory", __package__).trim_heap()


def start(
    config: EngineConfig, model_path: Path, channel: Channel, weights: Weights | None = None
) -> EngineCore | None:
    """Load the engine, without weights that are given, and send Ready, or else Failed with the error."""
    try:
        core = _load(config, model_path, weights)
    except EngineError as error:
        _tell_failure(channel, error)
        return None
    channel.send(encode([core.ready]))
    process_memory.freeze()
    return core


def _tell_failure(channel: Channel, error: EngineError) -> None:
    """Send the error that prevented the start."""
    channel.send(encode([Failed(START_FAILED, type(error).__name__, str(error))]))
    channel.drain(GOODBYE_SECONDS)


def start_liveness(fd: int, channel: Channel) -> LivenessThread | None:
    """Start the liveness thread. If the system refuses a thread, send the error and return None."""
    try:
        return LivenessThread(fd, end_orphan)
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
    _tell_failure(channel, ConfigError("The system refuses the engine a thread: raise the limits of ulimit -v and -u"))
    return None


def _load(config: EngineConfig, model_path: Path, weights: Weights | None = None) -> EngineCore:
    """Load the engine. Raises EngineError, also if torch cannot be imported or memory is exhausted."""
    # The text is built before the start, because there may be no memory for it after a failure.
    advice = _advice(config)
    try:
        _import_torch()
        return EngineCore.load(config, model_path, weights, _end_engine)
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    # The error is raised outside of the handler, so that the memory that the original error's frames hold is freed.
    raise ConfigError(f"The model does not fit into memory ({reason}): {advice}")


def _end_engine(reason: str) -> None:
    """End the process, because a rank of its model was lost. The client notices that the channel has closed."""
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
    """Return advice for the user if a model does not fit into the memory of the configured device."""
    if takes_gpu(config.device):
        return (
            "end other programs on the GPU, or use a smaller model or shorter steps. Try: rootgraft serve "
            "--max-num-batched-tokens 512 --max-num-seqs 16"
        )
    return "use a smaller one, or keep its weights in 8 bits. Try: rootgraft serve --quantization int8_weight_only"


def parse_config(options: str) -> EngineConfig:
    """Parse options given as JSON."""
    return config_of_json(json.loads(options))


def set_up_process() -> None:
    """Configure the process. Must be called before a thread is started or torch is imported."""
    if not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        # Adapters of many sizes are loaded and unloaded. With segments of fixed size this fragments the memory, so that
        # later adapters find no room. Segments that can grow are not fragmented in this way.
        os.environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})
    sys.setswitchinterval(SWITCH_SECONDS)
    process_memory.share_heap()
    process_memory.freeze_at_exit()


def end_orphan() -> None:
    """End the process within ``ORPHAN_SECONDS`` because its server is gone, whatever its threads do."""
    EndLimit(ORPHAN_SECONDS, EXIT_SOFTWARE, "An engine whose server is gone")


def run(fd: int, liveness_fd: int, config: EngineConfig, path: Path, weights: Weights | None = None) -> int:
    """Run an engine until its client shuts it down. Returns the exit code of its process.

    Args:
        fd, liveness_fd: descriptors of the process's ends of the message channel and of the liveness pipe.
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
            # The core is closed even if the client is gone, because the core's waiting threads would keep the process
            # alive.
            with closing(core):
                try:
                    serve(core, channel, liveness)
                finally:
                    # The time limit is never cancelled, so it also covers the interpreter's work at exit.
                    EndLimit(CLOSE_SECONDS, EXIT_SOFTWARE, "What the engine closes")
    except ConnectionError:
        return 0
    except Exception:
        write_last_line(traceback.format_exc())
        return EXIT_SOFTWARE
    return 0


def preload() -> list[str]:
    """Import the engine, and wait for the process's arguments. Returns an empty list if the client disconnects."""
    # Import errors are ignored here, because the start reports them.
    with suppress(Exception), process_memory.uncollected():
        importlib.import_module("torch")
        importlib.import_module("..executor.worker", __package__)
    try:
        with socket.socket(fileno=os.dup(0)) as client:
            message, fds, _, _ = socket.recv_fds(client, MOST_BYTES, 2)
    except MemoryError:
        # If this fails, the client starts another process, which reports that memory is exhausted.
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
