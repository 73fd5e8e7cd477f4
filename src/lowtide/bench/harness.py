"""The harness of all benchmarks: rows are measured one by one, printed and written as they are known.

A benchmark's file has its `Benchmark`: what it measures, in which tables, and which rows are lowtide's own failures.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch

from lowtide.bench.results import Files, begin
from lowtide.bench.settings import Settings
from lowtide.bench.way import LOWTIDE
from lowtide.errors import UnsupportedError, message
from lowtide.head.options import HeadOptions
from lowtide.measure.failures import is_out_of_memory

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
        options: lowtide's options for the case's head, where it has a plan to be recorded; None for every other peer.
        gemms: per layer of an MLP, that it cannot do without.
    """

    name: str
    build: Callable[[Any], Any]
    package: str = ""
    options: Callable[[Any], HeadOptions] | None = None
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
class Column:
    """A column of a printed table: a key of the row or a function of it, whose None prints as blanks; the width is in
    the value's ``format``.
    """

    title: str
    value: str | Callable[[Row], Any]
    format: str

    @property
    def width(self) -> int:
        """Characters."""
        return int(re.sub(r"\..*|\D", "", self.format))

    def text(self, row: Row) -> str:
        """Return a row's value as text."""
        value = self.value(row) if callable(self.value) else row.get(self.value)
        return " " * self.width if value is None else format(value, self.format)


@dataclass(frozen=True)
class Table:
    """How rows are printed.

    Attributes:
        heads: columns that every row has, also one that failed.
        figures: columns of a row that was measured, which has the first of them.
        notes: more about a row that was measured.
    """

    heads: tuple[Column, ...]
    figures: tuple[Column, ...]
    notes: Callable[[Row], Iterable[str]] = lambda _: ()

    @property
    def header(self) -> str:
        """The line of titles."""
        titles = [
            f"{c.title:{'<' if c.format.startswith('<') else '>'}{c.width}}" for c in (*self.heads, *self.figures)
        ]
        return "".join(titles) + "\n"

    def line(self, row: Row) -> str:
        """Return a row as text: its figures, or why there are none."""
        text, reason = "".join(column.text(row) for column in self.heads), row.get("failed") or row.get("cannot")
        if not self.figures[0].text(row).strip():
            return f"{text}  {reason}\n"
        text += "".join(column.text(row) for column in self.figures)
        notes = "; ".join([*self.notes(row), *([reason] if reason else [])])
        return f"{text}  {notes}".rstrip() + "\n"


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

    def save(self) -> None:
        """Write the result so far."""
        self.files.write_json(self.result)

    def add(self, row: Row, rows: list[Row], table: Table) -> None:
        """Append a row to a list of the result, print it and write the result."""
        rows.append(row)
        self.rows.append(row)
        self.say(table.line(row))
        self.save()


def own_failure(row: Row) -> bool:
    """Return whether a row is a failure of lowtide's own: its first entry names who was measured."""
    return "failed" in row and any(str(row.get(key)).startswith(LOWTIDE) for key in ("name", "way", "peer"))


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

    def run(self, config: C, say: Say) -> Run[C]:
        """Measure, print each row as it is known, and write the result after each.

        Raises:
            UnsupportedError: there is no such device, or a package is missing that the config needs.
            ArgumentValueError: the folder for the results cannot be written, or a value that no run could use.
        """
        settings: Any = config  # which has device, dtype and output
        device = chosen_device(settings.device)
        dtype = chosen_dtype(settings.dtype, device)
        self.check(config)
        stem = config.stem.format(benchmark=config.benchmark, dtype=str(dtype).removeprefix("torch."))
        packages = [*self.packages, *(peer.package for peer in self.peers.values())]
        files, result = begin(settings.output, stem, config.command(), device, packages)
        run = Run(config=config, device=device, dtype=dtype, say=say, files=files, result=result)
        try:
            with matmul_precision(getattr(settings, "matmul_precision", None)):
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
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
