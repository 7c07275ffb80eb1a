"""The parts of ``benchmarks/soak.py``. They use the fakes of the tests, which this makes importable."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
