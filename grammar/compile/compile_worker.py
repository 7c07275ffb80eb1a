"""The process that compiles: one grammar at a time, under limits, until its input is closed.

Frames both ways are a 4-byte length and a body; a body's first byte says what it is. The vocabulary comes first. For
each grammar the answer is `STARTED`, once everything that it needs is imported, then `DONE` or `REFUSED`.

The engine computes on every core, so that each slice of time given to a compile delays a step of all streams: see
`worker_handle.WorkerHandle` for the class in which that does not happen. Where such a process would starve, it is the
niceness that counts; that is a thread's own on Linux and, without privileges, can only be raised. So each grammar is
compiled on a thread of its own, which is as quick as the process while it is new and steps back once it has had what a
small grammar takes.
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
from threading import Thread, get_ident
from typing import BinaryIO

from ..emit.grammar_artifact import GrammarArtifact
from ..errors import GrammarError
from ..schema.error_location import large_part, likeliest_part
from ..spec import GrammarKind, GrammarSpec
from ..vocabulary import Vocabulary

READY, STARTED, DONE, REFUSED = b"r", b"s", b"d", b"e"
MAX_FRAME = 1 << 30
# Niceness of the process, of loading what compiles need, and of a compile that has had so many seconds of processor
# time: with weights of 335, 110 and 36 against 1024 of the engine's threads, each gets on even if these never sleep.
NICE, LOADING, LAST = 5, 10, 15
PROMPT_SECONDS = 0.01


def encode_vocabulary(vocabulary: Vocabulary) -> bytes:
    """A vocabulary as one frame's body."""
    head = json.dumps([list(map(len, vocabulary.tokens)), sorted(vocabulary.special), vocabulary.eos, vocabulary.size])
    return len(head).to_bytes(4, "little") + head.encode() + b"".join(vocabulary.tokens)


def decode_vocabulary(data: bytes) -> Vocabulary:
    """The reverse of `encode_vocabulary`."""
    start = 4 + int.from_bytes(data[:4], "little")
    lengths, special, eos, size = json.loads(data[4:start])
    tokens = []
    for length in lengths:
        tokens.append(data[start : start + length])
        start += length
    return Vocabulary(tuple(tokens), frozenset(special), tuple(eos), size)


def encode_job(spec: GrammarSpec, seconds: float, num_bytes: int) -> bytes:
    """A grammar to compile, with the limits on processor time and memory."""
    head = json.dumps([spec.kind.value, seconds, num_bytes]).encode()
    return len(head).to_bytes(4, "little") + head + spec.content


def encode_error(error: GrammarError) -> bytes:
    """A refusal as a frame's body."""
    return REFUSED + json.dumps([error.keyword, error.pointer, error.reason]).encode()


def decode_error(body: bytes) -> GrammarError:
    """The reverse of `encode_error`."""
    return GrammarError(*json.loads(body[1:]))


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Send one frame."""
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame, or None at the end of the input."""
    head = stream.read(4)
    return stream.read(int.from_bytes(head, "little")) if len(head) == 4 else None


def main() -> None:
    """Serve until the input is closed."""
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    first = read_frame(incoming)
    if first is None:
        return
    vocabulary = decode_vocabulary(first)
    _stepping_back(lambda: _prepare(vocabulary), LOADING)
    write_frame(outgoing, READY)
    while (job := read_frame(incoming)) is not None:
        start = 4 + int.from_bytes(job[:4], "little")
        kind, seconds, num_bytes = json.loads(job[4:start])
        spec = GrammarSpec(GrammarKind(kind), job[start:])
        if spec.kind is GrammarKind.EBNF:
            _stepping_back(lambda: vocabulary.xgrammar, LOADING)
        write_frame(outgoing, STARTED)
        compiled: list[bytes] = []
        limits = seconds, num_bytes
        _stepping_back(lambda: compiled.append(_compiled(spec, vocabulary, *limits)), LAST, PROMPT_SECONDS)  # noqa: B023
        write_frame(outgoing, compiled[0])


def _stepping_back(work: Callable[[], object], nice: int, prompt: float = 0.0) -> None:
    """Do something on a thread that takes on a niceness once it has had `prompt` seconds of processor time."""
    clock: list[int] = []

    def run() -> None:
        clock.append(time.pthread_getcpuclockid(get_ident()))
        work()

    thread = Thread(target=run, daemon=True)
    thread.start()
    with suppress(OSError):  # the thread has ended
        while thread.is_alive() and (left := prompt - sum(map(time.clock_gettime, clock))) > 0:
            thread.join(left)
        os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, nice)
    thread.join()


def _prepare(vocabulary: Vocabulary) -> None:
    """Load what every compile needs, by a small one: no grammar then pays for what is set up on first use."""
    from .compiler import lower

    lower(GrammarSpec.json_object(), vocabulary)


def _compiled(spec: GrammarSpec, vocabulary: Vocabulary, seconds: float, num_bytes: int) -> bytes:
    from .compiler import lower

    before = _resident()
    _limit(seconds, num_bytes)
    try:
        artifact = lower(spec, vocabulary)
    except GrammarError as error:
        return encode_error(error)
    except MemoryError:
        return encode_error(large_part(spec, f"needs more than {num_bytes >> 20} MiB to compile"))
    except RecursionError:
        return encode_error(likeliest_part(spec, "is nested too deeply"))
    finally:
        _limit(0, 0)
    return DONE + _sized(artifact, _resident() - before).encode()


def _sized(artifact: GrammarArtifact, grown: int) -> GrammarArtifact:
    return replace(artifact, num_bytes=max(artifact.num_bytes, grown))


def _limit(seconds: float, num_bytes: int) -> None:
    """Bound processor time and address space from here on; zeros lift the bounds."""
    _, most_cpu = resource.getrlimit(resource.RLIMIT_CPU)
    _, most_space = resource.getrlimit(resource.RLIMIT_AS)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(usage.ru_utime + usage.ru_stime + 2 * seconds) + 2 if seconds else most_cpu
    space = _pages(0) + num_bytes if num_bytes else most_space
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, most_cpu))
    resource.setrlimit(resource.RLIMIT_AS, (space, most_space))


def _resident() -> int:
    return _pages(1)


def _pages(column: int) -> int:
    """A column of /proc/self/statm in bytes: 0 the address space, 1 what is resident."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * resource.getpagesize()
