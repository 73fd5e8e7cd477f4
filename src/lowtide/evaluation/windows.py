"""Documents as windows of tokens: what a model is given at a time, and which tokens of it are scored.

Of a document every token is scored once. The first one is predicted from a beginning-of-sequence token, the first of a
window from the token before it, as in lm-evaluation-harness; with a stride below the window's length each has more of
the document before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.train.tokens import IGNORED

_SORTED = 32  # batches of windows that are sorted by length, so that those of a batch have little padding


@dataclass(frozen=True)
class Document:
    """A text of which ``text`` is scored, given ``context`` before it."""

    text: str
    context: str = ""


@dataclass(frozen=True)
class Window:
    """Tokens of a document, of which the last ``scored`` are predicted, each from those before it."""

    ids: tuple[int, ...]
    scored: int


def document_of(row: Mapping[str, Any], tokenizer: Any) -> Document:
    """Return a row of `load_rows` as a document: conversations by the chat template, completions behind their prompts.

    Args:
        row: of one of the kinds that `load_rows` returns.
        tokenizer: of transformers.
    """
    if "text" in row:
        return Document(row["text"])
    if "messages" in row:
        return Document(_templated(row["messages"], row, tokenizer))
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        return Document(completion, prompt)
    context = _templated(prompt, row, tokenizer, add_generation_prompt=True)
    whole = _templated([*prompt, *completion], row, tokenizer)
    text = whole.removeprefix(context)
    return Document(text, context if text != whole else "")


def _templated(messages: list[Any], row: Mapping[str, Any], tokenizer: Any, **more: Any) -> str:
    tools = json.loads(row["tools"]) if row.get("tools") else None
    kwargs = row.get("chat_template_kwargs") or {}
    text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs, **more))
    return text.removeprefix(tokenizer.bos_token or "")  # every window's first document has it before it


class Windows:
    """The windows of documents, and counts of what went through so far.

    Args:
        documents: in their order.
        tokenizer: of transformers, with an end-of-text token.
        seq_len: the most tokens that the model is given at a time.
        stride: the most that a window scores.
        pack: join the documents to one sequence, an end-of-text token behind each.

    Attributes:
        documents: how many were read.
        bytes: of the scored text in UTF-8.
    """

    def __init__(self, documents: Iterable[Document], tokenizer: Any, *, seq_len: int, stride: int, pack: bool) -> None:
        self.documents = self.bytes = 0
        self._source, self._tokenizer, self._pack = documents, tokenizer, pack
        self._seq_len, self._stride = seq_len, stride
        bos: int | None = tokenizer.bos_token_id
        self._first: int = tokenizer.eos_token_id if bos is None else bos

    def __iter__(self) -> Iterator[Window]:
        if self._pack:
            yield from self._packed()
            return
        for document in self._read():
            context, text = self._ids(document.context), self._ids(document.text)
            ids = [self._first, *context, *text]
            yield from self._cut(ids, 1 + len(context))

    def _read(self) -> Iterator[Document]:
        for document in self._source:
            self.documents += 1
            self.bytes += len(document.text.encode(errors="surrogatepass"))
            yield document

    def _packed(self) -> Iterator[Window]:
        """Yield windows of all documents in one sequence, of which a few windows are held at a time."""
        held, first = [self._first], 1  # of the sequence, and which of these is the next to be scored
        for document in self._read():
            self.bytes += len(document.context.encode(errors="surrogatepass"))  # which is scored too
            held += [*self._ids(document.context + document.text), self._tokenizer.eos_token_id]
            while len(held) - first >= self._stride:
                end = first + self._stride
                begin = max(0, end - 1 - self._seq_len)
                yield Window(tuple(held[begin:end]), self._stride)
                gone = max(0, end - self._seq_len)
                held, first = held[gone:], end - gone
        yield from self._cut(held, first)

    def _cut(self, ids: list[int], first: int) -> Iterator[Window]:
        for begin in range(first, len(ids), self._stride):
            end = min(begin + self._stride, len(ids))
            yield Window(tuple(ids[max(0, end - 1 - self._seq_len) : end]), end - begin)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


@dataclass(frozen=True)
class Batch:
    """Windows, padded on the right: int64 [B, T] each."""

    input_ids: Tensor
    attention_mask: Tensor
    targets: Tensor  # `IGNORED` where nothing is scored


def batches(windows: Iterable[Window], size: int) -> Iterator[Batch]:
    """Yield batches of ``size`` windows; of some batches at a time the windows are sorted by their length."""
    held: list[Window] = []
    for window in windows:
        held.append(window)
        if len(held) == size * _SORTED:
            yield from _sorted(held, size)
            held = []
    yield from _sorted(held, size)


def _sorted(windows: list[Window], size: int) -> Iterator[Batch]:
    windows = sorted(windows, key=lambda window: -len(window.ids))
    for begin in range(0, len(windows), size):
        yield _padded(windows[begin : begin + size])


def _padded(windows: list[Window]) -> Batch:
    T = max(len(window.ids) for window in windows) - 1
    ids = torch.zeros(len(windows), T, dtype=torch.int64)
    mask, targets = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, window in enumerate(windows):
        n = len(window.ids) - 1
        ids[row, :n], mask[row, :n] = torch.tensor(window.ids[:-1]), 1
        targets[row, n - window.scored : n] = torch.tensor(window.ids[-window.scored :])
    return Batch(ids, mask, targets)
