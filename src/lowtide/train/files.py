"""Finding a run's data on this machine, before anything heavy is imported, and reading text and lines.

A name given with ``--data`` is a file, a folder that is searched, a folder that ``Dataset.save_to_disk`` wrote, or a
dataset of the Hugging Face Hub (``org/name`` or ``org/name:config``), which `datasets` loads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

from lowtide.errors import ArgumentValueError, did_you_mean, message

RUN_FILE = "run.json"  # in a folder that `lowtide train` wrote
Kind = Literal["text", "jsonl", "json", "csv", "parquet", "saved", "hub"]
_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
}  # fmt: skip
_PROBE = 8192  # bytes read to recognise a format
_CUT_SEARCH = 4096  # text without a line end in so many bytes is cut between two characters
_HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+))?")
_SUFFIX = re.compile(r".*\.[A-Za-z]\w*")  # data/rows.jsonl is a path, org/OpenHermes-2.5 a name
_STDLIB_SUFFIXES = (".py", ".txt", ".rst")
# Its tests hold text in broken encodings on purpose; the others are no part of the standard library, or not text.
_STDLIB_SKIP = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})


@dataclass(frozen=True)
class Source:
    """One file, a folder that holds a dataset, or a dataset of the Hub.

    Attributes:
        path: of the file or folder; of a "hub" dataset its name.
        kind: the format: "text", "jsonl", "json" (a list of rows), "csv" (.tsv too), "parquet", "saved" (a folder that
            `Dataset.save_to_disk` wrote) or "hub".
        config: the configuration of a "hub" dataset; None: its only one.
    """

    path: Path
    kind: Kind
    config: str | None = None

    @cached_property
    def size(self) -> int:
        """Bytes, when they were first counted; 0 of a "hub" dataset."""
        return sum(stat.st_size for _, stat in self.stats())

    def stats(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the files it consists of, with their sizes and times; of a "hub" dataset none.

        Raises:
            ArgumentValueError: a file was removed since it was found.
        """
        if self.kind == "hub":
            return
        files = sorted(self.path.rglob("*")) if self.kind == "saved" else [self.path]
        try:
            yield from ((path, path.stat()) for path in files)
        except OSError as error:
            raise unreadable(self.path, error) from error


@dataclass(frozen=True)
class Sources:
    """A run's data.

    Attributes:
        files: in the order given, each once.
        skipped: the number of files in the given folders that hold no data.
    """

    files: tuple[Source, ...]
    skipped: int = 0

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(file.size for file in self.files)

    @property
    def is_text(self) -> bool:
        """Whether all files are text, none of them rows, for which `datasets` is needed."""
        return all(file.kind == "text" for file in self.files)

    def fingerprint(self, *arguments: object) -> str:
        """Return a digest of all files' names, sizes and times of change, and of the arguments' representations."""
        digest = hashlib.sha256(repr(arguments).encode(errors="surrogatepass"))
        for source in self.files:
            for path, stat in source.stats():
                entry = f"\0{path.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}"
                digest.update(entry.encode(errors="surrogateescape"))
        return digest.hexdigest()


def find_data(paths: Sequence[str]) -> Sources:
    """Find the files and datasets that the user named.

    Without names it is the standard library's sources. Of a folder every file with a suffix is taken, except hidden
    ones, the folders of runs, and files that are empty, binary or not UTF-8, which are counted. A file with two names
    is taken once.

    Raises:
        ArgumentValueError: a path does not exist, cannot be read, is empty or binary, or holds no data.
    """
    if not paths:
        return Sources(tuple(_standard_library()))
    found, skipped = dict[tuple[Path, str | None], Source](), 0
    for name in paths:
        path = Path(os.path.expanduser(name))  # noqa: PTH111 (it leaves an unknown home)
        try:
            sources, others = _search(path) if os.path.lexists(path) else ([_of_hub(name, path)], 0)
        except OSError as error:
            raise unreadable(path, error) from error
        skipped += others
        for source in sources:
            found.setdefault((source.path.resolve(), source.config), source)
    return Sources(tuple(found.values()), skipped)


def _of_hub(name: str, path: Path) -> Source:
    """Return the Hub dataset of a name that is no path.

    Raises:
        ArgumentValueError: the name can only be a path's.
    """
    match = _HUB_NAME.fullmatch(name)
    if match is None or _SUFFIX.fullmatch(name):
        near = did_you_mean(path.name, (one.name for one in path.parent.iterdir())) if path.parent.is_dir() else ""
        expected = "a file, a folder, or a dataset of the Hub as org/name"
        raise ArgumentValueError(message("data", expected, f"{name} (No such file or directory)", near))
    return Source(Path(match[1]), "hub", match[2])


def _search(path: Path) -> tuple[list[Source], int]:
    """Return the data at a path that exists, and the number of files of a folder that hold none."""
    if _is_saved(path):
        return [Source(path, "saved")], 0
    if not path.is_dir():
        if reason := _not_data(path):
            hint = "Give UTF-8 text, .jsonl, .json, .csv or .parquet files, uncompressed."
            raise ArgumentValueError(message("data", "a file of text or rows", f"{path}, which {reason}", hint))
        return [Source(path, _KINDS.get(path.suffix.lower(), "text"))], 0
    inside = [file for file in _walk(path) if file.is_dir() or (file.suffix and file.is_file())]
    found = [Source(file, _kind_in_folder(file)) for file in inside if file.is_dir() or not _not_data(file)]
    if not found:
        expected, hint = "a folder with data", "Files without a suffix, hidden, empty or binary do not count."
        raise ArgumentValueError(message("data", expected, f"{path}, which has none", hint))
    return found, len(inside) - len(found)


