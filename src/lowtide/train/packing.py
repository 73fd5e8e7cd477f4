"""Documents into blocks of tokens: no padding, nothing dropped, one piece of text in memory at a time per stream.

Every row of every rank's batch is a stream of its own over its own share of the pieces: rows of a batch come from
different places of the corpus, ranks never overlap, and a stream's position is three numbers, because a block ends
exactly where the next one begins.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lowtide.errors import ArgumentValueError, message
from lowtide.train.corpus import Corpus

Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Position:
    """Where a stream's next block begins: pass over its pieces, piece of that pass, tokens of that piece."""

    epoch: int = 0
    piece: int = 0
    token: int = 0


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which pieces are held out and in which order the streams read the others; a function of sizes and seed alone.

    Attributes:
        pieces: how many there are.
        held_out: how many of them are never trained on.
        seed: chooses them, and the order of each epoch.
    """

    pieces: int
    held_out: int
    seed: int

    def held_out_pieces(self) -> list[int]:
        """Return the pieces that are never trained on."""
        return _dealt(self.pieces, self.seed)[: self.held_out].tolist()

    def share(self, stream: int, streams: int, epoch: int) -> list[int]:
        """Return the pieces that one of so many streams reads in an epoch, in order.

        A stream keeps its share and shuffles it each epoch, so that streams of different speed never meet.
        """
        mine = _dealt(self.pieces, self.seed)[self.held_out + stream :: streams]
        return mine[_permutation(len(mine), f"{self.seed}:{stream}:{epoch}")].tolist()


def split_corpus(corpus: Corpus, *, seed: int, held_out_bytes: int) -> Split:
    """Hold out pieces of so many bytes together, or a tenth of the pieces where that is less; at least one."""
    most = max(1, len(corpus) // 10)
    sizes = itertools.accumulate(corpus.bytes_of(piece) for piece in _dealt(len(corpus), seed)[:most].tolist())
    enough = sum(1 for size in sizes if size < held_out_bytes) + 1
    return Split(pieces=len(corpus), held_out=min(most, enough), seed=seed)


@lru_cache(maxsize=1)
def _dealt(pieces: int, seed: int) -> Tensor:
    """Return the order in which the pieces are dealt out; each stream asks for it again and again."""
    return _permutation(pieces, str(seed))


def _permutation(count: int, seed: str) -> Tensor:
    """Return a permutation that depends on the seed's text alone."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big", signed=True)
    return torch.randperm(count, generator=torch.Generator().manual_seed(number))


class Stream:
    """Blocks of ``seq_len`` tokens from one share of the pieces, epoch after epoch.

    Args:
        corpus: where the text is.
        order: the pieces of an epoch, given its number.
        tokenize: text to token ids, special tokens not added.
        eos: the token put after each document.
        seq_len: tokens of a block.
        position: where to begin.
        epochs: how many epochs to read; None: without end.
    """

    def __init__(
        self,
        corpus: Corpus,
        order: Callable[[int], Sequence[int]],
        tokenize: Tokenize,
        *,
        eos: int,
        seq_len: int,
        position: Position = Position(),
        epochs: int | None = None,
    ) -> None:
        self.position = position
        self._corpus, self._order, self._tokenize = corpus, order, tokenize
        self._eos, self._seq_len, self._epochs = eos, seq_len, epochs

    def __iter__(self) -> Iterator[Tensor]:
        """Yield blocks as int64 tensors [seq_len]; `position` is then where the next one begins."""
        block = array("q")
        for at, tokens in self._documents():
            used = 0
            while used < len(tokens):
                taken = tokens[used : used + self._seq_len - len(block)]
                block.extend(taken)
                used += len(taken)
                if len(block) == self._seq_len:
                    self.position = Position(at.epoch, at.piece, at.token + used)
                    yield torch.tensor(block, dtype=torch.int64)
                    block = array("q")

    def _documents(self) -> Iterator[tuple[Position, array[int]]]:
        """Yield the tokens of each document from the position on, with the position of the first of them."""
        epoch, first, skip = self.position.epoch, self.position.piece, self.position.token
        while self._epochs is None or epoch < self._epochs:
            any_token = False
            for piece, number in list(enumerate(self._order(epoch)))[first:]:
                seen = 0
                for text in self._corpus.documents(number):
                    tokens = array("q", self._tokenize(text))
                    tokens.append(self._eos)
                    any_token = True
                    if seen + len(tokens) > skip:
                        begin = max(0, skip - seen)
                        yield Position(epoch, piece, seen + begin), tokens[begin:]
                    seen += len(tokens)
                skip = 0
            if not any_token and first == 0:
                hint = "Its documents are all empty: give other files with --data."
                raise ArgumentValueError(message("data", "some text in every part of the corpus", "none", hint))
            epoch, first = epoch + 1, 0


class PackedBlocks(IterableDataset[dict[str, Tensor]]):
    """One rank's training blocks, without end: row i of each batch comes from the rank's stream i.

    Args:
        streams: the rank's streams, as many as the rows of its batch.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        super().__init__()
        self._streams = list(streams)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield ``input_ids`` and ``labels`` (the same: the model shifts them), both int64 [seq_len]."""
        rows = [iter(stream) for stream in self._streams]
        while True:
            for row in rows:
                block = next(row)
                yield {"input_ids": block, "labels": block}

    def state(self) -> list[dict[str, int]]:
        """Return where each stream is, for `positions`."""
        return [asdict(stream.position) for stream in self._streams]


def positions(state: Sequence[dict[str, Any]]) -> list[Position]:
    """Return the positions that `PackedBlocks.state` told."""
    return [Position(**told) for told in state]


def held_out_blocks(corpus: Corpus, split: Split, tokenize: Tokenize, *, eos: int, seq_len: int, limit: int) -> Tensor:
    """Return up to ``limit`` blocks of held-out text, int64 [blocks, seq_len].

    Raises:
        ArgumentValueError: the held-out text is shorter than one block.
    """
    pieces = split.held_out_pieces()
    stream = Stream(corpus, lambda _: pieces, tokenize, eos=eos, seq_len=seq_len, epochs=1)
    blocks = [block for block, _ in zip(stream, range(limit), strict=False)]
    if not blocks:
        hint = "Give more text with --data, or lower --seq-len."
        raise ArgumentValueError(message("data", f"held-out text of {seq_len} tokens or more", "less", hint))
    return torch.stack(blocks)
