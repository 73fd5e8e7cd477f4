"""Two axes of ranks: FSDP2 over one, the vocabulary sharded over the other, beside one process on the joined batch."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lowtide
from distributed.launch import DEVICE, main
from lowtide.distributed import count_items
from lowtide.errors import ArgumentValueError

VOCAB, D, T = 53, 8, 7  # neither a multiple of 2


class Model(nn.Module):
    """A body, whole on every rank of the vocabulary's axis, and a head that is in parts there."""

    def __init__(self, options: lowtide.HeadOptions, *, sequence: bool) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCAB, D), nn.Linear(D, D)
        self.head = nn.Linear(D, VOCAB)
        self.options, self.sequence, self.mesh = options, sequence, None

    def hidden(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        return hidden + torch.tanh(self.body(hidden))

    def forward(self, ids: Tensor, labels: Tensor, num_items: Tensor) -> Tensor:
        hidden: Any = self.hidden(ids)
        if self.mesh is not None:
            hidden = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        if self.sequence:
            hidden = hidden.redistribute(placements=[Shard(1)])
        loss: Any = lowtide.linear_cross_entropy(
            hidden, self.head.weight, labels, linear_bias=self.head.bias, shift=True, num_items=num_items,
            options=self.options,
        )  # fmt: skip
        return loss if self.mesh is None else loss.to_local()


def batch_of(stream: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(stream)
    ids = torch.randint(0, VOCAB, (2, T), generator=g)
    return ids.to(DEVICE), ids.where(torch.rand(ids.shape, generator=g) > 0.2 + 0.2 * stream, -100).to(DEVICE)


def fsdp_and_vocabulary() -> None:
    """Each pair of ranks that shares a head has tokens of its own: loss and gradients are those of all tokens."""
    mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    stream = mesh["dp"].get_local_rank()
    for i, (gradient, sequence) in enumerate(itertools.product(("forward", "recompute"), (False, True))):
        where = ("root", "own")[i % 2]
        torch.manual_seed(3)
        options: Any = {"gradient": gradient}
        model = Model(lowtide.HeadOptions(**options), sequence=sequence).to(DEVICE)
        alone = copy.deepcopy(model)
        model.mesh = mesh["tp"]
        for name, p in list(model.head.named_parameters()):
            setattr(model.head, name, nn.Parameter(distribute_tensor(p.detach(), mesh["tp"], [Shard(0)])))
        if where == "own":
            fully_shard(model.body, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        everything = [batch_of(k) for k in range(2)]
        ids, labels = (torch.cat(parts) for parts in zip(*everything, strict=True))
        want = nn.functional.cross_entropy(alone.head(alone.hidden(ids))[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        want.backward()
        for _ in range(2):
            items = count_items(everything[stream][1][:, 1:], group=mesh["dp"].get_group())
            loss = model(*everything[stream], items)
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total, group=mesh["dp"].get_group())
            torch.testing.assert_close(total / 2, want.detach(), rtol=1e-5, atol=1e-6)
            for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                grad: Any = p.grad
                torch.testing.assert_close(
                    grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-6,
                    msg=lambda m, n=name, w=(gradient, sequence, where): f"{w} {n}: {m}",
                )  # fmt: skip
            model.zero_grad()


def hybrid_sharding() -> None:
    """FSDP2 within pairs of ranks, and the same on each pair: every rank has tokens of its own."""
    mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for gradient in ("forward", "recompute"):
        torch.manual_seed(3)
        options: Any = {"gradient": gradient}
        model = Model(lowtide.HeadOptions(**options), sequence=False).to(DEVICE)
        alone = copy.deepcopy(model)
        fully_shard(model, mesh=mesh)
        everything = [batch_of(k) for k in range(dist.get_world_size())]
        ids, labels = (torch.cat(parts) for parts in zip(*everything, strict=True))
        logits = alone.head(alone.hidden(ids))
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        mine = everything[dist.get_rank()]
        model(*mine, count_items(mine[1][:, 1:])).backward()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            grad: Any = p.grad
            torch.testing.assert_close(
                grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n} {m}"
            )


def two_axes_at_once_are_refused() -> None:
    """A weight that is placed on both axes: whose tokens its gradient would be of, nobody can tell."""
    mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    weight = distribute_tensor(torch.randn(VOCAB, D, device=DEVICE), mesh, [Replicate(), Shard(0)])
    hidden = distribute_tensor(torch.randn(6, D, device=DEVICE), mesh, [Shard(0), Replicate()])
    labels = torch.zeros(6, dtype=torch.long, device=DEVICE)
    with pytest.raises(ArgumentValueError, match=r"linear_weight: .*mesh of one axis.*mesh\[.tp.\]"):
        lowtide.linear_cross_entropy(hidden, weight, labels)
    on_one = distribute_tensor(torch.randn(VOCAB, D, device=DEVICE), mesh["tp"], [Shard(0)])
    with pytest.raises(ArgumentValueError, match=r"linear_weight: .*mesh of one axis"):
        lowtide.linear_cross_entropy(hidden, on_one, labels)


if __name__ == "__main__":
    main(vars())
