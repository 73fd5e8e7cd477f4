"""The harness of all benchmarks: rows are measured one by one, printed and written as they are known.

A benchmark's file has its `Benchmark`: what it measures, in which tables, and which rows are lowtide's own failures.
Results are dated, named after the hardware, never over an older one and never half written.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch

from lowtide.bench.settings import Settings
from lowtide.bench.variant import LOWTIDE
from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.head.options import HeadOptions
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.machine import describe_machine, source_commit

REASON_LENGTH = 200
OUT_OF_MEMORY = "out of memory"  # the reason of a row that did not fit

Row = dict[str, Any]
"""A row of a table and of the result file. A figure that was not measured is missing, and ``failed`` has the reason."""
Say = Callable[[str], object]
C = TypeVar("C", bound=Settings)
F = TypeVar("F", bound=Callable[..., Any])


class CannotError(Exception):
    """This peer does not support the case, or what it needs is not here."""


@dataclass(frozen=True)
class Peer:
    """An implementation that is measured.

    Attributes:
        name: of its row.
        build: imports it and returns what is run, made for a case; raises `CannotError` where it does not do the case.
        package: the distribution it comes in, for its version; empty where that is torch's or lowtide's.
        options: lowtide's own, where the call has a plan to be recorded; None for every other peer.
        gemms: per layer of an MLP, that it cannot do without.
    """

    name: str
    build: Callable[[Any], Any]
    package: str = ""
    options: HeadOptions | None = None
    gemms: int = 9

    def built(self, case: Any) -> Any:
        """Return ``build(case)``; a failed import is a `CannotError` that says what to install."""
        try:
            return self.build(case)
        except ImportError as error:
            hint = f". pip install {self.package}" if self.package else ""
            raise CannotError(f"{type(error).__name__}: {error}{hint}") from error


def by_name(*peers: Peer) -> dict[str, Peer]:
    """Return the peers of a table by name, in its order."""
    return {peer.name: peer for peer in peers}


def needs_cuda(device: torch.device) -> None:
    """Raise `CannotError` on a CPU, for a peer without an implementation there."""
    if device.type != "cuda":
        raise CannotError("runs on GPUs only")


def compiled(function: F) -> F:
    """Return a function under torch.compile, for the shapes of its first call."""
    torch.compiler.reset()  # else the second case is compiled for any shape, which is slower
    return cast("F", torch.compile(function, dynamic=False))


@dataclass(frozen=True)
class Table:
    """How rows are printed: the keys that are shown, which are the titles too, each with the format of its value.

    Attributes:
        heads: what every row has, also one that failed.
        figures: of a row that was measured, which has the first of them.
        notes: more about a row that was measured.
    """

    heads: Mapping[str, str]
    figures: Mapping[str, str]
    notes: Callable[[Row], Iterable[str]] = lambda _: ()

    @property
    def header(self) -> str:
        """The line of titles."""
        return self._cells({key: key for key in (*self.heads, *self.figures)}, {**self.heads, **self.figures}) + "\n"

    def line(self, row: Row) -> str:
        """Return a row as text: its figures, or why there are none."""
        text, reason = self._cells(row, self.heads), row.get("failed") or row.get("cannot")
        if next(iter(self.figures)) not in row:
            return f"{text}  {reason}\n"
        notes = "; ".join([*self.notes(row), *([reason] if reason else [])])
        return f"{text}{self._cells(row, self.figures)}  {notes}".rstrip() + "\n"

    @staticmethod
    def _cells(row: Row, formats: Mapping[str, str]) -> str:
        """Return the values, or blanks, as wide as their formats say."""
        cells = []
        for key, spec in formats.items():
            value, width = row.get(key), int(re.sub(r"\..*|\D", "", spec))
            text = value if isinstance(value, str) else "" if value is None else format(value, spec)
            cells.append(text.ljust(width) if spec.startswith("<") else text.rjust(width))
        return "".join(cells)


@dataclass(frozen=True)
class Files:
    """The files of one run: ``json``, and plots whose names begin as its does."""

    json: Path

    @classmethod
    def prepare(cls, folder: str, stem: str, gpu: str | None) -> Files:
        """Return the first free name of that stem in the folder, which is made if need be.

        `ArgumentValueError` where the folder cannot be made or written.
        """
        root, stem = Path(folder), f"{stem}-{short_gpu(gpu)}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            if not os.access(root, os.W_OK):
                raise PermissionError("it cannot be written")
        except OSError as error:
            raise ArgumentValueError(message("output", "a folder that can be written", f"{root} ({error})")) from error
        names = (root / f"{stem}{end}.json" for end in itertools.chain([""], (f"-{i}" for i in itertools.count(2))))
        return cls(next(name for name in names if not name.exists()))

    def plot(self, name: str, draw: Callable[[Path], object]) -> Path:
        """Return the path of a plot of that name, after ``draw`` has written it."""
        file = self.json.with_name(f"{self.json.stem}-{re.sub('[^A-Za-z0-9.]+', '-', name)}.png")
        replace(file, draw)
        return file

    def write_json(self, result: Mapping[str, Any]) -> None:
        """Write or replace the result."""
        text = json.dumps(result, indent=1, allow_nan=False, default=str) + "\n"
        replace(self.json, lambda file: file.write_text(text))


def begin(
    folder: str, benchmark: str, command: str, device: torch.device, packages: Iterable[str] = ()
) -> tuple[Files, dict[str, Any]]:
    """Return the files of a run, and what each result has first: command, date, commit, and the machine, with the
    versions of these packages ("" counts for nothing). Errors are those of `Files.prepare`.
    """
    machine, today = describe_machine(sorted({*packages} - {""})), dt.datetime.now(tz=dt.UTC).date().isoformat()
    files = Files.prepare(folder, f"{today}-{benchmark}", machine["gpu"] if device.type == "cuda" else None)
    command = re.sub(r" --output[ =]\S+", "", command)
    return files, {"command": command, "date": today, "commit": source_commit(), "machine": machine}


def replace(target: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside the target, and rename it to the target, so that no half of it is seen."""
    beside = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        write(beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def short_gpu(name: str | None) -> str:
    """Return a GPU's model for a file's name: ``h100`` for "NVIDIA H100 80GB HBM3"; ``cpu`` for None."""
    words = re.split("[^a-z0-9]+", (name or "cpu").lower())
    return next((word for word in words if any(c.isdigit() for c in word)), words[-1])


@dataclass(kw_only=True)
class Run(Generic[C]):
    """A benchmark under way: ``say`` gets its text, and ``result`` is what its file holds: command, date, commit and
    machine, and what the benchmark adds. ``status`` is the exit status, when it has ended.
    """

    config: C
    device: torch.device
    dtype: torch.dtype
    say: Say
    files: Files
    result: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    status: int = 0

    @property
    def dtype_name(self) -> str:
        """The dtype as options and result files have it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for a child process, with the chosen device and dtype."""
        return {**vars(self.config), "device": self.device.type, "dtype": self.dtype_name}

    def fill(
        self, rows: list[Row], title: str, table: Table, peers: Mapping[str, Peer], measure: Callable[[Peer], Row]
    ) -> None:
        """Add the row of each chosen peer to a list of the result, under a title."""
        self.say(title + table.header)
        for name in cast("Any", self.config).peers:
            self.add(measure(peers[name]), rows, table)

    def where(self) -> str:
        """Return the device, the version of PyTorch and the dtype, for a plot's title."""
        machine = self.result["machine"]
        return f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {self.dtype_name}"

    def add(self, row: Row, rows: list[Row], table: Table) -> None:
        """Append a row to a list of the result, print it and write the result."""
        rows.append(row)
        self.rows.append(row)
        self.say(table.line(row))
        self.files.write_json(self.result)


def own_failure(row: Row) -> bool:
    """Return whether a row is a failure of lowtide's own, and no case that it does not support: its first entry names
    who was measured.
    """
    measured = (str(row.get(key)) for key in ("name", "way", "peer"))
    return "failed" in row and "unsupported" not in row and any(name.startswith(LOWTIDE) for name in measured)


def fails_otherwise(row: Row) -> bool:
    """Return whether a row is such a failure, and not for lack of memory."""
    return own_failure(row) and row["failed"] != OUT_OF_MEMORY


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[C]):
    """A benchmark.

    Attributes:
        measure: measures all that the config of a run requests, and adds the rows.
        failed: whether a row is a failure of lowtide's own, for which the exit status is 1.
        peers: who is measured, by name; the result holds the versions of their packages.
        packages: other distributions whose versions it holds.
        check: raises where a config requests what cannot be measured here, before anything is written.
    """

    measure: Callable[[Run[C]], None]
    failed: Callable[[Row], bool] = own_failure
    peers: Mapping[str, Peer] = field(default_factory=dict)
    packages: Iterable[str] = ()
    check: Callable[[C], object] = lambda _: None

    def run(self, config: C, say: Say, command: str = "") -> Run[C]:
        """Measure, print each row as it is known, and write the result, with the command, after each.

        Raises:
            UnsupportedError: there is no such device, or a package is missing that the config needs.
            ArgumentValueError: the folder for the results cannot be written, or a value that no run could use.
        """
        device = chosen_device(config.device)
        dtype = chosen_dtype(config.dtype, device)
        self.check(config)
        stem = config.stem.format(benchmark=config.benchmark, dtype=str(dtype).removeprefix("torch."))
        packages = [*self.packages, *(peer.package for peer in self.peers.values())]
        files, result = begin(config.output, stem, command, device, packages)
        run = Run(config=config, device=device, dtype=dtype, say=say, files=files, result=result)
        try:
            with matmul_precision(getattr(config, "matmul_precision", None)):
                self.measure(run)
        finally:  # what is known was written, also before Ctrl-C
            if run.files.json.exists():
                say(f"written: {run.files.json}\n")
        run.status = int(any(map(self.failed, run.rows)))
        return run


@contextlib.contextmanager
def matmul_precision(name: str | None) -> Iterator[None]:
    """Set the precision of float32 GEMMs; None: leave it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name or before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def reason_in(row: Row, *, cannot: str = "failed") -> Iterator[None]:
    """Catch a peer's error as its row's ``failed``, and a `CannotError` under the key ``cannot``.

    The row of the latter is ``unsupported``.
    """
    try:
        yield
    except CannotError as error:
        row |= {cannot: str(error), "unsupported": True}
    except Exception as error:
        row["failed"] = reason_of(error)


def reason_of(error: Exception) -> str:
    """Return an error as one line that is not too long."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 1] + "…"


def release(device: torch.device) -> None:
    """Free cached memory, so that the next peer starts as the last one did."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def chosen_device(name: str) -> torch.device:
    """Return the device of that name, or raise `UnsupportedError`; auto: a GPU if there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(message("device", "a GPU that PyTorch can use", "none", "Take --device cpu."))
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def chosen_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of that name; auto: bfloat16 on a GPU, float32 on a CPU."""
    dtype: torch.dtype = getattr(torch, name if name != "auto" else "bfloat16" if device.type == "cuda" else "float32")
    return dtype
