"""The harness of all benchmarks: rows are measured one by one, printed and written as they are known.

A benchmark's file has its `Benchmark`: what it measures, in which tables, and which rows are lowtide's own failures.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch

from lowtide.bench.results import Files, begin
from lowtide.bench.settings import Settings
from lowtide.bench.way import LOWTIDE
from lowtide.errors import UnsupportedError, message
from lowtide.head.options import HeadOptions
from lowtide.measure.child import ChildResult
from lowtide.measure.failures import is_out_of_memory

REASON_LENGTH = 200
_LOOK_SECONDS = 0.5  # between looks for new rows of a child process
OUT_OF_MEMORY = "out of memory"  # the reason of a row that did not fit

Row = dict[str, Any]
"""A row of a table and of the result file. A figure that was not measured is missing, and ``failed`` has the reason."""
Say = Callable[[str], object]
C = TypeVar("C", bound=Settings)
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class CannotError(Exception):
    """This peer does not support the case, or what it needs is not here."""


@dataclass(frozen=True)
class Peer:
    """One way to compute what a table's cases request.

    Attributes:
        name: of its row.
        build: imports it and returns what is run, made for a case; raises `CannotError` where it does not do the case.
        package: the distribution it comes in, for its version; empty where that is torch's or lowtide's.
        install: what to install for it, where that is not the package alone.
        options: lowtide's options for the case's head, where it has a plan to be recorded; None for every other peer.
        gemms: per layer of an MLP, that it cannot do without.
    """

    name: str
    build: Callable[[Any], Any]
    package: str = ""
    install: str = ""
    options: Callable[[Any], HeadOptions] | None = None
    gemms: int = 9

    def built(self, case: Any) -> Any:
        """Return ``build(case)``; a failed import is a `CannotError` that says what to install."""
        with self.imports():
            return self.build(case)

    @contextlib.contextmanager
    def imports(self) -> Iterator[None]:
        """Turn a failed import of the block into that `CannotError`."""
        try:
            yield
        except ImportError as error:
            hint = f". pip install '{self.install or self.package}'" if self.package else ""
            raise CannotError(f"{type(error).__name__}: {error}{hint}") from error


def by_name(*peers: Peer) -> dict[str, Peer]:
    """Return the peers of a table by name, in its order."""
    return {peer.name: peer for peer in peers}


def needs_cuda(device: torch.device) -> None:
    """Raise `CannotError` on a CPU, for a peer without an implementation there."""
    if device.type != "cuda":
        raise CannotError("runs on GPUs only")


def compiled(function: F, options: dict[str, Any] | None = None) -> F:
    """Return a function under torch.compile, for the shapes of its first call."""
    torch.compiler.reset()  # else the second case is compiled for any shape, which is slower
    return cast("F", torch.compile(function, dynamic=False, options=options))


def repeated(function: Callable[[], object], times: int) -> Callable[[], None]:
    """Return what calls a function several times, all but the first launched while the GPU is busy, as in training."""

    def run() -> None:
        for _ in range(times):
            function()

    return run


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
        """Characters; 0 where the format has none."""
        found = re.search(r"[1-9]\d*", self.format)
        return int(found[0]) if found else 0

    def of(self, row: Row) -> Any:
        """Return a row's value, None where it has none."""
        return self.value(row) if callable(self.value) else row.get(self.value)

    def text(self, row: Row) -> str:
        """Return a row's value as text."""
        value = self.of(row)
        return " " * self.width if value is None else format(value, self.format)


@dataclass(frozen=True)
class Table:
    """How rows are printed.

    Attributes:
        heads: columns that every row has, also one that failed.
        figures: columns of a row that was measured, which has the first of them.
        notes: more about a row that was measured.
        reason: why a row has no figures, or lacks some; None where it has all.
    """

    heads: tuple[Column, ...]
    figures: tuple[Column, ...]
    notes: Callable[[Row], Iterable[str]] = lambda _: ()
    reason: Callable[[Row], str | None] = lambda row: row.get("failed") or row.get("cannot")

    @property
    def header(self) -> str:
        """The line of titles."""
        heads = "".join(f"{c.title:{'<' if c.format.startswith('<') else '>'}{c.width}}" for c in self.heads)
        return heads + "".join(f"{c.title:>{c.width}}" for c in self.figures) + "\n"

    def line(self, row: Row) -> str:
        """Return a row as text: its figures, or why there are none."""
        text = "".join(column.text(row) for column in self.heads)
        reason = self.reason(row)
        if self.figures[0].of(row) is None:
            return f"{text}{'  ' if len(self.heads) > 1 else ''}{reason or ''}".rstrip() + "\n"
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


def cannot_run(config: Settings, rows: Iterable[Row]) -> dict[str, str]:
    """Return who was requested by name and cannot run here at all, each with the reason."""
    requested = config.requested()
    reasons: dict[str, str] = {}
    for row in rows:
        name = row.get("name") or row.get("way")
        if name in requested and not row.get("unsupported"):
            requested = requested - {name}
        elif name in requested:
            reasons.setdefault(name, row.get("failed") or row["cannot"])
    return {name: reason for name, reason in reasons.items() if name in requested}


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
        unable = cannot_run(config, run.rows)
        for name, reason in unable.items():
            say(f"requested explicitly, but cannot run here: {name}: {reason}\n")
        run.status = int(bool(unable) or any(map(self.failed, run.rows)))
        return run


@contextlib.contextmanager
def matmul_precision(name: str | None) -> Iterator[None]:
    """Set the precision of float32 GEMMs; None: leave it."""
    if name is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def append(row: Row, file: Path) -> None:
    """Add a row to the file of a child's rows."""
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


def add_rows(run: Callable[[Path], T], add: Callable[[Row], object]) -> T:
    """Return ``run(file)``, which runs children to their end; each row that they append goes to ``add`` at once.

    The rows that were known are added, too, where ``run`` raises, as it does on Ctrl-C.
    """
    over = threading.Event()

    def follow() -> None:
        known, last = 0, False
        while not last:
            last = over.wait(_LOOK_SECONDS)
            text = file.read_text() if file.exists() else ""
            rows = text[: text.rfind("\n") + 1].splitlines()  # whole lines alone
            for row in rows[known:]:
                add(json.loads(row))
            known = len(rows)

    with tempfile.TemporaryDirectory(prefix="lowtide-rows-") as folder, ThreadPoolExecutor(1) as beside:
        file = Path(folder) / "rows.jsonl"
        following = beside.submit(follow)
        try:
            return run(file)
        finally:
            over.set()
            following.result()


def why_ended(child: ChildResult) -> str:
    """Return how a child ended that has left no value: its status, and the last line of its errors."""
    lines = child.stderr.strip().splitlines()
    return f"the process ended with status {child.returncode}" + "".join(f": {line[:200]}" for line in lines[-1:])


@contextlib.contextmanager
def reason_in(row: Row, *, cannot: str = "failed") -> Iterator[None]:
    """Catch a peer's error as its row's ``failed``, and a `CannotError` under the key ``cannot``.

    The row of the latter is ``unsupported``.
    """
    try:
        yield
    except CannotError as error:
        row |= {cannot: reason_of(error), "unsupported": True}
    except Exception as error:
        row["failed"] = reason_of(error)


def reason_of(error: Exception) -> str:
    """Return an error as one line that is not too long."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, CannotError):
        return str(error)
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 1] + "…"


def release(device: torch.device) -> None:
    """Free cached memory, so that the next peer starts as the last one did."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def answers(device: torch.device) -> bool:
    """Return whether a device still computes: an illegal access by a kernel takes the GPU from a process."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


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
