"""Measure a training step end to end beside its peers: `lowtide bench step`, results in benchmarks/results."""

import sys
from pathlib import Path

from lowtide.cli import main

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    sys.exit(main(["bench", "step", "--output", str(RESULTS), *sys.argv[1:]]))