def _walk(folder: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files and saved datasets below a folder, in an order that does not depend on the file system.

    Folders of runs are left out: what a run writes beside its data would be other data on resume.
    """
    for where, folders, names in os.walk(folder):
        inside = sorted(Path(where, name) for name in folders if not name.startswith(".") and name not in skip)
        saved = list(filter(_is_saved, inside))
        yield from saved
        folders[:] = [path.name for path in inside if path not in saved and not (path / RUN_FILE).is_file()]
        yield from (Path(where, name) for name in sorted(names) if not name.startswith("."))


def _is_saved(folder: Path) -> bool:
    files = ("dataset_info.json", "state.json")
    return (folder / "dataset_dict.json").is_file() or all((folder / file).is_file() for file in files)


def _kind_in_folder(path: Path) -> Kind:
    """Return the format of what a folder holds: a .json is often settings, so it is rows if it begins with a list."""
    kind = "saved" if path.is_dir() else _KINDS.get(path.suffix.lower(), "text")
    if kind == "json":
        with path.open("rb") as file:
            return kind if re.match(rb"(\xef\xbb\xbf)?\s*\[\s*\{", file.read(_PROBE)) else "text"
    return kind


def _standard_library() -> list[Source]:
    """Return the source and documentation files of the running Python's standard library.

    Raises:
        ArgumentValueError: this Python has none on disk.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = (path for path in _walk(root, _STDLIB_SKIP) if path.suffix in _STDLIB_SUFFIXES)
    if files := [Source(path, "text") for path in found if not _not_data(path)]:
        return files
    expected, hint = "the standard library's sources", "Name text to train on with --data."
    raise ArgumentValueError(message("data", expected, f"none in {root}", hint))


def _not_data(path: Path) -> str | None:
    """Return why a file cannot be trained on, None if it can, from its first bytes.

    Raises:
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():
        return "is not a regular file"
    with path.open("rb") as file:
        probe = file.read(_PROBE)
    if not probe:
        return "is empty"
    if path.suffix.lower() == ".parquet":
        return None
    if b"\0" in probe:
        return "is binary"
    try:
        probe.decode()
    except UnicodeDecodeError as error:
        if error.start < len(probe) - 3:  # nearer to the end it may be a character that the probe cut
            return "is not UTF-8 text"
    return None


def read_text(path: Path, begin: int, end: int) -> str:
    """Return the part of a text that a range of bytes stands for: both bounds are moved to the next line end.

    Raises:
        ArgumentValueError: the file cannot be read, or is not UTF-8 there.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin, end = (_cut(file, at, size) for at in (begin, end))
            file.seek(begin)
            return file.read(end - begin).decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        got = f"something else from byte {begin + error.start} of {path} on"
        raise ArgumentValueError(message("data", "UTF-8 text", got, "Fix the file, or leave it out.")) from error
    except OSError as error:
        raise unreadable(path, error) from error


def _cut(file: BinaryIO, at: int, size: int) -> int:
    """Return the first place at or after a byte where text may be cut, which is the same for both neighbours.

    That is a line end; for text without one nearby it is between two characters.
    """
    if at <= 0 or at >= size:
        return max(0, min(at, size))
    file.seek(at - 1)  # a line that begins exactly at the bound belongs to the second part
    window = file.read(_CUT_SEARCH)
    if (newline := window.find(b"\n")) >= 0:
        return at + newline
    return next((at + i for i, byte in enumerate(window[1:]) if byte & 0xC0 != 0x80), at)


def read_lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects of the lines of a .jsonl file, with their places.

    Raises:
        ArgumentValueError: the file cannot be read, or a line is no JSON object.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                place = f"line {number:,} of {path}"
                try:
                    row, got = load_json(line), "another JSON value"
                except (ValueError, RecursionError) as error:
                    row, got = None, f"no valid JSON ({' '.join(str(error).split())[:100]})"
                if not isinstance(row, dict):
                    hint = "Fix the line. A file that is one list of rows has the suffix .json."
                    raise ArgumentValueError(message("data", "one JSON object in each line", f"{got} in {place}", hint))
                yield row, place
    except OSError as error:
        raise unreadable(path, error) from error


def load_json(text: bytes) -> Any:
    """Return a JSON value; NaN and infinities are None, whole numbers beyond 64 bits are floats.

    Raises:
        ValueError: the text is no JSON, or has halves of characters (surrogates), which no tokenizer takes.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(
        text.decode("utf-8-sig"),
        parse_constant=lambda _: None,
        parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits),
    )
    if rb"\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def why(error: BaseException) -> str:
    """Return an error of the system or of another library in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    if "PytorchStreamReader" in text or "inline_container" in text:
        return "a file that torch.save wrote is damaged"
    name = type(error).__name__
    return (f"{name}: {text}" if isinstance(error, LookupError) else text or name)[:300].rstrip(".")


def unreadable(path: Path, error: OSError) -> ArgumentValueError:
    """Return the error for a file that the system does not let us read."""
    got = f"{error.filename or path} ({error.strerror or error})"
    return ArgumentValueError(message("data", "a file or folder that can be read", got))
