"""The parts of ``benchmarks/fuzz.py``. They use helpers of the tests, which this makes importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
