"""Keys gathered over ranks: each rank's loss beside the formula's over all keys, and gradients on their ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from contract.cases import contrastive_oracle
from distributed.launch import DEVICE, SEED, main
from distributed.sharded import exchanged, near, of_all_ranks
from lowtide import linear_contrastive
from lowtide.errors import ArgumentValueError

Q, D, MORE = 7, 6, 4


def problem(K: int, P: int | None, *, masked: bool = False) -> dict[str, Any]:
    """Return all ranks' queries, K keys a rank, positives and masks, the same on every rank."""
    W, g = dist.get_world_size(), torch.Generator().manual_seed(SEED)
    sizes = {"queries": Q, "keys": K}
    found = {name: torch.randn(W * size, D, generator=g, dtype=torch.float64) for name, size in sizes.items()}
    if P is not None:
        y = torch.randint(W * K, (W * Q, max(1, P)), generator=g)
        y[torch.rand(y.shape, generator=g) < 0.2] = -1
        y[:, 0] = torch.where(y[:, 0] < 0, 3, y[:, 0])  # as many queries with a positive on each rank
        found["positives"] = y[:, 0] if P == 0 else y
    if masked:
        found["mask"] = torch.rand(W * Q, W * K, generator=g) < 0.4
    return {name: x.to(DEVICE) for name, x in found.items()}


def own(every: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part, as leaves."""
    mine = {name: x.chunk(dist.get_world_size())[dist.get_rank()].clone() for name, x in every.items()}
    return mine | {name: mine[name].requires_grad_() for name in ("queries", "keys")}


def losses(every: dict[str, Any], temperature: Tensor, *, symmetric: bool) -> Tensor:
    """Return each rank's loss: the mean over its queries, and over its queries' keys among all queries."""
    z, y = every["queries"] @ every["keys"].T / temperature, every["positives"].view(len(every["queries"]), -1)
    times = F.one_hot(y + 1, z.shape[1] + 1).sum(1)[:, 1:].double()
    masked = z.masked_fill(every["mask"] & (times == 0), -torch.inf) if "mask" in every else z
    of_query, of_key = (masked.logsumexp(axis, keepdim=True) - z for axis in (1, 0))
    share, found = times / times.sum(0).clamp(min=1), []
    for mine in torch.arange(len(z), device=DEVICE).split(Q):
        first = ((of_query * times).sum(1) / times.sum(1))[mine].mean()
        second = (of_key * share)[mine].sum() / share[mine].sum()
        found.append((first + second) / 2 if symmetric else first)
    return torch.stack(found)


def every_option() -> None:
    """Values, and the gradients that data parallelism averages, on the ranks they belong to.

    The average over ranks is the whole batch's loss, where each has as many queries, and keys of these.
    """
    W, rank = dist.get_world_size(), dist.get_rank()
    options = [(None, False, False, 0), (None, True, True, MORE), (0, True, False, MORE), (0, False, True, 0)]
    for P, masked, symmetric, more in [*options, (3, True, True, MORE), (3, False, False, 0)]:
        what = (P, masked, symmetric, more)
        every, t = problem(Q + more, P, masked=masked), torch.tensor(0.6, dtype=torch.float64, device=DEVICE)
        mine, temperature = own(every), t.clone().requires_grad_()
        loss = linear_contrastive(**mine, temperature=temperature, symmetric=symmetric, group=dist.group.WORLD)
        grads = torch.autograd.grad(loss, (mine["queries"], mine["keys"], temperature))
        i = torch.arange(W * Q, device=DEVICE)  # None: each rank's first keys
        every = {"positives": i // Q * (Q + more) + i % Q} | every
        leaves = [every[name].requires_grad_() for name in ("queries", "keys")] + [t.requires_grad_()]
        want = losses(every, t, symmetric=symmetric)
        near(loss, want[rank], what)
        if P is None or not symmetric:
            near(want.mean(), contrastive_oracle(**every, temperature=t, symmetric=symmetric), what)
        *of_parts, of_temperature = torch.autograd.grad(want.mean(), leaves)
        for got, true in zip(grads, of_parts, strict=False):
            near(got / W, true.chunk(W)[rank], what)
        mean = torch.tensor(of_all_ranks(grads[2].item()), dtype=torch.float64).mean()
        near(mean, of_temperature.cpu(), what)


def gradients_of_keys_alone() -> None:
    """Frozen queries, and narrow gradients are summed wide."""
    W, rank, every = dist.get_world_size(), dist.get_rank(), problem(Q, None)
    mine = own(every)
    mine["queries"] = mine["queries"].detach()
    (got,) = torch.autograd.grad(linear_contrastive(**mine, symmetric=True, group=dist.group.WORLD), mine["keys"])
    every["keys"].requires_grad_()
    (want,) = torch.autograd.grad(contrastive_oracle(**every, symmetric=True), every["keys"])
    near(got / W, want.chunk(W)[rank], "keys")
    narrow = {name: x.detach().bfloat16().requires_grad_() for name, x in mine.items()}
    grads = torch.autograd.grad(linear_contrastive(**narrow, group=dist.group.WORLD), list(narrow.values()))
    assert all(g.dtype == torch.bfloat16 for g in grads)


def what_is_exchanged() -> None:
    """Keys once in each direction, and no similarities; of a symmetric loss queries too."""
    W, mine, group = dist.get_world_size(), own(problem(Q, None)), dist.group.WORLD
    linear_contrastive(**mine, group=group)
    for symmetric, tensors in ((False, 1), (True, 2)):
        with exchanged() as seen:
            linear_contrastive(**mine, symmetric=symmetric, group=group).backward()
        large = [count for _, count in seen if count > 16]
        assert sorted(large) == sorted([Q * D, W * Q * D] * tensors), seen


def errors() -> None:
    mine = own(problem(Q, None))
    with pytest.raises(ArgumentValueError, match=rf"mask: expected shape \[{Q}, {dist.get_world_size() * Q}\]"):
        linear_contrastive(**mine, mask=torch.zeros(Q, Q) > 0, group=dist.group.WORLD)
    alone = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(ArgumentValueError, match="group: expected a process group that this rank is in"):
            linear_contrastive(**mine, group=alone)


if __name__ == "__main__":
    main(vars())
