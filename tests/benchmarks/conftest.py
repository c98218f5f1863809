"""Lets tests import the benchmarks, which are programs and find their modules beside them."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

sys.path.append(str(BENCHMARKS))
