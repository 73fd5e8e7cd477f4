"""Measure the gated MLP beside its peers: `lowtide bench mlp`, results in benchmarks/results."""

import sys
from pathlib import Path

from lowtide.cli import main

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    sys.exit(main(["bench", "mlp", "--output", str(RESULTS), *sys.argv[1:]]))
