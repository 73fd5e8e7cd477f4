"""The exponential path on a sharded vocabulary, in bfloat16 on several GPUs, beside float64 on each."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lowtide
from distributed import sharded
from distributed.launch import main
from distributed.sharded import WAYS, head, plain, shard_of, spread
from gpu.conftest import no_waits
from lowtide.head.ranks import begin_gather

# Kernels are compiled anew for a bias, a soft cap, a scale: these come together, or compiling takes all the time.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-3},
    {"softcap": 20.0, "logit_scale": 0.7, "bias": True},
    {"reduction": "none"},
    {"weight": True, "z_loss": 1e-3},
]


LEAVES = ("input", "linear_weight", "linear_bias")


def problem(N: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    x, w, _, y = head((1, N), 64, V, dtype=torch.bfloat16, bias=False)
    return x.detach(), w.detach(), y


def compare(
    N: int, D: int, V: int, dtype: torch.dtype, most: tuple[float, float, float], *, huge: bool = False,
    way: str = "replicated", gradient: Any = "auto", backend: Any = "auto", workspace_mib: float | None = None,
    bias: bool = False, autocast: bool = False, **kwargs: Any,
) -> None:  # fmt: skip
    """Hold the loss, dX, dW and the bias's gradient against float64 autograd, as norms."""
    x, w, b, y = head((1, N), D, V, dtype=dtype, bias=bias)
    y[0, 1::7] = -100
    if huge:
        x.data[:, ::3] *= 300
    kwargs = {"input": x, "linear_weight": w, "linear_bias": b, "target": y, "ignore_index": -100, **kwargs}
    if "weight" in kwargs:
        kwargs["weight"] = torch.rand(V, generator=torch.Generator().manual_seed(3)).cuda() + 0.1
    options = lowtide.HeadOptions(backend=backend, gradient=gradient, workspace_mib=workspace_mib)
    bounds = dict(zip(("values", *LEAVES), (*most, most[2]), strict=True)).__getitem__
    what = (N, D, V, dtype, kwargs, huge, options, autocast)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        sharded.compare(
            "linear_cross_entropy", kwargs | {"options": options}, [way], what, bounds=bounds, upstream=torch.clone
        )


def in_parts(way: str, x: Tensor, w: Tensor) -> tuple[Any, Any]:
    return spread(way, x, of_vocab=False).requires_grad_(), spread(way, w, of_vocab=True).requires_grad_()


def bfloat16() -> None:
    """Odd shapes, each option, both gradients, ordinary and huge losses, every way of holding the tensors."""
    most = (2e-5, 3.4e-3, 4.5e-3)
    for options, huge, way in itertools.product(OPTIONS, (False, True), WAYS):
        gradient = "auto" if options.get("reduction") == "none" else "forward"
        compare(
            1301, 256, 5003, torch.bfloat16, most, huge=huge and "softcap" not in options, way=way, gradient=gradient,
            backend="exp", **options,
        )  # fmt: skip
    capped = OPTIONS[2]
    for way in WAYS:
        compare(1301, 256, 5003, torch.bfloat16, most, way=way, gradient="recompute", backend="exp", **capped)
        # the truth's operands are not rounded to bfloat16, which alone errs 2e-3
        compare(1301, 256, 5003, torch.float32, (2e-4, 5e-3, 6e-3), way=way, backend="exp", autocast=True)
    compare(1, 64, 300, torch.bfloat16, (2e-5, 5e-3, 6e-3), backend="exp")
    compare(1301, 256, 5003, torch.bfloat16, most, way="local", backend="exp", bias=True, label_smoothing=0.1)
    compare(4097, 128, 50257, torch.bfloat16, most, backend="exp", way="sequence")
    for way, workspace in itertools.product(WAYS, (64.0, 512.0)):  # few rows, in blocks; many chunks
        compare(
            9001, 512, 50257, torch.bfloat16, (2e-5, 3.4e-3, 9e-3), backend="exp", way=way, huge=True,
            workspace_mib=workspace,
        )  # fmt: skip


def edges() -> None:
    """No token, fewer tokens or classes than ranks, a target that is no class, ignored rows that are no numbers."""
    for way in ("replicated", "sequence"):
        compare(40, 64, 3, torch.bfloat16, (1e-4, 1e-2, 1e-2), backend="exp", way=way, label_smoothing=0.1)
        for N in (0, 1):
            x, w, y = problem(N, 300)
            px, pw = in_parts(way, x, w)
            loss = lowtide.linear_cross_entropy(px, pw, y, reduction="sum").to_local()
            loss.backward()
            assert (loss == 0) == (N == 0)
            assert px.grad.full_tensor().isfinite().all()
            assert pw.grad.full_tensor().any() == (N > 0)
        x, w, y = problem(700, 3001)
        x[0, 5], x[0, 6] = torch.nan, torch.inf
        y[0, 5:7] = -100
        px, pw = in_parts(way, x, w)
        loss = lowtide.linear_cross_entropy(px, pw, y).to_local()
        loss.backward()
        assert loss.isfinite()
        assert px.grad.full_tensor().isfinite().all()
        assert pw.grad.full_tensor().isfinite().all()
        assert not px.grad.full_tensor()[0, 5:7].any()
        y[0, 9] = 3001
        assert lowtide.linear_cross_entropy(px, pw, y).to_local().isnan()


def an_exchange_that_is_dropped() -> None:
    """One that nobody waits for, as after an error, reads and writes nothing that is allocated later."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    for _ in range(20):
        x = torch.ones(ranks * 2048, 4096, device="cuda")
        dropped = begin_gather(x, group)
        del x, dropped
        later = [torch.full((2048 * 4096,), 3.0, device="cuda") for _ in range(2 * ranks)]
        assert all((part == 3).all() for part in later)


def no_host_waits() -> None:
    """Nothing between call and end of backward waits for the device, with any option and either gradient."""
    V = 5003
    x, w, y = problem(600, V)
    class_weight = torch.rand(V, generator=torch.Generator().manual_seed(3)).cuda() + 0.1
    for options, gradient, way in itertools.product(OPTIONS, ("auto", "recompute"), WAYS):
        kwargs = {**options, "weight": class_weight} if "weight" in options else dict(options)
        px, pw = in_parts(way, x, w)
        if kwargs.pop("bias", False):
            kwargs["linear_bias"] = spread(way, torch.ones(V, dtype=w.dtype, device="cuda"), of_vocab=True)
        kwargs |= {**shard_of(way, pw), "options": lowtide.HeadOptions(gradient=gradient)}
        upstream = torch.ones((1, 600) if options.get("reduction") == "none" else (), device="cuda")
        for waits in (nullcontext, no_waits):  # the first call compiles, and sets up the ranks' connections
            with waits():
                plain(lowtide.linear_cross_entropy(px, pw, y, **kwargs)).backward(upstream)


if __name__ == "__main__":
    main(vars())
