"""Time, peak memory and errors of the contrastive loss of Q queries among K keys, forward and backward.

    python benchmarks/contrastive.py --shape 65536,1024,65536

From normalised embeddings, in-batch and with a mask of 1% of the keys. cached-mnrl is the loss step of
sentence-transformers' CachedMultipleNegativesRankingLoss, in its mini-batches of 32 queries and in larger ones.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from script import main
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide import linear_contrastive
from lowtide.bench.case import ROWS, Case, Function, Values, blocks, loss_case, measure_cases
from lowtide.bench.harness import Peer, Run, by_name, compiled
from lowtide.bench.settings import Shape, ShapeSettings, setting, shape_setting
from lowtide.errors import UnsupportedError

TEMPERATURE = 0.05  # sentence-transformers' scale of 20
LIKENESS = 0.5  # cosine of a query and its key: at that temperature among 65,536 keys a loss of about 1 to 2
MASKED = 0.01  # share of the keys that a mask leaves out
NAMED = {"batch-64k": (65536, 1024, 65536), "batch-16k": (16384, 768, 16384)}
WORKS = ("in-batch", "masked")


@dataclass(frozen=True, kw_only=True)
class ContrastiveCase(Case):
    """The mean loss of queries whose positive is the key of the same number, and both sides' gradients."""

    mask: Tensor | None

    def call(self, function: Function) -> Values:
        return (function(self.x, self.w),)

    def values_of(self, z: Tensor, rows: slice) -> Values:
        return (loss_of(z, self.y[rows], None if self.mask is None else self.mask[rows], "none"),)


def loss_of(similarities: Tensor, y: Tensor, mask: Tensor | None, reduction: str = "mean") -> Tensor:
    """Return the loss of all similarities [n, K], which are not divided by the temperature yet."""
    z = similarities / TEMPERATURE
    return F.cross_entropy(z if mask is None else z.masked_fill(mask, -torch.inf), y, reduction=reduction)


def cases(run: Run, shape: Shape) -> Iterator[ContrastiveCase]:
    """Yield the requested works on random queries [Q, D] and keys [K, D], each key like the query of its number."""
    generator = torch.Generator(run.device).manual_seed(0)
    x, w = (torch.randn(rows, shape.D, device=run.device, generator=generator) for rows in (shape.N, shape.V))
    both = min(shape.N, shape.V)
    w[:both].mul_((1 - LIKENESS**2) ** 0.5).add_(x[:both], alpha=LIKENESS)
    x, w = (F.normalize(t).to(run.dtype) for t in (x, w))
    y = torch.arange(shape.N, device=run.device)
    batch = loss_case(shape, x, w, y)
    for work in run.config.work or WORKS:
        mask = None
        if work == "masked":
            mask = torch.empty(shape.N, shape.V, device=run.device, dtype=torch.bool)
            for rows in blocks(shape.N, ROWS):
                mask[rows] = torch.rand(mask[rows].shape, device=run.device, generator=generator) < MASKED
            mask.fill_diagonal_(False)

        name = f"InfoNCE, {work}, forward and backward"
        yield ContrastiveCase(**{**vars(batch), "name": name, "mask": mask})


def _naive(x: Tensor, w: Tensor, y: Tensor, mask: Tensor | None, reduction: str = "mean") -> Tensor:
    return loss_of((x @ w.T).float(), y, mask, reduction)


def _checkpointed(case: ContrastiveCase) -> Function:
    y, mask = case.y, case.mask

    def loss(x: Tensor, w: Tensor) -> Tensor:
        parts = [
            checkpoint(_naive, x[rows], w, y[rows], None if mask is None else mask[rows], "sum", use_reentrant=False)
            for rows in blocks(len(x), ROWS)
        ]
        return torch.stack(parts).sum() / len(x)

    return loss


def _cached(mini_batch_size: int, case: ContrastiveCase) -> Function:
    """Return the second step of `CachedMultipleNegativesRankingLoss`, which computes loss and gradients at once."""
    if case.mask is not None:
        raise UnsupportedError("has no mask")
    losses: Any = importlib.import_module("sentence_transformers.losses")
    util: Any = importlib.import_module("sentence_transformers.util")
    settings = {"scale": 1 / TEMPERATURE, "similarity_fct": util.dot_score, "mini_batch_size": mini_batch_size}
    module = losses.CachedMultipleNegativesRankingLoss([None], **settings)  # its model makes the embeddings

    def loss(x: Tensor, w: Tensor) -> Tensor:
        value: Tensor = module.calculate_loss([[x], [w]], with_backward=True)
        return value.detach().requires_grad_()  # as its forward does

    return loss


PEERS = by_name(
    Peer("lowtide", lambda case: partial(linear_contrastive, temperature=TEMPERATURE, mask=case.mask)),
    Peer("naive", lambda case: partial(_naive, y=case.y, mask=case.mask)),
    Peer("compile", lambda case: partial(compiled(_naive), y=case.y, mask=case.mask)),
    Peer("checkpoint", _checkpointed),  # naive in chunks of 1024 queries, recomputed in backward
    Peer("cached-mnrl", partial(_cached, 32), "sentence-transformers"),
    Peer("cached-mnrl-1024", partial(_cached, 1024), "sentence-transformers"),
)


@dataclass(frozen=True, kw_only=True)
class ContrastiveConfig(ShapeSettings):
    benchmark = "contrastive"
    shape: tuple[str, ...] = shape_setting("batch-64k", shapes=NAMED)
    only: tuple[str, ...] = setting((), "measure these alone", metavar="PEER", names=PEERS)
    work: tuple[str, ...] = setting((), "these tables alone", metavar="WORK", names=WORKS)


measure = partial(measure_cases, cases=cases)


if __name__ == "__main__":
    sys.exit(main(measure, ContrastiveConfig, __doc__, PEERS))
