"""Ranks with tokens of their own: DDP, FSDP2, sharded sequences, and ranks that have no token."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from distributed.fsdp_cases import shard
from distributed.launch import DEVICE, SEED, main
from distributed.models import VOCAB, Functional, gradients, model_of, same, same_mean
from lowtide.distributed import count_items, shift_labels
from lowtide.errors import ArgumentTypeError, ArgumentValueError

D = 8


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return each rank's batch for each step, in a row: other numbers of labels on each, on the last one none."""
    found = []
    for k in range(count):
        g = torch.Generator().manual_seed(k + SEED)
        ids = torch.randint(0, VOCAB, (2, 9), generator=g)
        labels = ids.where(torch.rand(2, 9, generator=g) > 0.1 + 0.3 * (k % 3), -100)
        labels = labels if k < count - 1 else torch.full_like(ids, -100)
        found.append((ids.to(DEVICE), labels.to(DEVICE)))
    return found


def joined(several: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(parts) for parts in zip(*several, strict=True))


def pair(gradient: Any, **settings: Any) -> tuple[Any, Any]:
    """Return a model with the loss in its head, and the stock model alone."""
    model = model_of(**settings)
    return Functional(copy.deepcopy(model), "inside", lowtide.HeadOptions(gradient=gradient)), Functional(
        model, "stock"
    )


def ddp() -> None:
    """One hook a parameter and step, a static graph, accumulation, tied and checkpointed: as one process on all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everything = batches(2 * ranks)
    for tied, gradient, static in ((True, "forward", True), (False, "recompute", False), (True, "recompute", False)):
        model, alone = pair(gradient, tie_word_embeddings=tied)
        if gradient == "recompute":
            score = functools.partial(torch.utils.checkpoint.checkpoint, model.lm_head.forward, use_reentrant=False)
            model.lm_head.forward = score
        engine = DistributedDataParallel(model, static_graph=static)
        mine = everything[rank::ranks]
        hooked: Counter[str] = Counter()
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name, hooked=hooked: hooked.update([name]))
        items = count_items(torch.cat([labels[:, 1:] for _, labels in mine]))
        for _ in range(2):
            alone(*joined(everything)).loss.backward()
            if static:  # a static graph synchronises in every backward: one batch of both
                engine(*joined(mine), items).loss.backward()
            else:
                with engine.no_sync():
                    engine(*mine[0], items).loss.backward()
                engine(*mine[1], items).loss.backward()
            same(gradients(engine), gradients(alone), (tied, gradient, static))
        assert set(hooked.values()) == {2 if static else 4}, hooked


def no_tokens() -> None:
    """A rank whose labels are all ignored, or whose head gets no token, blocks no other rank and adds nothing."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everything = batches(ranks)
    for wrap, gradient, empty in (
        (DistributedDataParallel, "recompute", True),
        (DistributedDataParallel, "forward", False),
        (shard, "forward", True),
        (shard, "recompute", False),
    ):
        model, alone = pair(gradient)
        engine: Any = wrap(model)
        ids, labels = everything[rank]
        if empty and rank == ranks - 1:
            labels = labels[:0]
        loss = engine(ids, labels, count_items(labels[:, 1:])).loss
        assert (loss == 0) == (rank == ranks - 1)
        loss.backward()
        want = alone(*joined(everything)).loss
        want.backward()
        same(gradients(engine), gradients(alone), (gradient, empty))
        same_mean(loss, want)


def sequence_in_parts() -> None:
    """Each rank a part of every sequence, of any length: labels shifted across the cuts, one mean over all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for lengths, leading in itertools.product(itertools.product((0, 1, 3), repeat=ranks), ((2,), (), (2, 0))):
        labels = torch.randint(0, VOCAB, (*leading, sum(lengths)), device=DEVICE)
        dist.broadcast(labels, 0)
        got = shift_labels(labels.split(lengths, -1)[rank], ignore_index=-7)
        whole = torch.cat((labels, torch.full_like(labels[..., :1], -7)), -1)[..., 1:]
        if sum(lengths):
            assert torch.equal(got, whole.split(lengths, -1)[rank]), (lengths, leading)
        assert got.shape == labels.split(lengths, -1)[rank].shape
    x, w = torch.randn(3, 13, D, device=DEVICE), torch.randn(VOCAB, D, device=DEVICE, requires_grad=True)
    labels = torch.randint(0, VOCAB, (3, 13), device=DEVICE)
    labels[:, ::3] = -100
    lengths = [4, 1, 6, 2][: ranks - 1]
    lengths.append(13 - sum(lengths))
    mine, shifted = x.split(lengths, 1)[rank], shift_labels(labels.split(lengths, 1)[rank])
    loss = lowtide.linear_cross_entropy(mine, w, shifted, num_items=count_items(shifted))
    (grad,) = torch.autograd.grad(loss, w)
    want = nn.functional.cross_entropy((x @ w.T)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    same_mean(loss, want)
    same_mean(grad, torch.autograd.grad(want, w)[0])
    assert count_items(shifted, averaged=False) == (labels[:, 1:] != -100).sum()
    assert count_items(torch.full_like(shifted, -100), averaged=False) == 1
    with pytest.raises(ArgumentValueError, match="labels: expected shape"):
        shift_labels(torch.tensor(3))
    with pytest.raises(ArgumentTypeError, match="target: expected class indices"):
        count_items(torch.rand(3))


if __name__ == "__main__":
    main(vars())
