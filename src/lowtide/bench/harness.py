"""The harness of all benchmarks: rows are measured one by one, printed and written as they are known.

Results are dated, named after the hardware, never over an older one and never half written.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import importlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowtide.bench.variant import LOWTIDE
from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.machine import describe_machine, source_commit

REASON_LENGTH = 200
OUT_OF_MEMORY = "out of memory"  # the reason of a row that did not fit begins so

Row = dict[str, Any]
"""A row of a table and of the result file. A figure that was not measured is missing, and ``failed`` has the reason."""


@dataclass(frozen=True)
class Peer:
    """An implementation that is measured. ``build`` imports it and returns what is run, made for a case;
    `UnsupportedError` where it does not do the case.
    """

    name: str  # of its row
    build: Callable[[Any], Any]
    package: str = ""  # the distribution it comes in, for its version; empty where that is torch's or lowtide's
    gemms: int = 0  # of a module, that its limit has; 0: the limit is the case's
    about: Callable[[Any], Row] = lambda _: {}  # what its row says of a case


def by_name(*peers: Peer) -> dict[str, Peer]:
    """Return the peers of a table by name, in its order."""
    return {peer.name: peer for peer in peers}


def gpu_module(case: Any, name: str) -> Any:
    """Import a peer's module without an implementation for CPUs: `UnsupportedError` for a case there."""
    if case.x.device.type != "cuda":
        raise UnsupportedError("runs on GPUs only")
    return importlib.import_module(name)


def compiled(function: Any) -> Any:
    """Return a function under torch.compile, for the shapes of its first call."""
    torch.compiler.reset()  # else the second case is compiled for any shape, which is slower
    return torch.compile(function, dynamic=False)


@dataclass(frozen=True)
class Table:
    """How rows are printed: the keys that are shown, which are the titles too, each with the format of its value."""

    columns: Mapping[str, str]
    notes: Callable[[Row], list[str]] = lambda _: []  # more about a row

    @property
    def header(self) -> str:
        """The line of titles."""
        cells = (f"{key:{'<' if '<' in spec else '>'}{len(format(0, spec))}}" for key, spec in self.columns.items())
        return "".join(cells).rstrip() + "\n"

    def line(self, row: Row) -> str:
        """Return a row as text: its figures, blanks for what it has not, and why it failed."""
        cells = (
            " " * len(format(0, spec)) if row.get(key) is None else format(row[key], spec)
            for key, spec in self.columns.items()
        )
        notes = "; ".join(filter(None, [*self.notes(row), row.get("failed")]))
        return f"{''.join(cells).rstrip()}  {notes}".rstrip() + "\n"


def begin(
    folder: str, benchmark: str, command: str, device: torch.device, packages: Iterable[str] = ()
) -> tuple[Path, Row]:
    """Return a run's file, the first free name in the folder, which is made if need be; and what a result has first:
    command, date, commit, and the machine, with the versions of these packages ("" counts for nothing).

    `ArgumentValueError` where the folder cannot be made or written.
    """
    machine, today = describe_machine(sorted({*packages} - {""})), dt.datetime.now(tz=dt.UTC).date().isoformat()
    root, gpu = Path(folder), str(machine["gpu"]).lower() if device.type == "cuda" else "cpu"
    short = re.findall(r"[a-z]*\d[a-z\d]*|\S+$", gpu)[0]
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise ArgumentValueError(message("output", "a folder that can be written", f"{root} ({error})")) from error
    names = (root / f"{today}-{benchmark}-{short}{f'-{i}' * (i > 1)}.json" for i in itertools.count(1))
    command = re.sub(r" --output[ =]\S+", "", command)
    found = {"command": command, "date": today, "commit": source_commit(), "machine": machine}
    return next(itertools.filterfalse(Path.exists, names)), found


