"""Text to pre-train on: tokenised once into a file, which is read in blocks.

Text is cut into pieces: byte ranges of text files, ranges of rows of all others. A text file up to the size of a piece
is one document, a longer one is a document a piece; each row is one. The order of
the pieces is a permutation that depends on the sizes and the seed alone: the first ones are held out, the next ones are
trained on, so a file with more blocks begins with the same ones.

FILE holds the held-out blocks, then the training blocks, as integers of 16 or 32 bits; FILE.json has their counts.
Blocks are read by their offset, so memory does not grow with the file.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lowtide.errors import ArgumentValueError, message
from lowtide.train.files import Sources, read_text

IGNORED = -100  # the label of a token that is not predicted
_PIECE_BYTES_PER_TOKEN = 32  # of a block: some eight blocks a piece
_BATCH_BYTES = 2**18  # tokenised at once


@dataclass(frozen=True)
class Text:
    """The text of a run.

    Attributes:
        sources: the files.
        field: the column of rows with the text.
        seq_len: tokens of a block.
        seed: fixes the order.
    """

    sources: Sources
    field: str
    seq_len: int
    seed: int


class Pieces:
    """A text in numbered pieces, each read when it is needed, and their order.

    Raises:
        ArgumentValueError: a row has no text.
    """

    def __init__(self, text: Text) -> None:
        self._files = [file for file in text.sources.files if file.kind == "text"]
        self._sizes = [file.size for file in self._files]
        if rows := tuple(file for file in text.sources.files if file.kind != "text"):
            from lowtide.train.rows import load_rows

            self._rows = load_rows(Sources(rows), columns={"text": text.field}, text_field=text.field)[0]
            self._sizes.append(self._rows.data.nbytes)
        self.bytes = sum(self._sizes)
        most = min(max(_PIECE_BYTES_PER_TOKEN * text.seq_len, self.bytes >> 20), 2**20)
        self._piece_bytes = max(64, min(most, self.bytes // 32))  # a tenth is held out: that has to be some pieces
        self._ends = list(itertools.accumulate(-(-size // self._piece_bytes) for size in self._sizes))
        self.order: list[int] = _permutation(self._ends[-1], str(text.seed)).tolist()

    def documents(self, piece: int) -> list[str]:
        """Return the documents of one piece; empty ones are left out.

        Raises:
            ArgumentValueError: a file was removed, or is not UTF-8.
        """
        index, begin, end = self._range(piece)
        if index == len(self._files):
            rows, size = len(self._rows), self._sizes[index]
            return list(self._rows[begin * rows // size : end * rows // size]["text"])
        text = read_text(self._files[index].path, begin, end)
        return [text] if text else []

    def bytes_of(self, piece: int) -> int:
        """Return the size of one piece as files have it, which a row of it may exceed."""
        _, begin, end = self._range(piece)
        return end - begin

    def _range(self, piece: int) -> tuple[int, int, int]:
        index = bisect.bisect_right(self._ends, piece)
        begin = (piece - (self._ends[index - 1] if index else 0)) * self._piece_bytes
        return index, begin, min(begin + self._piece_bytes, self._sizes[index])


def write_tokens(
    file: Path, text: Text, tokenizer: Any, *, held_out: int, blocks: int | None, begun: bool = False
) -> None:
    """Tokenise text into a file for `Blocks`; a file with as many blocks of the same text is left as it is.

    Each document has what the tokenizer puts around a text, and one end-of-text token behind it. At most a tenth of the
    text is held out. The file is written aside and renamed when it is whole.

    Args:
        file: where to.
        text: what to tokenise.
        tokenizer: of transformers.
        held_out: blocks to hold out, fewer if a tenth of the text has fewer.
        blocks: blocks to train on, fewer if the text has fewer; None: all of the text.
        begun: the run has begun: a file with enough blocks is taken even if the text has changed.

    Raises:
        ArgumentValueError: a file cannot be read or has changed since the run began, or the text is too short for one
            block of each part.
    """
    tokenizer("a")  # which sets truncation and padding, parts of the fingerprint
    inner = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = inner.to_str() if inner else sorted(tokenizer.get_vocab().items())
    seq_len = text.seq_len
    key = text.sources.fingerprint(vocabulary, text.field, seq_len, held_out, text.seed)
    header, header_file = read_header(file), _header_file(file)
    most = 2**62 // seq_len if blocks is None else blocks
    if header and begun:
        if header["train"] >= most:
            return
        if header["fingerprint"] != key:
            hint = "Restore them, or leave --max-steps as it was."
            raise ArgumentValueError(message("data", "the files that the run began with", "changed ones", hint))
    if header and header["fingerprint"] == key and (header["whole"] or header["train"] >= most):
        return
    pieces = Pieces(text)
    code = "H" if len(tokenizer) <= 2**16 else "I"
    tokens = _tokens(pieces, tokenizer, code)
    held, passed, size = array(code), list[tuple[int, "array[int]"]](), 0
    while len(held) < held_out * seq_len and (piece := next(tokens, None)) is not None:
        if size + piece[0] <= pieces.bytes // 10:
            held.extend(piece[1])
            size += piece[0]
        else:
            passed.append(piece)
            if len(held) >= seq_len:  # else it is one long document, and a shorter one is held out
                break
    held_blocks = min(held_out, len(held) // seq_len)
    written, aside = 0, file.with_name(file.name + ".part")
    try:
        with aside.open("wb") as out:
            held[: held_blocks * seq_len].tofile(out)
            for _, ids in itertools.chain(passed, tokens):
                taken = ids[: most * seq_len - written]
                taken.tofile(out)
                written += len(taken)
                if written == most * seq_len:
                    break
            train = written // seq_len
            out.truncate((held_blocks + train) * seq_len * held.itemsize)
        for part, there in (("held-out", held_blocks or not held_out), ("training", train)):
            if not there:
                hint = "Give more text with --data, or lower --seq-len."
                raise ArgumentValueError(message("data", f"{part} text of {seq_len} tokens or more", "less", hint))
        header_file.unlink(missing_ok=True)  # the old one does not fit the new file
        aside.replace(file)
        counts = {"held_out": held_blocks, "train": train, "whole": written < most * seq_len}
        known = {**counts, "seq_len": seq_len, "seed": text.seed, "itemsize": held.itemsize, "fingerprint": key}
        aside.write_text(json.dumps(known))
        aside.replace(header_file)
    finally:
        aside.unlink(missing_ok=True)


class Blocks(Dataset[dict[str, Tensor]]):
    """Blocks of a file that `write_tokens` wrote: those to train on, or those held out.

    Raises:
        ArgumentValueError: there is no such file.
    """

    def __init__(self, file: Path, part: Literal["train", "held_out"]) -> None:
        header = read_header(file)
        if header is None:
            raise ArgumentValueError(message("file", "a whole file of tokens", file))
        self._file, self._seq_len, self._seed = file, header["seq_len"], header["seed"]
        self._dtype = torch.uint16 if header["itemsize"] == 2 else torch.uint32
        self._first = 0 if part == "held_out" else header["held_out"]
        self._count: int = header[part]
        self._order: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self._count

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch: 0 is the file's, in which pieces are shuffled; others shuffle the blocks."""
        self._order = _permutation(self._count, f"{self._seed}:{epoch}") if epoch else None

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``labels``, int64 [seq_len], of a block, counted in the epoch's order.

        Nothing predicts the first token, so its label is ignored.

        Raises:
            IndexError: there are not so many.
        """
        if not 0 <= index < self._count:
            raise IndexError(index)
        number = self._first + (index if self._order is None else int(self._order[index]))
        size = self._seq_len * self._dtype.itemsize
        with self._file.open("rb") as file:
            file.seek(number * size)
            ids = torch.frombuffer(bytearray(file.read(size)), dtype=self._dtype).to(torch.int64)
        labels = ids.clone()
        labels[0] = IGNORED
        return {"input_ids": ids, "labels": labels}


def read_header(file: Path) -> dict[str, Any] | None:
    """Return what is known of a file of tokens; None: there is none, or it is not whole.

    It has ``held_out`` and ``train``, the counts of blocks; ``whole``, whether that is all of the text; ``seq_len``,
    ``seed``, ``itemsize`` (bytes of a token); and ``fingerprint``, of the files, the tokenizer and the settings.
    """
    try:
        header: dict[str, Any] = json.loads(_header_file(file).read_bytes())
        size = (header["held_out"] + header["train"]) * header["seq_len"] * header["itemsize"]
        return header if file.stat().st_size == size else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _header_file(file: Path) -> Path:
    return file.with_name(file.name + ".json")


def _permutation(count: int, seed: str) -> Tensor:
    """Return a permutation that depends on the seed's text alone."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big", signed=True)
    return torch.randperm(count, generator=torch.Generator().manual_seed(number))


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and behind a text by itself."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    if 0 not in special:  # a vocabulary without the letter
        return [], []
    return ids[: special.index(0)], ids[len(ids) - special[::-1].index(0) :]


