"""Look for the longest sequence that runs: `lowtide bench longest`, with the results in benchmarks/results."""

import sys
from pathlib import Path

from lowtide.cli import main

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    sys.exit(main(["bench", "longest", "--output", str(RESULTS), *sys.argv[1:]]))
