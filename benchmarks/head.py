"""Measure linear + cross entropy beside its peers: `lowtide bench head`, with the results in benchmarks/results."""

import sys
from pathlib import Path

from lowtide.cli import main

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    sys.exit(main(["bench", "head", "--output", str(RESULTS), *sys.argv[1:]]))
