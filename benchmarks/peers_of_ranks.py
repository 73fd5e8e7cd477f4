"""The peers of `ranks.py` for a sharded vocabulary: losses over a rank's shard of the logits.

N tokens, D hidden size, V_r classes of this rank; every rank holds as many.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def megatron_loss(x_ND: Tensor, w_VD: Tensor, y_N: Tensor, group: Any) -> Tensor:
    """Return the mean cross entropy as Megatron-LM computes it: all logits of the shard, saved as a softmax.

    Three all-reduces of a number a token (the highest logit, the target's, the sum of exponentials), and the hidden
    states' gradient all-reduced overlapped with the weight's GEMM.
    """
    logits: Tensor = _Linear.apply(x_ND, w_VD, group)  # type: ignore[no-untyped-call]
    losses: Tensor = _VocabularyLoss.apply(logits, y_N, group)  # type: ignore[no-untyped-call]
    return losses.mean()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        dx = upstream @ w
        under_way: Any = dist.all_reduce(dx, group=ctx.group, async_op=True)
        dw = upstream.T @ x
        under_way.wait()
        return dx, dw, None


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, group: Any) -> Tensor:
        wide = logits.float()
        highest = wide.amax(1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        wide -= highest[:, None]
        width = logits.shape[1]
        here = (y >= dist.get_rank(group) * width) & (y < (dist.get_rank(group) + 1) * width)
        own = (y - dist.get_rank(group) * width).where(here, 0)
        target = wide.gather(1, own[:, None])[:, 0].where(here, 0)
        dist.all_reduce(target, group=group)
        total = wide.exp_().sum(1)
        dist.all_reduce(total, group=group)
        ctx.dtype = logits.dtype
        ctx.save_for_backward(wide.div_(total[:, None]), own, here)
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        softmax, own, here = ctx.saved_tensors
        softmax[torch.arange(len(own), device=own.device), own] -= here.float()
        return softmax.mul_(upstream[:, None]).to(ctx.dtype), None, None


def liger_function() -> Callable[..., Tensor] | None:
    """Return Liger's losses from hidden states, a rank's weight, targets and the group; None where it has none."""
    try:
        function = importlib.import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyTPFunction
    except (ImportError, AttributeError):
        return None
    return lambda x, w, y, group: function.apply(x, w, y, group)


def liger_implementation(losses: Tensor) -> str:
    """Return which of Liger's implementations computed losses: a fallback where the native one cannot be loaded."""
    nodes: list[Any] = [losses.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [after for after, _ in node.next_functions]
    native = any("NativeTPFunction" in type(node).__name__ for node in seen)
    return "native" if native else "fallback"
