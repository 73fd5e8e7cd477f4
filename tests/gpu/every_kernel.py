"""Every kernel of lowtide at small, odd sizes, for a memory checker; fails if a kernel of the package was not launched.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src:tests \
        compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/every_kernel.py

Tools: memcheck, racecheck, synccheck, initcheck. Without PyTorch's caching each tensor is an allocation of its own, and
a read past its end is reported. NCCL asks for kernels of other architectures when it starts and handles that error
itself: hence no reports of API errors. The last line counts the kernels.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lowtide
from lowtide import HeadOptions, linear_apply, linear_cross_entropy, linear_divergence, linear_token_stats, swiglu_mlp
from lowtide.kernel_launch import Launcher
from lowtide.layers import rms_norm, rotary
from mlp.experts import FORMS, fused, operands
from support import on_gpu

N, D, V = 77, 64, 523  # no multiple of a tile
WANT = ("logprob", "entropy", "lse", "mean_logit", "argmax", "sum_sq_prob", "is_top1", "topk")
OF_SETS = tuple(name for name in WANT if name not in ("mean_logit", "topk"))


def kernels() -> dict[str, Launcher]:
    """Return each kernel that the package launches, by module and name."""
    found = {}
    for info in pkgutil.walk_packages(lowtide.__path__, "lowtide."):
        if ".kernels." in info.name:
            module = importlib.import_module(info.name)
            found |= {f"{info.name}.{k}": v for k, v in vars(module).items() if isinstance(v, Launcher)}
    return found


def problem(dtype: torch.dtype, *, huge: bool = False) -> list[Any]:
    x, w, b, y = on_gpu(N, D, V, dtype=dtype)
    y[::5] = -100
    if huge:  # rows whose exponentials overflow take the repair
        with torch.no_grad():
            x[1::3] *= 300
    return [x, w, b, y]


def backward(value: Tensor) -> None:
    (value.float().sum() * 0.7).backward()


def cross_entropy() -> None:
    backends = (("exp", torch.bfloat16), *(("row", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)))
    for backend, dtype in backends:
        for huge in (False, True):
            x, w, b, y = problem(dtype, huge=huge)
            q = torch.rand(V, device="cuda") + 0.1
            for kwargs in (
                {},
                {"linear_bias": b, "softcap": 9.0, "logit_scale": torch.tensor(0.7, device="cuda")},
                {"linear_bias": b, "weight": q, "label_smoothing": 0.1, "z_loss": 1e-3},
                {"reduction": "none", "linear_bias": b},
                {"options": HeadOptions(backend=backend, workspace_mib=0.1)},
            ):
                options = kwargs.pop("options", HeadOptions(backend=backend))
                backward(linear_cross_entropy(x, w, y, options=options, **kwargs))


def statistics() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for huge in (False, True):
            x, w, b, y = problem(dtype, huge=huge)
            for target, topk in ((y, 3), (torch.stack((y, y.flip(0)), -1), 20)):
                found = linear_token_stats(x, w, target, want=WANT, topk=topk, linear_bias=b, softcap=9.0)
                backward(found.logprob.sum() + found.entropy.sum() + found.lse.sum() + found.mean_logit.sum())
                backward(linear_token_stats(x, w, target, want=("logprob",)).logprob)


def divergences() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, w, b, _ = problem(dtype)
        tx, tw, tb, _ = on_gpu(N, 40, V, dtype=dtype, seed=1)
        for kind in ("forward_kl", "reverse_kl", "jsd", "tv"):
            for reduction in ("mean", "none"):
                backward(
                    linear_divergence(
                        x, w, tx, tw, kind=kind, linear_bias=b, teacher_bias=tb, softcap=9.0, reduction=reduction,
                        options=HeadOptions(workspace_mib=1),
                    )
                )  # fmt: skip


def function() -> None:
    x, w, b, y = problem(torch.bfloat16)
    each = linear_apply(lambda z, y: F.cross_entropy(z, y, reduction="none"), x, w, y, linear_bias=b)
    backward(each)
    backward(linear_apply(lambda z: z.logsumexp(-1).sum(), x, w, out="sum", softcap=9.0))


def sharded() -> None:
    """A vocabulary on a group of one rank takes the kernels of a shard."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        mesh = init_device_mesh("cuda", (1,))
        for huge in (False, True):
            x, w, _, y = problem(torch.bfloat16, huge=huge)
            rows = distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_()
            part = distribute_tensor(w.detach(), mesh, [Shard(0)]).requires_grad_()
            for kwargs in ({}, {"label_smoothing": 0.1, "z_loss": 1e-3}, {"softcap": 9.0}, {"reduction": "none"}):
                loss = linear_cross_entropy(rows, part, y, options=HeadOptions(backend="exp"), **kwargs)
                backward(loss.to_local())
            stats = linear_token_stats(rows, part, y, want=WANT, topk=3, options=HeadOptions(backend="exp"))
            backward(stats.logprob.to_local() + stats.entropy.to_local())
        dist.destroy_process_group()


def sets() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, w, b, y = problem(dtype)
        ids = torch.randint(-1, V, (N, 9), device="cuda")
        ids[:, 1] = 4
        backward(linear_token_stats(x, w, y, want=OF_SETS, linear_bias=b, support=ids).entropy)


def layers() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(3, 37, 96, device="cuda").to(dtype).requires_grad_()
        weight = torch.rand(96, device="cuda").to(dtype).requires_grad_()
        backward(rms_norm(x, weight, 1e-6))
        q, k = (torch.randn(2, heads, 19, 32, device="cuda").to(dtype).requires_grad_() for heads in (4, 2))
        cos, sin = (torch.rand(2, 19, 32, device="cuda").to(dtype) for _ in range(2))
        backward(sum(t.float().sum() for t in rotary(q, k, cos, sin)))
        gate, up = (torch.randn(136, 96, device="cuda").to(dtype).requires_grad_() for _ in range(2))
        down = torch.randn(96, 136, device="cuda").to(dtype).requires_grad_()
        for level in (0, 1):
            backward(swiglu_mlp(x, gate, up, down, checkpoint_level=level))


def experts() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for form in FORMS:
            leaves, ids = operands((77, 3, 5, 40, 24), dtype=dtype, device="cuda")
            ids[3] = 5
            for level in (0, 1):
                backward(fused(leaves, ids, form, checkpoint_level=level))


def main() -> None:
    found, launched = kernels(), set[str]()
    launch = Launcher._launch

    def recorded(self: Launcher, *args: Any, **kwargs: Any) -> None:
        launched.update(name for name, kernel in found.items() if kernel is self)
        launch(self, *args, **kwargs)

    Launcher._launch = recorded  # type: ignore[method-assign]
    torch.manual_seed(0)
    for case in (cross_entropy, statistics, divergences, function, sets, layers, experts, sharded):
        case()
        torch.cuda.synchronize()
        sys.stdout.write(f"ran {case.__name__}\n")
    missing = sorted(set(found) - launched)
    assert not missing, f"not launched: {missing}"
    sys.stdout.write(f"{len(found)} kernels launched\n")


if __name__ == "__main__":
    main()
