"""Ranks with tokens of their own: DDP, FSDP2, sharded sequences, and ranks that have no token."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import lowtide
from distributed.launch import DEVICE, main
from distributed.mesh_cases import VOCAB, Causal, D, Head, plain_loss
from distributed.models import gradients, same, same_mean
from lowtide.distributed import count_items, shift_labels
from lowtide.errors import ArgumentTypeError, ArgumentValueError
from lowtide.measure.timing import peak_above


def model_of(gradient: Any, *, tied: bool = False, again: bool = False) -> Any:
    torch.manual_seed(3)
    model = Causal(Head(gradient, sequence=False), again=again)
    if tied:
        model.lm_head.weight = model.embed.weight
    return model.to(DEVICE)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return each rank's batch for each step, in a row: other numbers of labels on each, on the last one none."""
    found = []
    for k in range(count):
        g = torch.Generator().manual_seed(k)
        ids = torch.randint(0, VOCAB, (2, 9), generator=g)
        labels = ids.where(torch.rand(2, 9, generator=g) > 0.1 + 0.3 * (k % 3), -100)
        labels = labels if k < count - 1 else torch.full_like(ids, -100)
        found.append((ids.to(DEVICE), labels.to(DEVICE)))
    return found


def ddp() -> None:
    """One hook a parameter and step, a static graph, accumulation, tied and checkpointed: as one process on all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everything = batches(2 * ranks)
    ways = itertools.product((True, False), ("forward", "recompute"), (True, False), (False, True))
    for tied, gradient, static, again in ways:
        model = model_of(gradient, tied=tied, again=again)
        alone = copy.deepcopy(model)
        engine = DistributedDataParallel(model, static_graph=static)
        mine = everything[rank::ranks]
        hooked: Counter[str] = Counter()
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name, hooked=hooked: hooked.update([name]))
        items = count_items(torch.cat([labels[:, 1:] for _, labels in mine]))
        for _ in range(2):
            plain_loss(alone, *(torch.cat(parts) for parts in zip(*everything, strict=True)))
            want = gradients(alone)
            if static:  # a static graph synchronises in every backward: one batch of both
                engine(*(torch.cat(parts) for parts in zip(*mine, strict=True)), items)[0].backward()
            else:
                with engine.no_sync():
                    engine(*mine[0], items)[0].backward()
                engine(*mine[1], items)[0].backward()
            same(gradients(engine), want, (tied, gradient, static, again))
        passes = 2 if static else 4
        assert set(hooked.values()) == {passes}, hooked


def no_tokens() -> None:
    """A rank whose labels are all ignored, or whose batch is empty, blocks no other rank and adds nothing."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everything = batches(ranks)
    for engine_name, gradient, empty in itertools.product(("ddp", "fsdp"), ("forward", "recompute"), (False, True)):
        model = model_of(gradient)
        alone = copy.deepcopy(model)
        if engine_name == "ddp":
            engine: Any = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh(DEVICE, (ranks,))
            engine = fully_shard(model, mesh=mesh)
        ids, labels = everything[rank]
        if empty and rank == ranks - 1:
            ids, labels = ids[:0], labels[:0]
        loss, _ = engine(ids, labels, count_items(labels[:, 1:]))
        assert (loss == 0) == (rank == ranks - 1)
        loss.backward()
        want = plain_loss(alone, *(torch.cat(parts) for parts in zip(*everything, strict=True)))
        same(gradients(engine), gradients(alone), (engine_name, gradient, empty))
        same_mean(loss, want)


