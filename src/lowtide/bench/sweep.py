"""The head's benchmark along three lines: N tokens, hidden size D and vocabulary V, each with the others held.

What is drawn is what the thread on PyTorch's own function of this kind asked for (pytorch/pytorch issue 124480): the
rate, the peak of memory and the errors over each of the three.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from lowtide.bench.head import chosen_device, chosen_dtype
from lowtide.bench.peers import LOWTIDE, PEERS
from lowtide.bench.pictures import draw_sweep, require_matplotlib
from lowtide.bench.problem import PLAIN, make_problem
from lowtide.bench.reference import exact_products
from lowtide.bench.report import header, line
from lowtide.bench.results import Files, begin
from lowtide.bench.rows import Bench, Row, answers, release
from lowtide.bench.shapes import Shape
from lowtide.bench.sweep_config import SweepBenchConfig
from lowtide.errors import UnsupportedError, message
from lowtide.measure.timing import time_side_by_side

DRAWING = 3.0  # seconds that are left for the picture
_PROBE = {"cuda": (4096, 4096, 32768), "cpu": (512, 512, 2048)}  # the most of N, D and V that the rate is measured with


def run(config: SweepBenchConfig, say: Callable[[str], object]) -> dict[str, Any]:
    """Measure, tell each line as it is known, write the result after each row, and draw it at the end.

    A result of the same sweep (settings, machine, commit) that was not finished is gone on with.

    Args:
        config: what.
        say: gets the text, a line or more at a time.

    Returns:
        dict: The result: its ``points`` have a shape each, with a row for each peer.

    Raises:
        UnsupportedError: there is no such device, matplotlib is missing, or the GPU no longer answers after a peer.
        ArgumentValueError: the folder for the results cannot be written.
    """
    start = time.monotonic()
    device = chosen_device(config.device)
    dtype = chosen_dtype(config.dtype, device)
    require_matplotlib("sweep")
    packages = (PEERS[name].package for name in config.peers)
    files, about = begin(config.output, "sweep", config.command(), device, packages)
    told: dict[str, Any] = {
        **about,
        "dtype": str(dtype).removeprefix("torch."),
        "asked": json.loads(json.dumps(config.asked)),
        "finished": False,
        "points": [],
    }
    if not config.fresh and (found := _unfinished(Path(config.output), told)) is not None:
        files, told = found
        say(f"going on with {files.json}, which has {len(told['points'])} of {len(config.shapes)} shapes\n")
    run = _Run(config, device, dtype, files, told, say, start)
    try:
        run.all()
    finally:  # what is known is drawn, also after Ctrl-C
        if told["points"]:
            say(f"drawn: {draw_sweep(told, files)}\n")
            say(f"written: {files.json}\n")
    return told


def _unfinished(folder: Path, told: dict[str, Any]) -> tuple[Files, dict[str, Any]] | None:
    """Return the newest result that was to be this one, and its files."""
    same = ("asked", "dtype", "machine", "commit", "finished")
    for file in sorted(folder.glob("*-sweep-*.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(file.read_text())
            if all(found[key] == json.loads(json.dumps(told[key], default=str)) for key in same):
                return Files(file), found
    return None


class _Run:
    """One run: what is asked, what is told, and how long it will take."""

    def __init__(
        self,
        config: SweepBenchConfig,
        device: torch.device,
        dtype: torch.dtype,
        files: Files,
        told: dict[str, Any],
        say: Callable[[str], object],
        start: float,
    ) -> None:
        self.config, self.device, self.dtype, self.files, self.told, self.say = config, device, dtype, files, told, say
        self.start = start

    def all(self) -> None:
        """Measure every shape that is not there yet, as far as the time goes."""
        left = [shape for shape in self.config.shapes if self.missing(shape)]
        rates = rates_of(self.config.center, self.dtype, self.device, error=self.config.error)
        able = self.able() if left else set()
        guesses = {shape: estimate(self.config, shape, able.intersection(self.missing(shape)), rates) for shape in left}
        self.say(f"{len(left)} shapes, about {sum(guesses.values()):.0f} s\n")
        spent = guessed = 0.0
        factor = 1.0  # by which the estimates were wrong so far
        for i, shape in enumerate(left):
            begun = time.monotonic()
            if self.config.seconds is not None:
                ends = begun - self.start + factor * guesses[shape] + DRAWING
                if ends > self.config.seconds:
                    self.say(f"\n{len(left) - i} shapes are left: the next would end after {ends:.0f} s\n")
                    return
            self.measure(shape)
            spent, guessed = spent + time.monotonic() - begun, guessed + guesses[shape]
            # The first shapes compile kernels: what they take beyond their estimate says little of the others.
            factor = min(max(spent / guessed, 0.5), 2.0)
            rest = factor * sum(guesses[other] for other in left[i + 1 :])
            if rest:
                self.say(f"{i + 1} of {len(left)} shapes; about {rest:.0f} s to go\n")
        self.told["finished"] = True
        self.files.write_json(self.told)

    def able(self) -> set[str]:
        """Return the peers that can be imported and run here."""
        tiny = make_problem(Shape("", 8, 8, 16), self.dtype, self.device)
        found = set()
        for name in self.config.peers:
            with contextlib.suppress(Exception):  # its rows will say why
                PEERS[name].build(tiny)
                found.add(name)
        return found

    def point(self, shape: Shape) -> dict[str, Any] | None:
        """Return what is known of a shape, None where it was not begun."""
        sizes = (shape.N, shape.D, shape.V)
        return next((point for point in self.told["points"] if (point["N"], point["D"], point["V"]) == sizes), None)

    def missing(self, shape: Shape) -> list[str]:
        """Return the peers without a row."""
        point = self.point(shape)
        have = {row["name"] for row in point["rows"]} if point else set()
        return [name for name in self.config.peers if name not in have]

    def measure(self, shape: Shape) -> None:
        """Measure a shape's missing rows.

        Raises:
            UnsupportedError: A peer has left the GPU in a state in which nothing runs; its row says so.
        """
        release(self.device)
        problem = make_problem(shape, self.dtype, self.device, seed=self.config.seed)
        bench = Bench.of(problem, error=self.config.error, warm=self.config.warm, reps=self.config.reps)
        missing = self.missing(shape)
        point = self.point(shape)
        if point is None:
            point = {"N": shape.N, "D": shape.D, "V": shape.V, "limit_ms": bench.limit_ms, "limit_tflops": bench.tflops}
            point |= {"gradients_mib": bench.gradients_mib, "rows": []}
            self.told["points"].append(point)
        self.say(header(bench))
        for name in missing:
            row = bench.measure(PEERS[name])
            point["rows"].append(_told(row, shape))
            self.files.write_json(self.told)
            self.say(line(row))
            if row.failed and not answers(self.device):
                hint = "The same command goes on with the next, in a new process."
                raise UnsupportedError(message("device", "a GPU that answers", f"none, after {name}", hint))


def _told(row: Row, shape: Shape) -> dict[str, Any]:
    """Return a row with its rate: what the products need, 6NDV, over the time, whatever a peer computes besides."""
    rate = {} if row.ms is None else {"tflops": shape.flops(PLAIN.gemms) / row.ms / 1e9}
    return row.to_json() | rate


def rates_of(shape: Shape, dtype: torch.dtype, device: torch.device, *, error: bool) -> tuple[float, float]:
    """Return the operations a second of products in a dtype, and of those of the truth, as measured in a moment."""
    N, D, V = (min(size, most) for size, most in zip((shape.N, shape.D, shape.V), _PROBE[device.type], strict=True))
    truth = torch.float32 if dtype.itemsize < 4 else torch.float64
    found = []
    for kind in (dtype, truth) if error else (dtype,):
        x, w = (torch.randn(rows, D, device=device, dtype=torch.float32).to(kind) for rows in (N, V))
        with exact_products():
            ms = time_side_by_side({"mm": lambda x=x, w=w: x @ w.T}, device, warm=1, reps=2)["mm"].median_ms  # type: ignore[misc]
        found.append(2e3 * N * D * V / ms)
    return found[0], found[-1]


def estimate(config: SweepBenchConfig, shape: Shape, peers: Collection[str], rates: tuple[float, float]) -> float:
    """Return about how many seconds a shape will take.

    Args:
        config: the rounds, and whether errors are computed.
        shape: which.
        peers: the names of those that run.
        rates: as `rates_of` returns.
    """
    once = shape.flops(PLAIN.gemms)
    rounds = config.warm + config.reps
    seconds = once / rates[0] * (2 * rounds + 1)  # the limit, by several numbers of rows, and the inputs
    for name in peers:
        peer = PEERS[name]
        seconds += peer.first + once / rates[0] * (rounds * (1 + peer.pace) + peer.pace)
    if config.error:
        seconds += once / rates[1] * (1 + (LOWTIDE in peers))  # the truth, and the roundings' own error
    return seconds
