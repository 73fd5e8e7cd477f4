"""Two axes of ranks: FSDP2 over one, the vocabulary sharded over the other, beside one process on the joined batch."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from distributed.launch import DEVICE, main
from distributed.models import fused, gradients, same, same_mean
from lowtide.distributed import count_items
from lowtide.errors import ArgumentValueError

VOCAB, D, HIDDEN, T = 53, 8, 20, 7  # neither a multiple of 2
LAYERS = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Head(nn.Linear):
    """The output layer with its loss inside, where FSDP2 has gathered this rank's classes."""

    def __init__(self, gradient: Any, *, sequence: bool) -> None:
        super().__init__(D, VOCAB)
        self.options, self.sequence = lowtide.HeadOptions(gradient=gradient), sequence

    def forward(self, hidden: Any, labels: Tensor, items: Any, *, shift: bool) -> Tensor:  # type: ignore[override]
        weight: Any = self.weight
        if isinstance(weight, DTensor):
            hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
        if self.sequence:
            hidden = hidden.redistribute(placements=[Shard(1)])
        loss: Any = lowtide.linear_cross_entropy(
            hidden, weight, labels, linear_bias=self.bias, shift=shift, num_items=items, options=self.options
        )
        return loss.to_local() if isinstance(loss, DTensor) else loss


class Causal(nn.Module):
    """A model as transformers has them; its head returns logits, or the loss, which may be checkpointed."""

    def __init__(self, lm_head: nn.Module, *, again: bool = False) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, D), nn.ModuleList([Mlp(), Mlp()])
        self.lm_head, self.again = lm_head, again

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def hidden(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, items: Any = None, *, shift: bool = True
    ) -> tuple[Any, Any]:
        if isinstance(self.lm_head, Head):
            score = functools.partial(checkpoint, self.lm_head, use_reentrant=False) if self.again else self.lm_head
            return score(self.hidden(ids), labels, items, shift=shift), None
        logits = self.lm_head(self.hidden(ids)) * 0.5
        if labels is None:
            return None, logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return loss / items, logits


def batch_of(stream: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(stream)
    ids = torch.randint(0, VOCAB, (2, T), generator=g)
    return ids.to(DEVICE), ids.where(torch.rand(ids.shape, generator=g) > 0.2 + 0.2 * stream, -100).to(DEVICE)


def joined(streams: int) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*map(batch_of, range(streams)), strict=True)]


def two_axes(name: str) -> Any:
    return init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", name))


def as_alone(model: nn.Module, alone: nn.Module, what: object) -> None:
    """Compare every gradient with that of one process, whose gradients stay for the next step."""
    want = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    same(gradients(model), want, what, rtol=1e-10, atol=1e-12)


def plain_loss(alone: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over all tokens of PyTorch's own loss of all logits, after its backward."""
    logits = F.linear(alone.hidden(ids), alone.lm_head.weight, alone.lm_head.bias)
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    want.backward()
    return want


def fsdp_and_vocabulary() -> None:
    """Each pair of ranks that shares a head has tokens of its own: loss and gradients are those of all tokens."""
    mesh = two_axes("tp")
    stream = mesh["dp"].get_local_rank()
    ids, labels = batch_of(stream)
    for i, (gradient, sequence) in enumerate(itertools.product(("forward", "recompute"), (False, True))):
        own = i in (1, 2)  # units of the layers and of the head, and parallel layers, or nothing but the root
        model = Causal(Head(gradient, sequence=sequence)).double().to(DEVICE)
        alone = copy.deepcopy(model)
        for name, p in list(model.lm_head.named_parameters()):
            setattr(model.lm_head, name, nn.Parameter(distribute_tensor(p.detach(), mesh["tp"], [Shard(0)])))
        if own:
            parallelize_module(model, mesh["tp"], LAYERS)
        for module in (*model.layers, model.lm_head, model) if own else (model,):
            fully_shard(module, mesh=mesh["dp"])
        want = plain_loss(alone, *joined(2))
        for _ in range(2):
            loss, _ = model(ids, labels, count_items(labels[:, 1:], group=mesh["dp"].get_group()))
            loss.backward()
            same_mean(loss, want, mesh["dp"].get_group())
            as_alone(model, alone, (gradient, sequence, own))
        placed: Any = model.lm_head.weight
        assert placed.device_mesh.ndim == 2
        assert placed.to_local().shape[0] < VOCAB // 2, "a rank holds its part of its part"


def patched() -> None:
    """Patched models on both axes, the head in the root's unit and in its own: beside stock and one process."""
    mesh = two_axes("vocabulary")
    (ids, labels), (all_ids, all_labels) = batch_of(mesh["dp"].get_local_rank()), joined(2)
    items = (all_labels[:, 1:] != -100).sum()
    plan = {**LAYERS, "lm_head": ColwiseParallel(output_layouts=Replicate())}
    for own, first, gradient in ((True, False, "forward"), (False, True, "recompute"), (True, True, "recompute")):
        alone = Causal(nn.Linear(D, VOCAB)).double().to(DEVICE)
        ours, stock = copy.deepcopy(alone), copy.deepcopy(alone)
        want, _ = alone(all_ids, all_labels, items)
        want.backward()
        options = lowtide.HeadOptions(gradient=gradient)
        if first:
            report = lowtide.patch(ours, options=options)
        for model in (ours, stock):
            parallelize_module(model, mesh["vocabulary"], plan)
            for module in (*model.layers, *([model.lm_head] if own else []), model):
                fully_shard(module, mesh=mesh["dp"])
        if not first:
            report = lowtide.patch(ours, options=options)
        for _, model in itertools.product(range(2), (ours, stock)):
            loss, _ = model(ids, labels, items / 2)  # FSDP2 averages
            loss.backward()
            same_mean(loss, want, mesh["dp"].get_group())
            as_alone(model, alone, (own, first))
        fused(report, 2, what=(own, first))
        with torch.no_grad():
            (_, lazy), (_, real) = ours(ids, labels, items), stock(ids)
        if own:
            torch.testing.assert_close(lazy + 0, real)
            assert report.calls_materialised == 1


def hybrid_sharding() -> None:
    """FSDP2 within pairs of ranks, and the same on each pair: every rank has tokens of its own."""
    mesh = two_axes("shard")
    for gradient in ("forward", "recompute"):
        model = Causal(Head(gradient, sequence=False)).double().to(DEVICE)
        alone = copy.deepcopy(model)
        fully_shard(model, mesh=mesh)
        plain_loss(alone, *joined(dist.get_world_size()))
        ids, labels = batch_of(dist.get_rank())
        loss, _ = model(ids, labels, count_items(labels[:, 1:]))
        loss.backward()
        as_alone(model, alone, gradient)


def two_axes_at_once_are_refused() -> None:
    """A weight that is placed on both axes: it is ambiguous whose tokens its gradient covers."""
    mesh = two_axes("tp")
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
