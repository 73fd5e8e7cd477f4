"""Text on disk as numbered pieces, each read when it is needed: what is in memory does not grow with the corpus.

A piece is a byte range of one file, cut where a line begins. Its bounds are arithmetic on file sizes, so that any
piece can be read without those before it, which is what shuffling, sharding and resuming need. A text file up to the
size of a piece is one document, a longer one is a document a piece; of a .jsonl file each line is a document.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lowtide.errors import ArgumentValueError, message
from lowtide.train.config import RUN_FILE
from lowtide.train.conversations import KINDS, Completion, Conversation, is_conversation, read_conversation

JSONL = (".jsonl", ".ndjson")
# A stream reads a piece from end to end: small ones mix the corpus better, but a longer document is cut into them.
PIECE_BYTES_PER_TOKEN = 32  # of a block: some eight blocks a piece
MOST_PIECES = 2**20  # their order is in memory, 8 bytes each
SMALLEST_PIECE = 1024
_PROBE = 8192  # bytes looked at to tell text from binary
_LOOKED_AT = 8  # files, for the length of lines and the kind of their first one
_CUT_SEARCH = 4096  # a text without a line's end in so many bytes is cut between two characters
_STDLIB_SUFFIXES = (".py", ".txt", ".rst")
# Tests hold text in broken encodings on purpose; the others are no part of the standard library, or not text.
_STDLIB_SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}


@dataclass(frozen=True)
class Place:
    """Where a line begins; as text with the line's number, which is counted only then.

    Attributes:
        path: of the file.
        byte: of the line's first character.
    """

    path: Path
    byte: int

    def __str__(self) -> str:
        left, lines = self.byte, 1
        try:
            with self.path.open("rb") as file:
                while left > 0 and (read := file.read(min(left, 2**20))):
                    lines, left = lines + read.count(b"\n"), left - len(read)
        except OSError:  # it went away meanwhile
            return f"the line at byte {self.byte} of {self.path}"
        return f"line {lines:,} (byte {self.byte}) of {self.path}"


@dataclass(frozen=True)
class Corpus:
    """Text files, cut into pieces.

    Attributes:
        files: their paths, in a fixed order.
        sizes: their bytes.
        piece_bytes: the length of every piece but a file's last.
        text_field: the field of a .jsonl line.
        skipped: files in the folders given that are not text.
        chat: the files are .jsonl of conversations.
    """

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    piece_bytes: int
    text_field: str
    skipped: int
    chat: bool = False
    _ends: list[int] = field(init=False, repr=False, compare=False)  # pieces up to and with each file

    def __post_init__(self) -> None:
        counts = (-(-size // self.piece_bytes) for size in self.sizes)
        object.__setattr__(self, "_ends", list(itertools.accumulate(counts)))

    def __len__(self) -> int:
        """Return the number of pieces."""
        return self._ends[-1]

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(self.sizes)

    def fingerprint(self) -> str:
        """Return a digest of the files' names and sizes and of how they are cut; not of what is in them."""
        digest = hashlib.sha256(f"{self.piece_bytes}:{self.text_field}".encode())
        for path, size in zip(self.files, self.sizes, strict=True):
            digest.update(f"\0{path.absolute()}\0{size}".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def stamp(self) -> str:
        """Return a digest that also changes where a file is written to: of when each was, besides."""
        digest = hashlib.sha256(self.fingerprint().encode())
        for path in self.files:
            try:
                digest.update(f"\0{path.stat().st_mtime_ns}".encode())
            except OSError as error:
                raise _unreadable(path, error) from error
        return digest.hexdigest()

    def bytes_of(self, piece: int) -> int:
        """Return the size of one piece; 0 where it is within a line that begins in another one.

        Raises:
            ArgumentValueError: a file went away since the run began.
        """
        path, size, start = self._range(piece)
        try:
            with path.open("rb") as file:
                begin, end = self._bounds(file, path, size, start)
        except OSError as error:
            raise _unreadable(path, error) from error
        return end - begin

    def documents(self, piece: int) -> Iterator[str]:
        """Yield the documents of one piece; empty ones are left out. Of conversations that is what is said in them.

        Raises:
            ArgumentValueError: a file went away since the run began, or a .jsonl line has no such field.
        """
        if self.chat:
            yield from (one.text for one in self.conversations(piece))
            return
        path, size, start = self._range(piece)
        try:
            with path.open("rb") as file:
                begin, end = self._bounds(file, path, size, start)
                file.seek(begin)
                if path.suffix.lower() in JSONL:
                    yield from _json_lines(file, path, end, self.text_field)
                elif text := file.read(end - begin).decode().removeprefix("\ufeff"):
                    yield text
        except UnicodeDecodeError as error:
            hint = "Mend the file, or leave it out."
            got = f"something else from {Place(path, begin + error.start)} on"
            raise ArgumentValueError(message("data", "UTF-8 text", got, hint)) from error
        except OSError as error:
            raise _unreadable(path, error) from error

    def conversations(self, piece: int) -> Iterator[Conversation | Completion]:
        """Yield the conversations of one piece, of a corpus that is ``chat``.

        Raises:
            ArgumentValueError: a file went away since the run began, or a line is no conversation.
        """
        path, size, start = self._range(piece)
        try:
            with path.open("rb") as file:
                begin, end = self._bounds(file, path, size, start)
                file.seek(begin)
                yield from _conversations(file, path, end)
        except OSError as error:
            raise _unreadable(path, error) from error

    def _bounds(self, file: BinaryIO, path: Path, size: int, start: int) -> tuple[int, int]:
        """Return where the piece whose range begins at ``start`` really begins and ends."""
        whole_lines = path.suffix.lower() in JSONL
        end = min(start + self.piece_bytes, size)
        return _cut(file, start, size, whole_lines), _cut(file, end, size, whole_lines)

    def _range(self, piece: int) -> tuple[Path, int, int]:
        """Return a piece's file, that file's size, and where in it the piece's range begins."""
        index = bisect.bisect_right(self._ends, piece)
        before = self._ends[index - 1] if index else 0
        return self.files[index], self.sizes[index], (piece - before) * self.piece_bytes


def open_corpus(paths: Sequence[str], *, text_field: str, streams: int, seq_len: int) -> Corpus:
    """Find the text files and cut them into enough pieces for a number of streams.

    Args:
        paths: files, or folders that are searched for text files (hidden ones, those that are not UTF-8 and the
            folders of runs are skipped), each file once; none: the standard library's sources.
        text_field: the field of a .jsonl line that holds the text.
        streams: how many independent streams will share the pieces; each gets some, and some are held out.
        seq_len: tokens of a block; a piece holds several blocks where there is text enough.

    Raises:
        ArgumentValueError: a path does not exist, cannot be read, is empty or binary, or there is too little text.
    """
    files, skipped = text_files(paths) if paths else (_standard_library(), 0)
    files = list({path.resolve(): path for path in [*files, *reversed(files)]}.values())  # each by its first name
    sizes = tuple(path.stat().st_size for path in files)
    chat = _is_chat(files, text_field)
    wanted = max(PIECE_BYTES_PER_TOKEN * seq_len, sum(sizes) // MOST_PIECES)
    # a piece that is shorter than a line may hold none; but each stream must have some that hold one
    lines = min(2 * _longest_line(files[:_LOOKED_AT]), sum(sizes) // (4 * streams))
    smallest = max(SMALLEST_PIECE, lines)
    piece_bytes = max(smallest, min(wanted, sum(sizes) // (16 * streams)))
    corpus = Corpus(tuple(files), sizes, piece_bytes, text_field, skipped, chat)
    if len(corpus) <= streams:
        expected = f"more text: each of the {streams} blocks of a step reads another part of it, and some is held out"
        hint = "Give more files with --data, or lower --batch-size."
        raise ArgumentValueError(message("data", expected, f"{corpus.bytes} bytes", hint))
    for path in corpus.files[:_LOOKED_AT]:
        _check_first_line(path, text_field, chat)
    return corpus


def text_files(paths: Sequence[str]) -> tuple[list[Path], int]:
    """Return the text files of the paths that the user named, in order, and how many others their folders hold.

    Raises:
        ArgumentValueError: a path does not exist, cannot be read, is empty or binary, or a folder without text.
    """
    found = [_search(Path(os.path.expanduser(path))) for path in paths]  # noqa: PTH111 (it leaves an unknown home)
    return [file for files, _ in found for file in files], sum(skipped for _, skipped in found)


def _search(path: Path) -> tuple[list[Path], int]:
    """Return the text files at a path the user named, in order, and how many others a folder holds."""
    try:
        if not path.is_dir():
            if why := _not_text(path):
                hint = "Give UTF-8 text or .jsonl files, unpacked."
                raise ArgumentValueError(message("data", "a file of text", f"{path}, which {why}", hint))
            return [path], 0
        found = [p for p in _walk(path) if p.suffix and p.is_file()]
        texts = [p for p in found if _not_text(p) is None]
    except OSError as error:
        raise _unreadable(path, error) from error
    if not texts:
        expected, hint = "a folder with text files", "Files without a suffix, hidden, empty or binary do not count."
        raise ArgumentValueError(message("data", expected, f"{path}, which has none", hint))
    return texts, len(found) - len(texts)


def _walk(folder: Path, skip: set[str] = frozenset()) -> Iterator[Path]:  # type: ignore[assignment]
    """Yield the files below a folder, in an order that does not depend on the file system.

    Hidden ones are left out, and folders of runs: what a run writes beside its data would be other data on resume.
    """
    for where, folders, names in os.walk(folder):
        found = (f for f in folders if not f.startswith(".") and f not in skip)
        folders[:] = sorted(f for f in found if not _is_run(Path(where, f)))
        yield from (Path(where, name) for name in sorted(names) if not name.startswith("."))


def _is_run(folder: Path) -> bool:
    """Return whether a folder is one that ``lowtide train`` has written."""
    try:
        return "lowtide" in json.loads((folder / RUN_FILE).read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _standard_library() -> list[Path]:
    """Return the source and documentation files of the running Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (p for p in _walk(root, _STDLIB_SKIP) if p.suffix in _STDLIB_SUFFIXES)
    files = [p for p in found if _not_text(p) is None]
    if not files:
        expected, hint = "the standard library's sources", "Name text to train on with --data."
        raise ArgumentValueError(message("data", expected, f"none in {root}", hint))
    return files


def _not_text(path: Path) -> str | None:
    """Return why a file cannot be trained on, None if it can; what is looked at is its beginning.

    Raises:
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():
        return "is not a regular file"
    with path.open("rb") as file:
        probe = file.read(_PROBE)
    if not probe:
        return "is empty"
    if b"\0" in probe:
        return "is binary"
    try:
        probe.decode()
    except UnicodeDecodeError as error:
        if error.start < len(probe) - 3:  # nearer to the end it may be a character that the probe cut
            return "is not UTF-8 text"
    return None


def _cut(file: BinaryIO, at: int, size: int, whole_lines: bool) -> int:
    """Return where the piece whose range begins at ``at`` really begins: the same for both neighbours."""
    if at == 0 or at >= size:
        return min(at, size)
    file.seek(at - 1)  # a line that begins exactly at the bound belongs to this piece
    if whole_lines:
        file.readline()
        return min(file.tell(), size)
    window = file.read(_CUT_SEARCH)
    newline = window.find(b"\n")
    if newline >= 0:
        return at + newline
    for i, byte in enumerate(window[1:]):
        if byte & 0xC0 != 0x80:  # not a byte inside a UTF-8 character
            return at + i
    return at


def _json_lines(file: BinaryIO, path: Path, end: int, name: str) -> Iterator[str]:
    """Yield the text of the lines from the file's position up to ``end``."""
    while (at := file.tell()) < end:
        line = file.readline().strip()
        if not line:
            continue
        try:
            text = json.loads(line)[name]
            text.encode()  # JSON can name halves of characters, which are no text
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            text = None
        if not isinstance(text, str):
            expected = f"in each line an object with a text in its field {name!r}"
            hint = f"Name the field with --text-field, or mend the line. Conversations have {KINDS}."
            raise ArgumentValueError(message("data", expected, f"something else in {Place(path, at)}", hint))
        if text:
            yield text


def _conversations(file: BinaryIO, path: Path, end: int) -> Iterator[Conversation | Completion]:
    """Yield the conversations of the lines from the file's position up to ``end``."""
    while (at := file.tell()) < end:
        if not (line := file.readline().strip()):
            continue
        where = Place(path, at)
        try:
            yield read_conversation(json.loads(line), where)
        except (ValueError, RecursionError) as error:
            why = "no JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)
            expected = f"in each line an object with {KINDS}"
            raise ArgumentValueError(message("data", expected, f"{where}: {why}", "Mend the line.")) from error


def _is_chat(files: Sequence[Path], text_field: str) -> bool:
    """Return whether the files hold conversations: where the first line of a .jsonl is one and has no text field.

    Raises:
        ArgumentValueError: some do and others hold text.
    """
    kinds = {path: path.suffix.lower() in JSONL and _begins_with_conversation(path, text_field) for path in files}
    if len(set(kinds.values())) < 2:
        return any(kinds.values())
    chat, text = (next(path for path, kind in kinds.items() if kind is wanted) for wanted in (True, False))
    expected = "files of conversations, or files of text"
    raise ArgumentValueError(message("data", expected, f"both: {chat} and {text}", "Train on them in turn."))


def _begins_with_conversation(path: Path, text_field: str) -> bool:
    try:
        with path.open("rb") as file:
            line: Any = json.loads(next((x for x in file if x.strip()), b""))
    except (ValueError, RecursionError):
        return False
    return is_conversation(line) and not isinstance(line.get(text_field), str)


def _longest_line(paths: Sequence[Path]) -> int:
    """Return the length in bytes of the longest of the .jsonl files' first lines."""
    longest = 0
    for path in paths:
        if path.suffix.lower() in JSONL:
            with path.open("rb") as file:
                longest = max(longest, max(map(len, itertools.islice(file, 64)), default=0))
    return longest


def _check_first_line(path: Path, text_field: str, chat: bool) -> None:
    """Find a wrong --text-field, or a line that is no conversation, before the model is built."""
    if path.suffix.lower() in JSONL:
        with path.open("rb") as file:
            next(_conversations(file, path, 1) if chat else _json_lines(file, path, 1, text_field), None)


def _unreadable(path: Path, error: OSError) -> ArgumentValueError:
    """Return the error for a file that the system does not let us read."""
    where = error.filename or path
    return ArgumentValueError(message("data", "a file or folder that can be read", f"{where} ({error.strerror})"))
