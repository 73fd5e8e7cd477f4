"""Token statistics without a chunk's logits: a GEMM whose tiles write sums, and one that writes a gradient.

n rows, C rows of a chunk, D hidden size, V vocabulary, K targets a token. The kernels: `kernels.stats`.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import Gradients, Head
from lowtide.head.exponentials.losses import Chunk, Exponentials
from lowtide.head.kernels import hopper, stats
from lowtide.head.kernels.exp_logits import ExpRows
from lowtide.head.kernels.gemm import gemm_tiles
from lowtide.head.plan import HeadPlan, padded
from lowtide.head.rows import Rows
from lowtide.head.terms.statistics import Upstream, entries_of, sum_of_equal


class TileStatistics(Exponentials):
    """Statistics of each row's logits, in either direction: a loss's sums by the loss's code, and sums of their own.

    ``y_nK`` are int64 classes of the whole vocabulary, all valid.
    """

    def __init__(self, head: Head, y_nK: Tensor, plan: HeadPlan, tokens: Rows) -> None:
        super().__init__(head, plan, tokens)
        self.y_nK, self.first_class = y_nK, head.ranks.first

    def forward(self, want: frozenset[str], topk: int, first_n: Tensor | None = None) -> dict[str, Tensor]:
        """Return each row's "lse", "argmax", "top_logprob", "logprob" [n, K], and what is requested, float32.

        Classes are int64; with ``topk`` "topk_values" and "topk_ids" are [n, topk]. Of tokens that are not used all
        are 0. ``first_n`` are the first targets, int32 and -1 where ignored: their log-probability is minus the loss of
        `losses.CrossEntropy`, bit for bit. None: of no target, or across ranks.
        """
        self.topk, self.want, n = topk, [name for name in stats.WANTED if name in want], len(self.y_nK)
        rows = min(self.plan.chunk_rows, self.plan.rows)
        self.sums, *planes = self.new(4 + len(self.want), rows, self.tiles)
        self.planes_of_tiles = stats.planes_of(planes, self.want)
        self.y_nK, self.of_loss = self.y_nK.contiguous(), self.new(4, padded(n))[:, :n]
        self.has_loss, self.y_n = first_n is not None, self.y_nK.new_empty(n).int() if first_n is None else first_n
        found = self.room_of_numbers(n)
        self.find(rows, found)
        return found

    def room_of_numbers(self, n: int) -> dict[str, Tensor]:
        """Return memory for the numbers of n rows."""
        x = self.head.input
        new: Any = x.new_empty if self.count is None and self.width else x.new_zeros
        found = {name: new(n, dtype=torch.float32) for name in ("lse", "top_logprob", *self.want)}
        found |= {"argmax": new(n, dtype=torch.int64), "logprob": new(self.y_nK[:n].shape, dtype=torch.float32)}
        if self.topk:
            found["topk_values"] = self.new(n, self.topk).fill_(-torch.inf)  # a rank may have fewer classes
            found["topk_ids"] = self.y_nK.new_zeros(n, self.topk)
        return found

    def find(self, rows: int, found: dict[str, Tensor]) -> None:
        """Write all rows' statistics, so many rows at a time."""
        for chunk in self.chunks(rows):
            self.find_here(chunk, {name: x[chunk.part] for name, x in found.items()})
            del chunk  # before the next is made

    def find_here(self, chunk: Chunk, found: dict[str, Tensor]) -> None:
        """Write some rows' statistics, of the classes here."""
        C, operands, transform = len(chunk.x_CD), (chunk.x_CD, self.weight_VD), self.transform
        self.make_numbers(chunk, self.of_loss)  # without a loss nothing reads them
        planes, sums = {name: x[:C] for name, x in self.planes_of_tiles.items()}, None
        if self.has_loss:
            self.write_target_logits(chunk)
            chunk.sums = sums = self.sums[:C]
        reference = chunk.rows.target_logit
        chunk.entries = ExpRows(reference, chunk.y_C, None, 0, sums, self.tiles, **planes)
        self.write_exponentials(chunk, self.weight_VD, None, chunk.entries, transform)
        if self.has_loss:
            self.finish(chunk)
        stats.merge_stats(
            chunk.entries, stats.RowStats(**{name: x for name, x in found.items() if name in stats.RowStats._fields}),
            self.y_nK[chunk.part], *operands, transform=transform, first_class=self.first_class,
            vocab=self.head.ranks.vocab, used=self.used(chunk.part),
            first=(chunk.y_C, chunk.rows.loss) if self.has_loss else (None, None),
        )  # fmt: skip
        if self.topk:
            k = min(self.topk, self.width)
            values, ids = stats.highest_logits(*operands, planes["top"], k, transform)
            found["topk_values"][:, :k], found["topk_ids"][:, :k] = values, ids.add_(self.first_class)

    def gradients(self, known: dict[str, Tensor], g: Upstream, into: Gradients) -> None:
        """Add the gradients, from what `forward` returned and upstream ones, that of "logprob" 0 where ignored."""
        self.gradient = gradient_of(self.head, self.y_nK, known, g)
        self.recompute(into)

    def prepare(self, chunk: Chunk, scaled_CD: Tensor | None) -> None:
        """See `Exponentials.prepare`."""
        of_row = chunk.entries = self.gradient.rows(chunk.part)
        chunk.of_input = of_row.s, of_row.id[:, 1:], of_row.rest
        if scaled_CD is not None:
            scaled_CD.copy_(chunk.x_CD).masked_fill_((of_row.s == 0)[:, None], 0)  # whatever x holds

    def fill(self, chunk: Chunk, w_BD: Tensor, e_CB: Tensor, block: slice) -> None:
        """See `Exponentials.fill`."""
        transform, used = self.transform.of_classes(block), self.used(chunk.part)
        if self.hopper:
            hopper.gradient_hopper(chunk.x_CD, w_BD, e_CB, chunk.entries, used)
        else:
            gemm_tiles(stats.gradient_tile, chunk.x_CD, w_BD, e_CB, chunk.entries, transform, used=used)
        stats.put_entries(e_CB, chunk.entries, self.first_class + block.start, used)


def gradient_of(head: Head, y_nK: Tensor, known: dict[str, Tensor], g: Upstream) -> stats.Gradient:
    """Return what the logits' gradient is made of, by known numbers and upstream gradients.

    Rows to which nothing flows back have s = 0, the others 1.
    """
    s = (g.largest(head.ranks.vocab) != 0).float()
    if head.scale is not None:
        g = g.of(head.scale.mul)
    ids, entry, slope = entries_of(y_nK, known["argmax"], known, g)
    even = None if g.mean_logit is None else g.mean_logit / head.ranks.vocab
    if even is not None:
        entry += even[:, None]
    if head.softcap is not None:
        logprobs = torch.cat((known["top_logprob"][:, None], known["logprob"]), 1)
        entry *= 1 - ((logprobs + known["lse"][:, None]) / head.softcap).square()
    ids = ids.masked_fill((s == 0)[:, None], -1).int()
    rounded = entry.to(head.dtype)
    rest = (entry - rounded)[:, 1:].where(ids[:, 1:] >= 0, 0)
    if rest.shape[1] > 1:  # a class that is there twice has it twice
        rest = rest / sum_of_equal(y_nK, y_nK, torch.ones_like(rest))
    slope = torch.zeros_like(s[:, None]) + slope
    return stats.Gradient(s, known["lse"].contiguous(), slope, g.entropy, even, ids, rounded, rest.contiguous())
