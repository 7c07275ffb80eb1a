"""Program worker process: runs one untrusted program at a time under limits on time and memory.

A job is a head in JSON followed by bytes. The head names a function of this package, which runs the program, and has
the limits and the function's arguments. The worker answers `STARTED` when the function is imported, and then `DONE`
with the function's bytes or `REFUSED` with its error. Frames have the same form as those of compile workers.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from ...grammar.compile.compile_worker import (
    DONE,
    NICE,
    READY,
    REFUSED,
    STARTED,
    limit_process,
    read_frame,
    write_frame,
)
from ...grammar.parent_death import end_with_parent
from ..errors import EngineError

Program = Callable[[Any, bytes], bytes]
"""A function that a job names: takes arguments, as JSON has them, and bytes."""


def encode_job(program: str, seconds: float, num_bytes: int, arguments: Any, data: bytes) -> bytes:
    """Return the frame of a job.

    Args:
        program: a function as ``module:name``, below the package.
        seconds, num_bytes: limits on processor time and on added address space.
        arguments: arguments of JSON's types.
    """
    head = json.dumps([program, seconds, num_bytes, arguments]).encode()
    return b"".join((len(head).to_bytes(4, "little"), head, data))


def main() -> None:
    """Serve until the input is closed."""
    end_with_parent(int(sys.argv[1]))
    os.nice(NICE)
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    if read_frame(incoming) is None:
        return
    write_frame(outgoing, READY)
    while (job := read_frame(incoming)) is not None:
        start = 4 + int.from_bytes(job[:4], "little")
        program, seconds, num_bytes, arguments = json.loads(job[4:start])
        function = _imported(program)
        write_frame(outgoing, STARTED)
        write_frame(outgoing, _answer(function, seconds, num_bytes, arguments, job[start:]))


def _imported(program: str) -> Program:
    module, name = program.split(":")
    found: Program = getattr(importlib.import_module(f"rootgraft.{module}"), name)
    return found


def _answer(function: Program, seconds: float, num_bytes: int, arguments: Any, data: bytes) -> bytes:
    limit_process(seconds, num_bytes)
    try:
        return DONE + function(arguments, data)
    except EngineError as error:
        return _refused(str(error), is_own=True)
    except MemoryError:
        return _refused(f"needs more than {num_bytes >> 20} MiB")
    except RecursionError:
        return _refused("is nested too deeply")
    except Exception as error:  # a program may raise anything
        return _refused(f"fails: {type(error).__name__}: {str(error)[:200]}")
    finally:
        limit_process(0, 0)


def _refused(text: str, *, is_own: bool = False) -> bytes:
    return REFUSED + json.dumps([is_own, text]).encode()
