"""Lets tests import the benchmarks, which are programs that import modules of their own folder."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

sys.path.append(str(BENCHMARKS))