def write_json(file: Path, result: Row) -> None:
    """Write or replace a result."""
    text = json.dumps(result, indent=1, default=str) + "\n"
    replace(file, lambda beside: beside.write_text(text))


def replace(target: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside the target, and rename it to the target, so that no half of it is seen."""
    beside = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        write(beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


class Run:
    """A benchmark under way: its config, peers by name, the device, and the dtype of its inputs.

    ``settings`` are the config's, all but the folder, with the chosen device and dtype. ``result`` is what ``file``
    holds: what `begin` returns, with the versions of the config's and the peers' packages, the settings, and what the
    benchmark adds. ``status`` is the exit status: 1 after a row that `is_failure`.

    Raises:
        UnsupportedError: there is no such device.
        ArgumentValueError: the folder for the results cannot be written.
    """

    def __init__(self, config: Any, say: Callable[[str], object], command: str, peers: Mapping[str, Peer]) -> None:
        self.config, self.say, self.peers, self.status = config, say, peers, 0
        cuda = torch.cuda.is_available()
        if config.device == "cuda" and not cuda:
            raise UnsupportedError(message("device", "a GPU that PyTorch can use", "none", "Take --device cpu."))
        self.device = torch.device(("cuda" if cuda else "cpu") if config.device == "auto" else config.device)
        narrow = "bfloat16" if self.device.type == "cuda" else "float32"
        self.dtype_name = narrow if config.dtype == "auto" else config.dtype
        self.dtype: torch.dtype = getattr(torch, self.dtype_name)
        packages = [*config.packages, *(peer.package for peer in peers.values())]
        self.file, self.result = begin(config.output, config.benchmark, command, self.device, packages)
        self.settings = {**vars(config), "device": self.device.type, "dtype": self.dtype_name}
        del self.settings["output"]
        self.result |= self.settings

    @property
    def chosen(self) -> list[Peer]:
        """The peers that are measured."""
        return [peer for name, peer in self.peers.items() if name in (self.config.only or self.peers)]

    def add(self, row: Row, rows: list[Row], table: Table) -> None:
        """Append a row to a list of the result, print it and write the result. Its name is in the first column."""
        rows.append(row)
        if is_failure(str(row[next(iter(table.columns))]), row, getattr(self.config, "only", ())):
            self.status = 1
        self.say(table.line(row))
        write_json(self.file, self.result)

    def execute(self, measure: Callable[[Run], object]) -> int:
        """Measure, say where the result is, also after Ctrl-C, and return the exit status."""
        try:
            measure(self)
        finally:
            if self.file.exists():
                self.say(f"written: {self.file}\n")
        return self.status


def is_failure(name: str, row: Row, named: Iterable[str] = ()) -> bool:
    """Return whether the row of this name makes the exit status 1.

    That is a failure of lowtide's own, other than for lack of memory or in a case that it does not support, and a peer
    that cannot be imported and was requested by name.
    """
    ours = name.startswith(LOWTIDE)
    if "missing" in row:
        return name in named or ours
    return ours and "unsupported" not in row and not row.get("failed", OUT_OF_MEMORY).startswith(OUT_OF_MEMORY)


@contextlib.contextmanager
def reason_in(row: Row, package: str = "") -> Iterator[None]:
    """Catch a peer's error as its row's ``failed``. One that does not do the case, or whose package cannot be imported,
    is ``unsupported``, and in the latter case ``missing``.
    """
    try:
        yield
    except UnsupportedError as error:
        row |= {"failed": str(error), "unsupported": True}
    except ImportError as error:
        hint = f". pip install {package}" if package else ""
        row |= {"failed": f"cannot be imported: {error}{hint}", "unsupported": True, "missing": True}
    except Exception as error:
        row["failed"] = reason_of(error)


def reason_of(error: Exception) -> str:
    """Return an error as one line that is not too long."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:REASON_LENGTH].rstrip(": ")


def release(device: torch.device) -> None:
    """Free cached memory, so that the next peer starts as the last one did."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
