"""The benchmark of `linear_contrastive`: the loss of queries among keys, from embeddings that are there already.

N queries, V keys, D their size, in the words of the other benchmarks: queries are a head's hidden states, keys its
weight.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.bench.config import TokenBenchConfig
from lowtide.bench.harness import CannotError, Peer, Run, by_name, compiled
from lowtide.bench.problem import PLAIN, ROWS, Problem, Setting, blocks
from lowtide.bench.shapes import Shape
from lowtide.bench.task import Function, Task, Values, token_benchmark
from lowtide.bench.way import LOWTIDE
from lowtide.head.contrastive import linear_contrastive

TEMPERATURE = 0.05  # sentence-transformers' scale of 20
LIKENESS = 0.5  # cosine of a query and its key: at that temperature among 65,536 keys a loss of about 1 to 2
MASKED = 0.01  # share of the keys that a mask leaves out
WORKS = {"in-batch": "InfoNCE", "masked": "InfoNCE with a mask"}


@dataclass(frozen=True, kw_only=True)
class ContrastiveTask(Task):
    """The mean loss of queries whose positive is the key of the same number, and both sides' gradients."""

    mask: Tensor | None


def make_batch(shape: Shape, dtype: torch.dtype, device: str | torch.device, *, seed: int = 0) -> Problem:
    """Return random normalised queries and keys, each key similar to the query of its number."""
    generator = torch.Generator(device).manual_seed(seed)
    x, w = (torch.randn(rows, shape.D, device=device, generator=generator) for rows in (shape.N, shape.V))
    both = min(shape.N, shape.V)
    w[:both].mul_((1 - LIKENESS**2) ** 0.5).add_(x[:both], alpha=LIKENESS)
    x, w = (F.normalize(t).to(dtype) for t in (x, w))
    y = torch.arange(shape.N, device=device)
    return Problem(shape=shape, setting=PLAIN, dtype=dtype, x=x, w=w, y=y, g=torch.empty(0)).in_setting(PLAIN)


def random_mask(shape: Shape, device: str | torch.device, *, seed: int = 0) -> Tensor:
    """Return bool [N, V], True for a small share of the keys, and for no positive."""
    generator = torch.Generator(device).manual_seed(seed)
    mask = torch.empty(shape.N, shape.V, device=device, dtype=torch.bool)
    for rows in blocks(shape.N, ROWS):
        block = torch.rand(mask[rows].shape, device=device, generator=generator)
        mask[rows] = block < MASKED
    mask.fill_diagonal_(False)
    return mask


def loss_of(similarities: Tensor, y: Tensor, mask: Tensor | None, reduction: str = "mean") -> Tensor:
    """Return the loss of all similarities [n, V], which are not divided by the temperature yet."""
    z = similarities / TEMPERATURE
    return F.cross_entropy(z if mask is None else z.masked_fill(mask, -torch.inf), y, reduction=reduction)


def contrastive_task(batch: Problem, work: str, *, seed: int = 0) -> ContrastiveTask:
    """Return one of the `WORKS` on a batch."""
    head = batch.in_setting(Setting(name=f"{WORKS[work]}, forward and backward"))
    mask = random_mask(batch.shape, batch.device, seed=seed) if work == "masked" else None

    def values_of(z: Tensor, rows: slice) -> Values:
        return {"loss": loss_of(z, head.y[rows], None if mask is None else mask[rows], "none")}

    return ContrastiveTask(head=head, names=("loss",), upstream={"loss": head.g}, values_of=values_of, mask=mask)


def contrastive_tasks(run: Run[TokenBenchConfig], shape: Shape) -> Iterator[ContrastiveTask]:
    """Yield the requested works on one shape's random embeddings."""
    batch = make_batch(shape, run.dtype, run.device, seed=run.config.seed)
    for work in run.config.chosen("works"):
        yield contrastive_task(batch, work, seed=run.config.seed)


Contrastive = Callable[[Tensor, Tensor], Tensor]  # of queries and keys


def _naive(x: Tensor, w: Tensor, y: Tensor, mask: Tensor | None, reduction: str = "mean") -> Tensor:
    return loss_of((x @ w.T).float(), y, mask, reduction)


def _of_whole(task: ContrastiveTask, function: Callable[..., Tensor] = _naive) -> Contrastive:
    return partial(function, y=task.head.y, mask=task.mask)


def _checkpointed(task: ContrastiveTask) -> Contrastive:
    y, mask = task.head.y, task.mask

    def loss(x: Tensor, w: Tensor) -> Tensor:
        parts = [
            checkpoint(_naive, x[rows], w, y[rows], None if mask is None else mask[rows], "sum", use_reentrant=False)
            for rows in blocks(len(x), ROWS)
        ]
        return torch.stack(parts).sum() / len(x)

    return loss


def _cached(task: ContrastiveTask, mini_batch_size: int) -> Contrastive:
    """Return the second step of `CachedMultipleNegativesRankingLoss`, which computes loss and gradients at once."""
    if task.mask is not None:
        raise CannotError("has no mask")
    losses: Any = importlib.import_module("sentence_transformers.losses")
    util: Any = importlib.import_module("sentence_transformers.util")
    settings = {"scale": 1 / TEMPERATURE, "similarity_fct": util.dot_score, "mini_batch_size": mini_batch_size}
    module = losses.CachedMultipleNegativesRankingLoss([None], **settings)  # its model makes the embeddings

    def loss(x: Tensor, w: Tensor) -> Tensor:
        value: Tensor = module.calculate_loss([[x], [w]], with_backward=True)
        return value.detach().requires_grad_()  # as its forward does

    return loss


def _peer(name: str, make: Callable[[ContrastiveTask], Contrastive], package: str = "") -> Peer:
    def build(task: ContrastiveTask) -> Function:
        function = make(task)
        return lambda: {"loss": function(task.head.x, task.head.w)}

    return Peer(name, build, package)


CONTRASTIVE_PEERS = by_name(
    _peer(LOWTIDE, lambda task: partial(linear_contrastive, temperature=TEMPERATURE, mask=task.mask)),
    _peer("naive", _of_whole),
    _peer("compile", lambda task: _of_whole(task, compiled(_naive))),
    _peer("checkpoint", _checkpointed),  # naive in chunks of 1024 queries, recomputed in backward
    # in its mini-batches of 32 queries, and in larger ones
    _peer("cached-mnrl", partial(_cached, mini_batch_size=32), "sentence-transformers"),
    _peer("cached-mnrl-1024", partial(_cached, mini_batch_size=1024), "sentence-transformers"),
)
CONTRASTIVE = token_benchmark(contrastive_tasks, CONTRASTIVE_PEERS)
