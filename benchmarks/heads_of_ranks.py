"""What `ranks.py` measures: the head with its vocabulary sharded over ranks, and whole under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers_of_ranks import liger_function, liger_implementation, megatron_loss
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import lowtide
from lowtide.bench.settings import Shape

Runs = dict[str, Callable[[], Any]]


def sharded_ways(x: Tensor, w: Tensor, y: Tensor, meshes: Mapping[str, Any]) -> tuple[Runs, dict[str, dict[str, Any]]]:
    """Return what is measured with a sharded vocabulary, by name: loss and both gradients.

    The second dict holds more entries of their rows, filled in when they have run.
    """
    mesh = meshes[""]
    ranks, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()

    def step(loss: Callable[..., Tensor], *trained: Tensor, **options: Any) -> Callable[[], Tensor]:
        def run() -> Tensor:
            for tensor in trained:
                tensor.grad = None
            value: Any = loss(*trained, **options)
            value.backward()
            return value.to_local().detach() if isinstance(value, DTensor) else value.detach()

        return run

    def ours(input: Tensor, weight: Tensor, shard: Any = None, **options: Any) -> Tensor:
        return lowtide.linear_cross_entropy(input, weight, y, options=lowtide.HeadOptions(**options), vocab_shard=shard)

    def torch_loss_parallel(input: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(input, weight).float(), y)

    def in_context(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def inside() -> Tensor:
            with loss_parallel():
                return run()

        return inside

    found: Runs = {}
    notes: dict[str, dict[str, Any]] = {}
    for priority, its in meshes.items():
        shard = lowtide.VocabShard.of(w.detach(), its.get_group())
        found[f"lowtide{priority}"] = step(ours, x, w, shard=shard)
        weight = DTensor.from_local(w.detach(), its, [Shard(0)]).requires_grad_()
        part = DTensor.from_local(x.detach().chunk(ranks)[rank], its, [Shard(0)]).requires_grad_()
        found[f"lowtide, sequence{priority}"] = step(ours, part, weight)
        if priority:
            continue
        same = DTensor.from_local(x.detach(), its, [Replicate()]).requires_grad_()
        found["lowtide, DTensors"] = step(ours, same, weight)
        found["lowtide, recompute"] = step(ours, x, w, shard=shard, gradient="recompute")
        found["loss_parallel"] = in_context(step(torch_loss_parallel, same, weight))
    found["Megatron-style"] = step(lambda x, w: megatron_loss(x, w, y, group), x, w)
    liger = liger_function() if x.is_cuda else None
    if liger is not None:
        of_liger = notes.setdefault("Liger", {})

        def ligers(input: Tensor, weight: Tensor) -> Tensor:
            losses: Tensor = liger(input, weight, y, group)
            if "implementation" not in of_liger:
                of_liger["implementation"] = liger_implementation(losses)
            return losses.mean()

        found["Liger"] = step(ligers, x, w)
    return found, notes


class Root(nn.Module):
    """A body in a unit of its own, and a head in the root's."""

    def __init__(self, D: int, V: int, stock: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.body = nn.Linear(D, D, bias=False, dtype=dtype, device=device)
        self.head = nn.Linear(D, V, bias=False, dtype=dtype, device=device)
        self.stock = stock

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.stock:
            return F.cross_entropy(self.head(hidden).float(), y)
        return lowtide.linear_cross_entropy(hidden, self.head.weight, y)


def fsdp_ways(shape: Shape, dtype: torch.dtype, device: torch.device, mesh: Any) -> Runs:
    """Return steps of stock FSDP2 and of lowtide in it, by name; each rank has tokens of its own."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(shape.N, shape.D, device=device, generator=generator).to(dtype)
    y = torch.randint(0, shape.V, (shape.N,), device=device, generator=generator)

    def way(*, stock: bool) -> Callable[[], Tensor]:
        torch.manual_seed(0)
        model = Root(shape.D, shape.V, stock, dtype, device)
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)

        def run() -> Tensor:
            model.zero_grad()
            loss: Tensor = model(x, y)
            loss.backward()
            return loss.detach()

        return run

    return {"FSDP2, stock": way(stock=True), "FSDP2, lowtide": way(stock=False)}
