"""Lines on a standard error stream that cannot be written: on a full disk, closed, a pipe that nobody reads."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.machine.waits import HANG_SECONDS

WRITES = """
import sys
from rootgraft.engine import error_stream
getattr(error_stream, sys.argv[1])("a line " + "x" * 200_000)
print("goes on")
"""
ENDS = """
import os, sys, threading, time
from rootgraft.engine.end_limit import EndLimit
threading.Thread(target=sys.stderr.write, args=("x" * 200_000,), daemon=True).start()
EndLimit(0.5, 7, "What is tested")
time.sleep(1000)
"""


@contextmanager
def stream(kind: str) -> Iterator[Any]:
    """What a process gets as its standard error stream."""
    if kind == "full disk":
        with open("/dev/full", "wb") as full:
            yield full
    elif kind == "reader gone":
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "wb") as end:
            yield end
    else:
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        with open(reader, "rb"), open(writer, "wb") as end:
            yield end


def run(program: str, kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", program, *arguments]
    with stream(kind) as end:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=end, text=True, timeout=HANG_SECONDS, check=False)


@pytest.mark.parametrize("kind", ["full disk", "reader gone"])
def test_a_line_that_cannot_be_written_is_lost(kind: str) -> None:
    assert run(WRITES, kind, "write_line").stdout == "goes on\n"


@pytest.mark.parametrize("kind", ["full disk", "reader gone", "nobody reads"])
def test_the_last_line_waits_for_nobody(kind: str) -> None:
    assert run(WRITES, kind, "write_last_line").stdout == "goes on\n"


def test_the_last_line_is_whole_where_it_is_read() -> None:
    command = [sys.executable, "-P", "-c", WRITES, "write_last_line"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    assert done.stderr == "a line " + "x" * 200_000 + "\n"


@pytest.mark.parametrize("kind", ["full disk", "reader gone", "nobody reads"])
def test_a_process_ends_whatever_its_stream_does(kind: str) -> None:
    assert run(ENDS, kind).returncode == 7
