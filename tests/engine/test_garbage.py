"""The collector of a process that serves: what was loaded must not keep it from collecting what comes later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SERVES = """
import gc
from engine.garbage import freeze

loaded = [[] for _ in range(1_000_000)]
freeze()
full = gc.get_stats()[2]["collections"]
served = []
for number in range(110_000):
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
