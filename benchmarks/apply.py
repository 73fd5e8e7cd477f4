"""Measure linear_apply beside logits in full: `lowtide bench apply`, with the results in benchmarks/results."""

import sys
from pathlib import Path

from lowtide.cli import main

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    sys.exit(main(["bench", "apply", "--output", str(RESULTS), *sys.argv[1:]]))
