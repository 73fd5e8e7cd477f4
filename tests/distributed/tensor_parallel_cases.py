"""FSDP2 times tensor parallelism with the vocabulary in parts, patched models too: a mesh of two axes, four ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import lowtide
from distributed.launch import DEVICE, main
from lowtide.distributed import count_items

V, D, HIDDEN, LENGTH, BATCH = 23, 12, 20, 7, 3  # V is not a multiple of the ranks


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Head(nn.Module):
    """The output layer with its loss inside, where FSDP2 has gathered this rank's classes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(V, D))

    def forward(self, hidden: Tensor, labels: Tensor, items: Any, options: Any) -> Tensor:
        weight: Any = self.weight
        if isinstance(weight, DTensor):
            hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()])
        loss = lowtide.linear_cross_entropy(hidden, weight, labels, shift=True, num_items=items, options=options)
        return loss.to_local() if isinstance(loss, DTensor) else loss


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(V, D), nn.ModuleList([Mlp(), Mlp()]), Head()

    def forward(self, ids: Tensor, labels: Tensor, items: Any = None, options: Any = None) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden, labels, items, options)


def two_axes() -> None:
    """Loss and every gradient are those of one process on both data ranks' sequences, whose labels are uneven."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "vocabulary"))
    data, tensor = mesh["data"], mesh["vocabulary"]
    model = Model().double().to(DEVICE)
    whole = copy.deepcopy(model)
    ids = torch.randint(V, (2, BATCH, LENGTH)).to(DEVICE)  # the same on all ranks: the seed is
    labels = ids.masked_fill(torch.rand(ids.shape).to(DEVICE) < 0.4, -100)
    labels[1, :2] = -100

    hidden = whole.embed(ids.flatten(0, 1))
    for layer in whole.layers:
        hidden = layer(hidden)
    logits = hidden @ whole.head.weight.T
    targets = labels.flatten(0, 1)[:, 1:].flatten()
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100)
    want.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}

    for layer in model.layers:
        parallelize_module(layer, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), tensor, [Shard(0)]))
    for module in (*model.layers, model.head, model):
        fully_shard(module, mesh=data)
    mine = data.get_local_rank()
    for gradient in ("forward", "recompute"):
        model.zero_grad()
        items = count_items(labels[mine][:, 1:], group=data.get_group())
        loss = model(ids[mine], labels[mine], items, lowtide.HeadOptions(gradient=gradient))
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=data.get_group())
        torch.testing.assert_close(total / 2, want.detach(), rtol=1e-12, atol=1e-12)
        for name, p in model.named_parameters():
            got: Any = p.grad
            said = f"{gradient} {name}"
            torch.testing.assert_close(
                got.full_tensor(), expected[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=said: f"{n}: {m}"
            )
    placed: Any = model.head.weight
    assert placed.device_mesh.ndim == 2
    assert placed.to_local().shape[0] < V // 2, "a rank holds its part of its part"


class Causal(nn.Module):
    """A model as transformers has them, to be patched."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(V, D), nn.ModuleList([Mlp(), Mlp()])
        self.lm_head = nn.Linear(D, V)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor, labels: Tensor | None = None, items: Any = None) -> tuple[Any, Tensor]:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(hidden) * 0.5
        if labels is None:
            return None, logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return loss / items, logits


def patched() -> None:
    """Patched models on both axes, the head in the root's unit and in its own: beside stock and one process."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "vocabulary"))
    data, tensor = mesh["data"], mesh["vocabulary"]
    mine = data.get_local_rank()
    ids = torch.randint(V, (2, BATCH, LENGTH)).to(DEVICE)
    labels = ids.masked_fill(torch.rand(ids.shape).to(DEVICE) < 0.4, -100)
    items = (labels[..., 1:] != -100).sum()
    for own, first, gradient in ((True, False, "forward"), (False, True, "recompute"), (True, True, "recompute")):
        whole = Causal().double().to(DEVICE)
        ours, stock = copy.deepcopy(whole), copy.deepcopy(whole)
        want, _ = whole(ids.flatten(0, 1), labels.flatten(0, 1), items)
        want.backward()
        options = lowtide.HeadOptions(gradient=gradient)
        if first:
            report = lowtide.patch(ours, options=options)
        for model in (ours, stock):
            plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
            parallelize_module(model, tensor, {**plan, "lm_head": ColwiseParallel(output_layouts=Replicate())})
            for module in (*model.layers, *([model.lm_head] if own else []), model):
                fully_shard(module, mesh=data)
        if not first:
            report = lowtide.patch(ours, options=options)
        for _ in range(2):
            for model in (ours, stock):
                model.zero_grad()
                loss, _ = model(ids[mine], labels[mine], items / 2)  # FSDP2 averages
                loss.backward()
                total = loss.detach().clone()
                dist.all_reduce(total, group=data.get_group())
                torch.testing.assert_close(total / 2, want.detach(), rtol=1e-12, atol=1e-12)
                for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
                    got: Any = p.grad
                    torch.testing.assert_close(
                        got.full_tensor(), q.grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
                    )
        assert (report.calls_fused, report.calls_materialised) == (2, 0), f"{own} {first}\n{report}"
        with torch.no_grad():
            (_, lazy), (_, real) = ours(ids[mine], labels[mine], items), stock(ids[mine])
        if own:
            torch.testing.assert_close(lazy + 0, real)
            assert report.calls_materialised == 1


if __name__ == "__main__":
    main(vars())
