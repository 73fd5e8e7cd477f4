"""What the scripts beside this file have in common: options made of a config, and results in benchmarks/results."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from lowtide.bench.harness import Peer, Run
from lowtide.bench.settings import Settings
from lowtide.cli.parser import add_options, given
from lowtide.errors import LowtideError

NO_PEERS: Mapping[str, Peer] = {}


def main(
    measure: Callable[[Run], object], config: type[Settings], about: str | None, peers: Mapping[str, Peer] = NO_PEERS
) -> int:
    """Measure what the command line requests, and return the exit status."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, config)
    options = {"output": str(Path(__file__).parent / "results"), **given(parser.parse_args(), config)}
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    try:
        return Run(config(**options), partial(print, end="", flush=True), command, peers).execute(measure)
    except LowtideError as error:
        parser.error(str(error))
