"""What the scripts beside this file have in common: options made of a config, and results in benchmarks/results."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowtide.bench.settings import Settings
from lowtide.cli.parser import add_options, given
from lowtide.errors import LowtideError

Say = Callable[[str], object]


def main(measure: Callable[[Any, Say, str], int], config: type[Settings], about: str | None) -> int:
    """Measure what the command line requests, and return the exit status."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, config)
    options = {"output": str(Path(__file__).parent / "results"), **given(parser.parse_args(), config)}
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    try:
        return measure(config(**options), lambda text: print(text, end="", flush=True), command)
    except LowtideError as error:
        parser.error(str(error))