def sequence_in_parts() -> None:
    """Each rank a part of every sequence, of its own length: labels shifted across the cuts, one mean over all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(5)
    lengths = [4, 1, 6, 2][:ranks]
    ids = torch.randint(0, VOCAB, (3, sum(lengths)), generator=g)
    labels = ids.where(torch.rand(ids.shape, generator=g) > 0.3, -100).to(DEVICE)
    ids = ids.to(DEVICE)
    mine, of_labels = (x.split(lengths, 1)[rank] for x in (ids, labels))
    shifted = shift_labels(of_labels)
    whole = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], -100)), 1)
    assert torch.equal(shifted, whole.split(lengths, 1)[rank])
    model = model_of("auto", tied=True)
    alone = copy.deepcopy(model)
    engine = DistributedDataParallel(model)
    loss, _ = engine(mine, shifted, count_items(shifted), shift=False)
    loss.backward()
    want = plain_loss(alone, ids, labels)
    same(gradients(engine), gradients(alone))
    same_mean(loss, want)
    assert count_items(shifted, averaged=False) == (whole != -100).sum()
    assert count_items(torch.full_like(mine, -100), averaged=False) == 1
    assert count_items(mine[:0]).dtype == torch.float32
    with pytest.raises(ArgumentValueError, match="labels: expected shape"):
        shift_labels(torch.tensor(3))
    with pytest.raises(ArgumentTypeError, match="target: expected class indices"):
        count_items(torch.rand(3))


def parts_without_positions() -> None:
    """A rank whose part of the sequence is empty takes part in shifting as the others do, wherever it stands."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for lengths in itertools.product((0, 1, 3), repeat=ranks):
        for leading in ((2,), (), (2, 0)):
            g = torch.Generator().manual_seed(sum(lengths))
            labels = torch.randint(0, VOCAB, (*leading, sum(lengths)), generator=g).to(DEVICE)
            got = shift_labels(labels.split(lengths, -1)[rank], ignore_index=-7)
            whole = torch.cat((labels, torch.full_like(labels[..., :1], -7)), -1)[..., 1:]
            if sum(lengths):
                assert torch.equal(got, whole.split(lengths, -1)[rank]), (lengths, leading)
            assert got.shape == labels.split(lengths, -1)[rank].shape


class Last(nn.Module):
    """The last stage: what stands before the head. The head is used by the loss."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(D, D), nn.Linear(D, classes, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.body(hidden))


def pipeline() -> None:
    """One stage a rank, microbatches in GPipe's and in 1F1B's order; what the last one keeps between them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    classes, pieces = 4000, 6
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(2 * pieces, D, generator=g), torch.randint(0, classes, (2 * pieces,), generator=g)
    peaks = {}
    for schedule, gradient in itertools.product((ScheduleGPipe, Schedule1F1B), ("recompute", "forward")):
        torch.manual_seed(3)
        stages = [*(nn.Linear(D, D) for _ in range(ranks - 1)), Last(classes)]
        alone = copy.deepcopy(stages)
        mine: Any = stages[rank].to(DEVICE)

        def score(hidden: Tensor, labels: Tensor, head: Any = mine, gradient: str = gradient) -> Tensor:
            options = lowtide.HeadOptions(gradient=gradient, workspace_mib=0.1)
            return lowtide.linear_cross_entropy(hidden, head.head.weight, labels, num_items=len(y), options=options)

        stage = PipelineStage(mine, rank, ranks, torch.device(DEVICE, rank if DEVICE != "cpu" else None))
        run = schedule(stage, pieces, loss_fn=score, scale_grads=False)
        losses: list[Tensor] = []

        def step(run: Any = run, losses: list[Tensor] = losses) -> None:
            args = (x.to(DEVICE),) if rank == 0 else ()
            run.step(*args, **({"target": y.to(DEVICE), "losses": losses} if rank == ranks - 1 else {}))

        step()  # allocates what stays, such as cuBLAS's workspace
        mine.zero_grad()
        losses.clear()
        peaks[schedule.__name__, gradient] = peak_above(step, DEVICE)
        hidden = x
        for module in alone:
            hidden = module(hidden)
        want = nn.functional.cross_entropy(alone[-1].head(hidden), y)
        want.backward()
        if rank == ranks - 1:
            torch.testing.assert_close(torch.stack(losses).sum().cpu(), want.detach())
        for (name, p), q in zip(mine.named_parameters(), alone[rank].parameters(), strict=True):
            torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    if rank == ranks - 1:
        weight = classes * D * 4
        assert peaks["ScheduleGPipe", "forward"] > pieces * weight
        assert peaks["ScheduleGPipe", "recompute"] < 3.5 * weight, "the gradient, what is added to it, and a chunk"


if __name__ == "__main__":
    main(vars())
