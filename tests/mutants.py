"""Small defects, put into a copy of src one at a time: the nearest tests of `make test` have to see each.

    python tests/mutants.py [ROOM or part of a line ...] [--jobs 2]

prints a line for each, and fails unless all that have no reason to survive were killed. `make slow` runs them all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
SRC = TESTS.parent / "src"


@dataclass(frozen=True)
class Mutant:
    """``old``, which stands once in a file of src/lowtide, becomes ``new``; ``tests`` are paths, maybe with a `-k`."""

    file: str
    old: str
    new: str
    tests: str
    survives: str = ""  # the reason why none has to see it

    def __str__(self) -> str:
        return f"{self.file}: {self.old!r} -> {self.new!r}"

    def change(self, src: Path) -> None:
        file = src / "lowtide" / self.file
        text = file.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self}: expected the old text once in the file, found it {text.count(self.old)} times")
        file.write_text(text.replace(self.old, self.new))

    def killed(self, src: Path) -> tuple[bool, str]:
        """Return whether the tests fail with it in ``src``, and the last line that pytest says."""
        files, _, chosen = self.tests.partition(" -k ")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
        command += [str(TESTS / file) for file in files.split()] + (["-k", chosen] if chosen else [])
        env = {**os.environ, "PYTHONPATH": str(src), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        found = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True, check=False)
        lines = [line for line in found.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        says = (lines or found.stdout.splitlines() or found.stderr.splitlines() or ["nothing"])[-1]
        if found.returncode not in (0, 1):
            raise RuntimeError(f"{self}: pytest ended with {found.returncode}: {says}\n{found.stdout[-2000:]}")
        return found.returncode == 1, says


# What stands under a room is seen by this room's tests, or by those of one above it.
MUTANTS: dict[str, list[Mutant]] = {
    "top": [
    ],
    "head": [
    ],
    "skip": [
    ],
    "mlp": [
    ],
    "layers": [
    ],
    "losses": [
    ],
    "memory": [
    ],
    "plan": [
    ],
    "distributed": [
    ],
    "trl": [
    ],
    "stacks": [
    ],
    "models": [
    ],
    "train": [
    ],
    "bench": [
    ],
    "profile": [
    ],
    "measure": [
    ],
    "cli": [
    ],
}  # fmt: skip


def judge(mutant: Mutant) -> tuple[bool, str]:
    """Run a mutant's tests and return whether all is as it should be, and a line about it."""
    since = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        src = Path(shutil.copytree(SRC, Path(folder, "src"), ignore=shutil.ignore_patterns("__pycache__")))
        mutant.change(src)
        killed, says = mutant.killed(src)
    outcome = "killed" if killed else f"survived, as known ({mutant.survives})" if mutant.survives else "SURVIVED"
    return killed != bool(mutant.survives), f"{outcome} in {time.monotonic() - since:.0f} s: {mutant}\n    {says}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chosen", nargs="*", help="rooms, or parts of a mutant's line; all if none is given")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    of_room = [(room, mutant) for room, mutants in MUTANTS.items() for mutant in mutants]
    wanted = arguments.chosen
    chosen = [m for room, m in of_room if not wanted or any(part == room or part in str(m) for part in wanted)]
    right, speaking = [], threading.Lock()

    def run(mutant: Mutant) -> None:
        good, line = judge(mutant)
        with speaking:
            right.append(good)
            print(line, flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, chosen))
    print(f"{sum(right)} of {len(chosen)} as they should be")
    return 0 if chosen and all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
