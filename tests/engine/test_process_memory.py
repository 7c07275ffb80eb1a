"""Memory of a process that serves: what was loaded must not keep it from collecting what comes later; one heap."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from rootgraft.engine.process_memory import IdleTrim

ROOT = Path(__file__).parents[2]

SERVES = """
import gc
from rootgraft.engine.process_memory import freeze

loaded = [[] for _ in range(1_000_000)]
freeze()
full = gc.get_stats()[2]["collections"]
served = []
for number in range(500_000):
    served.append([number])
    served[-1].append(served[-1])
    if len(served) > 10_000:
        served.clear()
print(gc.get_stats()[2]["collections"] - full, len(gc.get_objects()) < 100_000)
"""


def test_garbage_of_requests_is_collected_however_much_was_loaded() -> None:
    ran = subprocess.run([sys.executable, "-c", SERVES], cwd=ROOT, capture_output=True, text=True, check=True)
    collections, few = ran.stdout.split()
    assert int(collections) > 0 and few == "True"


ENDS = """
import atexit, gc
from rootgraft.engine.process_memory import freeze_at_exit

class Cycle:
    def __init__(self):
        self.own = self

    def __del__(self):
        print("collected")

gc.disable()
freeze_at_exit()
Cycle()
atexit.register(print, "closed")
"""


def test_the_end_of_a_server_collects_no_garbage_and_still_closes_what_it_has() -> None:
    """A collection would visit each object of each library."""
    ran = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for code in (ENDS, ENDS.replace("freeze_at_exit()\nCycle", "Cycle"))
    ]
    assert [each.split() for each in ran] == [["closed"], ["closed", "collected"]]


THREADS = """
import ctypes, threading
from rootgraft.engine.process_memory import share_heap

share_heap()
held, together = [], threading.Barrier(6)

def allocate():
    together.wait()
    held.append([bytes(2000 + i) for i in range(500)])
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have one heap anyway")
def test_threads_share_one_heap() -> None:
    ran = subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.count("<heap nr=") == 1
    alone = THREADS.replace("share_heap()\nheld", "held")
    ran = subprocess.run([sys.executable, "-c", alone], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.count("<heap nr=") > 1


def test_a_process_that_idles_is_trimmed_once_a_minute_and_only_after_work() -> None:
    now: list[float] = [0.0]
    trims: list[float] = []
    trim = IdleTrim(lambda: trims.append(now[0]), lambda: now[0])
    for second in range(200):
        now[0] = float(second)
        if second in (5, 20, 30, 150):
            trim.work()
        else:
            trim.idle()
    assert trims == [6.0, 66.0, 151.0]
