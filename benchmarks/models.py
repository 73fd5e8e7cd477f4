"""Compare every model type, stock beside patched: `lowtide bench models`, results in benchmarks/results."""

import sys
from pathlib import Path

from lowtide.cli import main

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    sys.exit(main(["bench", "models", "--output", str(RESULTS), *sys.argv[1:]]))