def _tokens(pieces: Pieces, tokenizer: Any, code: str) -> Iterator[tuple[int, array[int]]]:
    """Yield the bytes and the tokens of each piece, in order; several are tokenised at once."""
    (before, after), end = _frame(tokenizer), [tokenizer.eos_token_id]
    numbers = iter(pieces.order)
    while batch := list(_batch(pieces, numbers)):
        texts = [text for _, documents in batch for text in documents]
        # verbose=False: a document longer than the model's limit is no mistake here, it is cut into blocks
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        encoded = iter(tokenizer(texts, **options)["input_ids"] if texts else [])
        for size, documents in batch:
            tokens = array(code)
            for ids in itertools.islice(encoded, len(documents)):
                whole = ids if ids[: len(before)] == before else before + ids
                whole = whole if whole[len(whole) - len(after) :] == after else whole + after
                tokens.extend(whole if whole[-1:] == end else whole + end)
            yield size, tokens


def _batch(pieces: Pieces, numbers: Iterator[int]) -> Iterator[tuple[int, list[str]]]:
    """Yield the bytes and the documents of the next pieces."""
    read = 0
    while read < _BATCH_BYTES and (number := next(numbers, None)) is not None:
        documents = pieces.documents(number)
        size = max(pieces.bytes_of(number), sum(len(text.encode()) for text in documents))
        read += size
        yield size, documents
