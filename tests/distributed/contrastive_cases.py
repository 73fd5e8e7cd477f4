"""Keys gathered over ranks: each rank's loss beside the naive formula's over all keys, and gradients on their ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.launch import DEVICE, main
from distributed.sharded import exchanged, of_all_ranks
from head.test_contrastive import naive
from lowtide import linear_contrastive
from lowtide.errors import ArgumentValueError

Q, D, MORE = 7, 6, 4


def _world() -> tuple[int, int, Any]:
    return dist.get_world_size(), dist.get_rank(), dist.group.WORLD


def _problem(K: int, P: int | None, *, masked: bool, seed: int = 0) -> dict[str, Any]:
    """Return all ranks' queries, keys, positives and masks, the same on every rank."""
    (W, _, _), g = _world(), torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {
        name: torch.randn(W * size, D, generator=g, dtype=torch.float64) for name, size in (("queries", Q), ("keys", K))
    }
    if P is not None:
        y = torch.randint(W * K, (W * Q, max(1, P)), generator=g)
        y[torch.rand(y.shape, generator=g) < 0.2] = -1
        y[:, 0] = torch.where(y[:, 0] < 0, 3, y[:, 0])  # as many queries with a positive on each rank
        found["positives"] = y[:, 0] if P == 0 else y
    if masked:
        found["mask"] = torch.rand(W * Q, W * K, generator=g) < 0.4
    return {name: x.to(DEVICE) for name, x in found.items()}


def _own(every: dict[str, Any], K: int) -> dict[str, Any]:
    """Return this rank's part, as leaves."""
    _, rank, _ = _world()
    rows = {name: K if name == "keys" else Q for name in every}
    own = {name: x[rank * rows[name] : (rank + 1) * rows[name]].clone() for name, x in every.items()}
    return own | {name: own[name].requires_grad_() for name in ("queries", "keys")}


def _with_ids(every: dict[str, Any], K: int) -> dict[str, Any]:
    """Return the problem with the ids that stand for None: each rank's first keys."""
    i = torch.arange(len(every["queries"]), device=DEVICE)
    return {"positives": i // Q * K + i % Q} | every


def _losses(every: dict[str, Any], K: int, temperature: Tensor, *, symmetric: bool) -> Tensor:
    """Return each rank's loss: the mean over its queries, and over its queries' keys among all queries."""
    z, y = every["queries"] @ every["keys"].T / temperature, every["positives"].view(len(every["queries"]), -1)
    times = torch.nn.functional.one_hot(y + 1, z.shape[1] + 1).sum(1)[:, 1:].double()
    if "mask" in every:
        masked = z.masked_fill(every["mask"] & (times == 0), -torch.inf)
    else:
        masked = z
    of_query, of_key = (masked.logsumexp(axis, keepdim=True) - z for axis in (1, 0))
    share, found = times / times.sum(0).clamp(min=1), []
    for own in torch.arange(len(z), device=DEVICE).split(Q):
        first = ((of_query * times).sum(1) / times.sum(1))[own].mean()
        second = (of_key * share)[own].sum() / share[own].sum()
        found.append((first + second) / 2 if symmetric else first)
    return torch.stack(found)


def every_option() -> None:
    """Values, and the gradients that data parallelism averages, on the ranks they belong to.

    The average over ranks is the whole batch's loss, where each has as many queries, and keys of these.
    """
    W, rank, group = _world()
    options = itertools.product((None, 0, 3), (False, True), (False, True), (Q, Q + MORE))
    for i, (P, masked, symmetric, K) in enumerate(options):
        every = _problem(K, P, masked=masked, seed=i)
        temperature = torch.tensor(0.6, dtype=torch.float64, device=DEVICE, requires_grad=True)
        own = _own(every, K)
        loss = linear_contrastive(**own, temperature=temperature, symmetric=symmetric, group=group)
        grads = torch.autograd.grad(loss, (own["queries"], own["keys"], temperature))
        every = _with_ids(every, K) | {name: every[name].requires_grad_() for name in ("queries", "keys")}
        t = temperature.detach().requires_grad_()
        want = _losses(every, K, t, symmetric=symmetric)
        near = {"rtol": 1e-9, "atol": 1e-11}
        torch.testing.assert_close(loss, want[rank], **near)
        if P is None or not symmetric:
            torch.testing.assert_close(want.mean(), naive(**every, temperature=t, symmetric=symmetric), **near)
        dq, dk, dt = torch.autograd.grad(want.mean(), (every["queries"], every["keys"], t))
        torch.testing.assert_close(grads[0] / W, dq[rank * Q : (rank + 1) * Q], **near)
        torch.testing.assert_close(grads[1] / W, dk[rank * K : (rank + 1) * K], **near)
        summed = torch.tensor(of_all_ranks(grads[2].item()), dtype=torch.float64).mean()
        torch.testing.assert_close(summed, dt.cpu(), **near)


def gradients_of_keys_alone() -> None:
    """Frozen queries, and narrow gradients are summed wide."""
    W, rank, group = _world()
    every = _problem(Q, None, masked=False)
    own = _own(every, Q)
    own["queries"] = own["queries"].detach()
    (got,) = torch.autograd.grad(linear_contrastive(**own, symmetric=True, group=group), own["keys"])
    every["keys"].requires_grad_()
    (want,) = torch.autograd.grad(naive(**every, symmetric=True), every["keys"])
    torch.testing.assert_close(got / W, want[rank * Q : (rank + 1) * Q], rtol=1e-9, atol=1e-11)
    narrow = {name: x.detach().bfloat16().requires_grad_() for name, x in own.items()}
    grads = torch.autograd.grad(linear_contrastive(**narrow, group=group), list(narrow.values()))
    assert all(g.dtype == torch.bfloat16 for g in grads)


def what_is_exchanged() -> None:
    """Keys once in each direction, and no similarities; of a symmetric loss queries too."""
    W, _, group = _world()
    own = _own(_problem(Q, None, masked=False), Q)
    linear_contrastive(**own, group=group)
    for symmetric, tensors in ((False, 1), (True, 2)):
        with exchanged() as seen:
            linear_contrastive(**own, symmetric=symmetric, group=group).backward()
        large = [count for _, count in seen if count > 16]
        assert sorted(large) == sorted([Q * D, W * Q * D] * tensors), seen
    with exchanged() as seen, torch.no_grad():
        linear_contrastive(**own, group=group)
    assert [count for _, count in seen if count > 16] == [Q * D]


def errors() -> None:
    W, rank, group = _world()
    own = _own(_problem(Q, None, masked=False), Q)
    with pytest.raises(ArgumentValueError, match=rf"mask: expected shape \[{Q}, {W * Q}\]"):
        linear_contrastive(**own, mask=torch.zeros(Q, Q) > 0, group=group)
    alone = dist.new_group([0])
    if rank:
        with pytest.raises(ArgumentValueError, match="group: expected a process group that this rank is in"):
            linear_contrastive(**own, group=alone)
    else:
        torch.testing.assert_close(linear_contrastive(**own, group=alone), linear_contrastive(**own))


if __name__ == "__main__":
    main(vars())
