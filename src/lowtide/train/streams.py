"""Documents into blocks of tokens, from any position on: the position is a few numbers, and nothing is read twice.

Text runs on through blocks without padding: a block ends exactly where the next one begins. Conversations are not cut:
they are read a group of blocks at a time, each put where it leaves the least room, and what stays empty is padding.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowtide.errors import ArgumentValueError, message

IGNORED = -100  # the label of a token that is not to be predicted, as torch has it
GROUP = 16  # blocks' worth of conversations that are laid out together: some 3% of the tokens are padding then

Block = dict[str, Tensor]


@dataclass(frozen=True)
class Document:
    """One text, or one conversation.

    Attributes:
        ids: its tokens; none: it is left out.
        labels: for each, what is to be predicted there: itself or `IGNORED`; None: all of them.
        cut: it was longer.
    """

    ids: array[int]
    labels: array[int] | None = None
    cut: bool = False


Read = Callable[[int], Iterator[Document]]


@dataclass(frozen=True)
class Position:
    """Where a stream's next block begins.

    Attributes:
        epoch: the pass over its pieces.
        piece: the piece of that pass.
        token: the token of that piece; where conversations are laid out in groups, the group's first.
        block: the block of that group.
        seen: conversations read before the group.
        cut: of these, how many were too long and cut.
        left_out: of these, how many were left out.
    """

    epoch: int = 0
    piece: int = 0
    token: int = 0
    block: int = 0
    seen: int = 0
    cut: int = 0
    left_out: int = 0


START = Position()


class Stream:
    """Blocks of ``seq_len`` tokens of running text from one share of the pieces, epoch after epoch.

    Args:
        read: the documents of a piece, given its number.
        order: the pieces of an epoch, given its number.
        seq_len: tokens of a block.
        packing: "joined": a block is one text; "separate": its documents know nothing of each other; "none": there is
            one document in each, and padding behind it. A document longer than the block goes on in the next.
        pad: the token of padding.
        position: where to begin.
        epochs: how many epochs to read; None: without end.
    """

    def __init__(
        self,
        read: Read,
        order: Callable[[int], Sequence[int]],
        *,
        seq_len: int,
        packing: str = "joined",
        pad: int = 0,
        position: Position = START,
        epochs: int | None = None,
    ) -> None:
        self.position = self.read_to = position
        self._read, self._order = read, order
        self._seq_len, self._packing, self._pad, self._epochs = seq_len, packing, pad, epochs

    def __iter__(self) -> Iterator[Block]:
        """Yield blocks; `position` is then where the next one begins."""
        block = self._open()
        for at, document in self._documents():
            used = 0
            while used < len(document.ids):
                used += block.take(document, used)
                ends = self._packing == "none" and used == len(document.ids)
                if block.room == 0 or ends:
                    self.position = self.read_to = replace(at, token=at.token + used)
                    yield block.close(self._pad)
                    block = self._open()

    def _open(self) -> _Open:
        return _Open(self._seq_len, separate=self._packing == "separate")

    def _documents(self) -> Iterator[tuple[Position, Document]]:
        """Yield each document from the position on, with the position of its first token."""
        epoch, first, skip = self.position.epoch, self.position.piece, self.position.token
        while self._epochs is None or epoch < self._epochs:
            any_token = False
            for piece, number in list(enumerate(self._order(epoch)))[first:]:
                seen = 0
                for document in self._read(number):
                    any_token = any_token or len(document.ids) > 0
                    end = seen + len(document.ids)
                    if end > skip or (not document.ids and seen == skip):
                        begin = max(0, skip - seen)
                        yield Position(epoch, piece, seen + begin), _from(document, begin)
                    seen = end
                skip = 0
            if not any_token and first == 0:
                hint = (
                    "Documents are empty, or so few and long that a part has none; of conversations, no turn of the "
                    "assistant is within --seq-len tokens: give other files with --data, or raise it."
                )
                raise ArgumentValueError(
                    message("data", "something to train on in every part of the corpus", "none in one", hint)
                )
            epoch, first = epoch + 1, 0


class WholeStream(Stream):
    """Blocks of whole documents, none of which is longer than a block, padding behind them.

    Documents are read until they would fill `GROUP` blocks, then laid out together, the longest first, each where it
    leaves the least room ("none": each in a block of its own).
    """

    def __iter__(self) -> Iterator[Block]:
        """Yield blocks; `position` is then where the next one begins, `read_to` how far documents were read."""
        begin, skip = replace(self.position, block=0), self.position.block
        group, size = list[Document](), 0
        self.read_to = begin
        for at, document in self._documents():
            before = self.read_to
            self.read_to = replace(
                at,
                token=at.token + len(document.ids),
                seen=before.seen + 1,
                cut=before.cut + (document.cut and len(document.ids) > 0),
                left_out=before.left_out + (not document.ids),
            )
            if document.ids:
                group.append(document)
                size += len(document.ids)
            if size >= GROUP * self._seq_len:
                yield from self._lay_out(group, begin, skip)
                begin, skip, group, size = self.read_to, 0, [], 0
        if group:
            yield from self._lay_out(group, begin, skip)

    def _lay_out(self, group: Sequence[Document], begin: Position, skip: int) -> Iterator[Block]:
        """Yield a group's blocks but the first ``skip``."""
        if self._packing == "none":
            blocks = [[number] for number in range(len(group))]
        else:
            blocks = best_fit([len(document.ids) for document in group], self._seq_len)
        for number, members in enumerate(blocks, start=1):
            if number <= skip:
                continue
            block = self._open()
            for member in members:
                block.take(group[member], 0)
            self.position = self.read_to if number == len(blocks) else replace(begin, block=number)
            yield block.close(self._pad)


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Return which go together so that none holds more than ``room``: the longest first, each where it fits best."""
    bins: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = [(left, number) for number, (left, _) in enumerate(bins) if left >= sizes[index]]
        if fitting:
            left, number = min(fitting)
            bins[number][1].append(index)
            bins[number] = (left - sizes[index], bins[number][1])
        else:
            bins.append((room - sizes[index], [index]))
    return sorted(sorted(members) for _, members in bins)


class _Open:
    """A block that is being filled."""

    def __init__(self, seq_len: int, *, separate: bool) -> None:
        self._seq_len, self._separate = seq_len, separate
        self._ids, self._labels, self._starts = array("q"), array("q"), [0]

    @property
    def room(self) -> int:
        """Tokens that it can still take."""
        return self._seq_len - len(self._ids)

    def take(self, document: Document, first: int) -> int:
        """Take a document's tokens from ``first`` on, as many as there is room for, and return how many."""
        count = min(self.room, len(document.ids) - first)
        labels = document.ids if document.labels is None else document.labels
        if self._separate and self._ids:
            self._starts.append(len(self._ids))
        self._ids.extend(document.ids[first : first + count])
        self._labels.extend(labels[first : first + count])
        return count

    def close(self, pad: int) -> Block:
        """Return ``input_ids``, ``labels`` and, where documents are separate, ``position_ids``, int64 [seq_len].

        The first token of a document has nothing before it to be predicted from: its label is ignored. Padding comes
        last, where nothing looks at it; among separate documents it is one more.
        """
        if padding := self.room:
            if self._separate:
                self._starts.append(len(self._ids))
            self._ids.extend([pad] * padding)
            self._labels.extend([IGNORED] * padding)
        labels = torch.tensor(self._labels, dtype=torch.int64)
        labels[self._starts] = IGNORED
        block = {"input_ids": torch.tensor(self._ids, dtype=torch.int64), "labels": labels}
        if self._separate:
            lengths = torch.diff(torch.tensor([*self._starts, self._seq_len]))
            offsets = torch.tensor(self._starts).repeat_interleave(lengths)
            block["position_ids"] = torch.arange(self._seq_len) - offsets
        return block


def _from(document: Document, first: int) -> Document:
    if first == 0:
        return document
    labels = document.labels
    return replace(document, ids=document.ids[first:], labels=None if labels is None else labels[first:])
