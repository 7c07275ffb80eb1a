"""Compile worker process: compiles one grammar at a time under limits on time and memory.

Frames in both directions are a 4-byte length and a body; the first byte of an answer's body is its kind. The first
frame to the worker is the vocabulary, the others are grammars. The worker answers each grammar with `STARTED` when
everything that the compile needs is imported, and then with `DONE` or `REFUSED`.

The engine computes on every core, so each time slice of a compile delays a step of all streams. Workers with the
scheduling class SCHED_IDLE avoid this (`worker_handle.WorkerHandle`). If they get no processor time, workers with a
higher niceness are used. On Linux niceness belongs to a thread and, without privileges, can only be raised. So each
grammar is compiled on a thread of its own, whose niceness is raised once it has used the processor time that a small
grammar needs.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from threading import Thread, get_ident
from typing import BinaryIO

from ..errors import GrammarError
from ..parent_death import end_with_parent
from ..schema.error_location import complexity_error, size_error
from ..spec import GrammarKind, GrammarSpec
from ..vocabulary import Vocabulary
from .lean_import import import_xgrammar

READY, STARTED, DONE, REFUSED = b"r", b"s", b"d", b"e"
MAX_FRAME = 1 << 30
# Niceness above the engine's: of the worker process; of loading the modules that compiles need; and of a compile that
# has used ``PROMPT_SECONDS`` of processor time. The scheduler then gives them a third, a tenth and a 28th of the weight
# of an engine thread, so that they make progress even if the engine's threads never sleep.
NICE, LOADING_NICE, COMPILING_NICE = 5, 10, 15
MOST_NICE = 19
PROMPT_SECONDS = 0.01
ADDRESS_SPACE, RESIDENT = 0, 1  # columns of /proc/self/statm, in pages


def encode_vocabulary(vocabulary: Vocabulary) -> bytes:
    """Return a vocabulary as a frame's body; `decode_vocabulary` reads it."""
    head = json.dumps([list(map(len, vocabulary.tokens)), sorted(vocabulary.special), vocabulary.eos, vocabulary.size])
    return len(head).to_bytes(4, "little") + head.encode() + b"".join(vocabulary.tokens)


def decode_vocabulary(data: bytes) -> Vocabulary:
    """Return the vocabulary of a frame's body."""
    start = 4 + int.from_bytes(data[:4], "little")
    lengths, special, eos, size = json.loads(data[4:start])
    tokens = []
    for length in lengths:
        tokens.append(data[start : start + length])
        start += length
    return Vocabulary(tuple(tokens), frozenset(special), tuple(eos), size)


def encode_job(spec: GrammarSpec, seconds: float, num_bytes: int) -> bytes:
    head = json.dumps([spec.kind.value, seconds, num_bytes]).encode()
    return len(head).to_bytes(4, "little") + head + spec.content


def encode_error(error: GrammarError) -> bytes:
    return REFUSED + json.dumps([error.keyword, error.pointer, error.reason]).encode()


def decode_error(body: bytes) -> GrammarError:
    return GrammarError(*json.loads(body[1:]))


def write_frame(stream: BinaryIO, body: bytes) -> None:
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    head = stream.read(4)
    return stream.read(int.from_bytes(head, "little")) if len(head) == 4 else None


def main(is_first: bool) -> None:
    """Compile the grammars that arrive on standard input until it is closed.

    Args:
        is_first: whether this is the first worker, without which nothing can be compiled. It loads its modules at the
            priority with which it was started, and lowers its priority afterwards.
    """
    end_with_parent(int(sys.argv[1]))
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    first = read_frame(incoming)
    if first is None:
        return
    vocabulary = decode_vocabulary(first)
    if is_first:
        _prepare(vocabulary)
        os.nice(NICE)
    else:
        _run_nice(lambda: _prepare(vocabulary), LOADING_NICE)
    write_frame(outgoing, READY)
    while (job := read_frame(incoming)) is not None:
        start = 4 + int.from_bytes(job[:4], "little")
        kind, seconds, num_bytes = json.loads(job[4:start])
        spec = GrammarSpec(GrammarKind(kind), job[start:])
        if spec.kind is GrammarKind.EBNF and find_spec("xgrammar") is not None:
            _run_nice(lambda: _prepare_ebnf(vocabulary), LOADING_NICE)
        write_frame(outgoing, STARTED)
        compiled: list[bytes] = []
        limits = seconds, num_bytes
        _run_nice(lambda: compiled.append(_compiled(spec, vocabulary, *limits)), COMPILING_NICE, PROMPT_SECONDS)  # noqa: B023
        write_frame(outgoing, compiled[0])


def _run_nice(work: Callable[[], object], nice: int, prompt: float = 0.0) -> None:
    """Run `work` on a thread that takes on a niceness above the engine's after `prompt` seconds of processor time."""
    clock: list[int] = []
    own = os.getpriority(os.PRIO_PROCESS, 0)  # `NICE` above the engine's, whatever that is

    def run() -> None:
        clock.append(time.pthread_getcpuclockid(get_ident()))
        work()

    thread = Thread(target=run, daemon=True)
    thread.start()
    # The thread has ended meanwhile.
    with suppress(OSError):
        while thread.is_alive() and (left := prompt - sum(map(time.clock_gettime, clock))) > 0:
            thread.join(left)
        os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, min(own - NICE + nice, MOST_NICE))
    thread.join()


def _prepare(vocabulary: Vocabulary) -> None:
    """Compile a small grammar, so that lazy set-up is not charged to the first request."""
    from .compiler import lower

    lower(GrammarSpec.json_object(), vocabulary)


def _prepare_ebnf(vocabulary: Vocabulary) -> None:
    """Import XGrammar and give it the vocabulary; both are kept."""
    import_xgrammar()
    _ = vocabulary.xgrammar


def _compiled(spec: GrammarSpec, vocabulary: Vocabulary, seconds: float, num_bytes: int) -> bytes:
    from .compiler import lower

    before = _statm_bytes(RESIDENT)
    limit_process(seconds, num_bytes)
    try:
        artifact = lower(spec, vocabulary)
    except GrammarError as error:
        return encode_error(error)
    except MemoryError:
        return encode_error(size_error(spec, f"needs more than {num_bytes >> 20} MiB to compile"))
    except RecursionError:
        return encode_error(complexity_error(spec, "is nested too deeply"))
    finally:
        limit_process(0, 0)
    grown = _statm_bytes(RESIDENT) - before
    return DONE + replace(artifact, num_bytes=max(artifact.num_bytes, grown)).encode()


def limit_process(seconds: float, num_bytes: int) -> None:
    """Limit processor time and address space from now on; zeros lift the limits."""
    _, most_cpu = resource.getrlimit(resource.RLIMIT_CPU)
    _, most_space = resource.getrlimit(resource.RLIMIT_AS)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(usage.ru_utime + usage.ru_stime + 2 * seconds) + 2 if seconds else most_cpu
    space = _statm_bytes(ADDRESS_SPACE) + num_bytes if num_bytes else most_space
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, most_cpu))
    resource.setrlimit(resource.RLIMIT_AS, (space, most_space))


def _statm_bytes(column: int) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * resource.getpagesize()
