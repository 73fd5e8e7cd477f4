"""Measure the distance from a teacher beside its peers: `lowtide bench divergence`, results in benchmarks/results."""

import sys
from pathlib import Path

from lowtide.cli import main

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    sys.exit(main(["bench", "divergence", "--output", str(RESULTS), *sys.argv[1:]]))
