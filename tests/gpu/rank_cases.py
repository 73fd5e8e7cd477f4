"""The exponential path with the vocabulary in parts, in bfloat16 on several GPUs, beside float64 on each."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lowtide
from distributed.launch import main, named
from support import head, in_float64, oracle, relative_error

OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-3},
    {"softcap": 20.0, "logit_scale": 0.7},
    {"reduction": "none"},
    {"weight": True, "z_loss": 1e-3},
]


def problem(N: int, D: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, w, _, y = head((1, N), D, V, dtype=dtype, bias=False)
    return x.detach().cuda(), w.detach().cuda(), y.cuda()


def in_parts(x: Tensor, w: Tensor, *, sequence: bool) -> tuple[Any, Any]:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    placed = distribute_tensor(x, mesh, [Shard(1) if sequence else Replicate()])
    return placed.requires_grad_(), distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()


def compare(
    N: int, D: int, V: int, dtype: torch.dtype, most: tuple[float, float, float], *, huge: bool = False,
    sequence: bool = False, gradient: Any = "auto", backend: Any = "auto", workspace_mib: float | None = None,
    **kwargs: Any,
) -> None:  # fmt: skip
    """Loss, dX and dW of all ranks together against float64 autograd, as norms."""
    x, w, y = problem(N, D, V, dtype)
    y[0, 1::7] = -100
    if huge:
        x[:, ::3] *= 300
    px, pw = in_parts(x, w, sequence=sequence)
    options = lowtide.HeadOptions(backend=backend, gradient=gradient, workspace_mib=workspace_mib)
    if "weight" in kwargs:
        kwargs["weight"] = torch.rand(V, generator=torch.Generator().manual_seed(3)).cuda() + 0.1
    loss = lowtide.linear_cross_entropy(px, pw, y, options=options, **kwargs).to_local()
    truth = in_float64({"input": x.requires_grad_(), "linear_weight": w.requires_grad_(), "target": y, **kwargs})
    want = oracle(**truth)
    got = torch.autograd.grad(loss.sum(), (px, pw))
    true = torch.autograd.grad(want.sum(), (truth["input"], truth["linear_weight"]))
    errors = [relative_error(loss, want), *(relative_error(g.full_tensor(), t) for g, t in zip(got, true, strict=True))]
    assert all(error <= bound for error, bound in zip(errors, most, strict=True)), (
        errors,
        most,
        kwargs,
        huge,
        sequence,
    )


def bfloat16() -> None:
    """Odd shapes, each option, both gradients, ordinary and huge losses, hidden states replicated and sharded."""
    for options, huge, sequence in itertools.product(OPTIONS, (False, True), (False, True)):
        gradient = "auto" if options.get("reduction") == "none" else "forward"
        compare(
            1301, 256, 5003, torch.bfloat16, (2e-5, 3.4e-3, 4.5e-3), huge=huge and "softcap" not in options,
            sequence=sequence, gradient=gradient, backend="exp", **options,
        )  # fmt: skip
    compare(1301, 256, 5003, torch.bfloat16, (2e-5, 3.4e-3, 4.5e-3), gradient="recompute", backend="exp")
    compare(1, 64, 300, torch.bfloat16, (2e-5, 5e-3, 6e-3), backend="exp")
    compare(4097, 128, 50257, torch.bfloat16, (2e-5, 3.4e-3, 4.5e-3), backend="exp", sequence=True)
    for sequence, workspace in itertools.product((False, True), (64.0, 512.0)):  # few rows, in blocks; many chunks
        compare(
            9001, 512, 50257, torch.bfloat16, (2e-5, 3.4e-3, 9e-3), backend="exp", sequence=sequence, huge=True,
            workspace_mib=workspace,
        )  # fmt: skip


def edges() -> None:
    """No token, fewer tokens or classes than ranks, a target that is no class, ignored rows that are no numbers."""
    for sequence in (False, True):
        compare(40, 64, 3, torch.bfloat16, (1e-4, 1e-2, 1e-2), backend="exp", sequence=sequence, label_smoothing=0.1)
        for N in (0, 1):
            x, w, y = problem(N, 64, 300, torch.bfloat16)
            px, pw = in_parts(x, w, sequence=sequence)
            loss = lowtide.linear_cross_entropy(px, pw, y, reduction="sum").to_local()
            loss.backward()
            assert (loss == 0) == (N == 0)
            assert px.grad.full_tensor().isfinite().all()
            assert pw.grad.full_tensor().any() == (N > 0)
        x, w, y = problem(700, 64, 3001, torch.bfloat16)
        x[0, 5], x[0, 6] = torch.nan, torch.inf
        y[0, 5:7] = -100
        px, pw = in_parts(x, w, sequence=sequence)
        loss = lowtide.linear_cross_entropy(px, pw, y).to_local()
        loss.backward()
        assert loss.isfinite()
        assert px.grad.full_tensor().isfinite().all()
        assert pw.grad.full_tensor().isfinite().all()
        assert not px.grad.full_tensor()[0, 5:7].any()
        y[0, 9] = 3001
        assert lowtide.linear_cross_entropy(px, pw, y).to_local().isnan()


def no_host_waits() -> None:
    """Nothing between call and end of backward waits for the device."""
    x, w, y = problem(600, 256, 5003, torch.bfloat16)
    for sequence in (False, True):
        px, pw = in_parts(x, w, sequence=sequence)
        for _ in range(2):  # the first call compiles, and sets up the ranks' connections
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if _ else "default")
            try:
                lowtide.linear_cross_entropy(px, pw, y).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def float16_and_others() -> None:
    """What the exponential path cannot take runs in plain PyTorch."""
    compare(300, 100, 1003, torch.float16, (1e-4, 3e-3, 3e-3))
    compare(300, 100, 1003, torch.float32, (1e-5, 1e-4, 1e-4))
    compare(300, 101, 1003, torch.bfloat16, (1e-4, 6e-3, 6e-3))
    compare(300, 104, 1003, torch.bfloat16, (1e-4, 6e-3, 6e-3), softcap=5.0, label_smoothing=0.1)


CASES = named(bfloat16, edges, no_host_waits, float16_and_others)

if __name__ == "__main__":
    main(CASES)
