"""Which text a rank trains on, in which order, and what is held out; one piece in memory at a time per stream.

Every row of every rank's batch is a stream of its own over its own share of the pieces: rows of a batch come from
different places of the corpus, and ranks never overlap.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lowtide.errors import ArgumentValueError, message
from lowtide.train.chat import ChatFormat
from lowtide.train.corpus import Corpus
from lowtide.train.streams import IGNORED, START, Block, Document, Position, Read, Stream, WholeStream

Tokenize = Callable[[str], Sequence[int]]


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


def split_corpus(corpus: Corpus, *, seed: int, held_out_bytes: int, streams: int) -> Split:
    """Hold out pieces of so many bytes together, or of a tenth of all where that is less; at least one with a document.

    Each of the streams has a piece of its own among the others.
    """
    wanted = min(held_out_bytes, corpus.bytes // 10)
    held_out = size = 0
    for piece in _dealt(len(corpus), seed)[: max(1, len(corpus) - streams)].tolist():
        size += corpus.bytes_of(piece)
        held_out += 1
        if size > 0 and (size >= wanted or held_out >= len(corpus) // 2):
            break
    return Split(pieces=len(corpus), held_out=held_out, seed=seed)


@lru_cache(maxsize=1)
def _dealt(pieces: int, seed: int) -> Tensor:
    """Return the order in which the pieces are dealt out; each stream asks for it again and again."""
    return _permutation(pieces, str(seed))


def _permutation(count: int, seed: str) -> Tensor:
    """Return a permutation that depends on the seed's text alone."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big", signed=True)
    return torch.randperm(count, generator=torch.Generator().manual_seed(number))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How documents become blocks.

    Attributes:
        read: the documents of a piece, given its number.
        seq_len: tokens of a block.
        packing: "joined", "separate" or "none", as `TrainConfig` says.
        whole: documents are not cut.
        pad: the token of padding.
    """

    read: Read
    seq_len: int
    packing: str
    whole: bool
    pad: int

    def stream(
        self, order: Callable[[int], Sequence[int]], *, position: Position = START, epochs: int | None = None
    ) -> Stream:
        """Return the stream over the pieces that ``order`` gives for each epoch."""
        kind = WholeStream if self.whole else Stream
        return kind(
            self.read,
            order,
            seq_len=self.seq_len,
            packing=self.packing,
            pad=self.pad,
            position=position,
            epochs=epochs,
        )


def text_documents(corpus: Corpus, tokenize: Tokenize, *, eos: int) -> Read:
    """Return how to read a corpus of texts: each with one token ``eos`` behind it, also where it ends in one itself."""

    def read(piece: int) -> Iterator[Document]:
        for text in corpus.documents(piece):
            ids = array("q", tokenize(text))
            if not ids or ids[-1] != eos:
                ids.append(eos)
            yield Document(ids)

    return read


def chat_documents(corpus: Corpus, chat: ChatFormat) -> Read:
    """Return how to read a corpus of conversations."""
    return lambda piece: map(chat.document, corpus.conversations(piece))


class PackedBlocks(IterableDataset[Block]):
    """One rank's training blocks, without end: row i of each batch comes from the rank's stream i.

    Args:
        streams: the rank's streams, as many as the rows of its batch.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        super().__init__()
        self._streams = list(streams)

    def __iter__(self) -> Iterator[Block]:
        """Yield blocks as `Stream` does."""
        rows = [iter(stream) for stream in self._streams]
        while True:
            for row in rows:
                yield next(row)

    def state(self) -> list[dict[str, int]]:
        """Return where each stream is, for `positions`."""
        return [asdict(stream.position) for stream in self._streams]

    def counts(self) -> list[int]:
        """Return how many conversations were read so far, and how many of them were cut and left out."""
        read_to = [stream.read_to for stream in self._streams]
        return [sum(getattr(at, name) for at in read_to) for name in ("seen", "cut", "left_out")]


class Batches(IterableDataset[list[Block]]):
    """A rank's blocks in batches: the sizes in turn, over and over.

    Args:
        blocks: the rank's.
        sizes: blocks of each batch. One of 0 has a block in which nothing is predicted, for the ranks go step by step.
        empty: that block.
    """

    def __init__(self, blocks: IterableDataset[Block], sizes: Sequence[int], empty: Block) -> None:
        super().__init__()
        self._blocks, self._sizes, self._empty = blocks, sizes, empty

    def __iter__(self) -> Iterator[list[Block]]:
        """Yield batches."""
        blocks = iter(self._blocks)
        for size in itertools.cycle(self._sizes):
            yield [next(blocks) for _ in range(size)] or [self._empty]


def nothing_predicted(block: Block) -> Block:
    """Return the block without anything to predict."""
    return {**block, "labels": torch.full_like(block["labels"], IGNORED)}


def positions(state: Sequence[Mapping[str, Any]]) -> list[Position]:
    """Return the positions that `PackedBlocks.state` told."""
    return [Position(**told) for told in state]


def held_out_blocks(split: Split, layout: Layout, *, limit: int) -> list[Block]:
    """Return up to ``limit`` blocks of held-out text.

    Raises:
        ArgumentValueError: the held-out text is shorter than one block.
    """
    pieces = split.held_out_pieces()
    stream = layout.stream(lambda _: pieces, epochs=1)
    blocks = [block for block, _ in zip(stream, range(limit), strict=False)]
    if not blocks:
        hint = "Give more text with --data, or lower --seq-len."
        raise ArgumentValueError(message("data", f"held-out text of {layout.seq_len} tokens or more", "less", hint))
    return blocks
