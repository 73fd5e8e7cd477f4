"""The head's benchmark, and the peers of all tables of a head: they are imported when their turn comes.

N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.bench.case import Case, Function, Values, make_case, measure_cases, values_in, values_of_logits
from lowtide.bench.config import HEAD_PEERS
from lowtide.bench.harness import Peer, Row, by_name, compiled, gpu_module
from lowtide.bench.variant import LOWTIDE
from lowtide.errors import UnsupportedError
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.plan import plan_head
from lowtide.head.token_stats import linear_logprobs, linear_token_stats

Build = Callable[[Case], Function]
IGNORED = -100
CHUNKS = 8  # of tokens, in the forms that users write
TRL_COLUMNS = 32768  # classes of the logits that TRL 1.16 holds at a time


def _lowtide(case: Case) -> Function:
    if "entropy" not in case.names:
        return linear_cross_entropy if "loss" in case.names else linear_logprobs

    def run(x: Tensor, w: Tensor, y: Tensor) -> Any:
        stats = linear_token_stats(x, w, y, want=("logprob", "entropy"))
        return stats.logprob, stats.entropy

    return run


def _plan(case: Case) -> Row:
    """Return the ``plan`` of the mean loss."""
    N, D = case.x.shape
    mean = case.reduction == "mean"
    return {"plan": asdict(plan_head(N, D, len(case.w), case.x.dtype, case.x.device))} if mean else {}


def naive(case: Case) -> Function:
    """Return what most write: the values from all logits, upcast."""
    return lambda x, w, y: values_of_logits((x @ w.T).float(), y, case.names)


def _checkpointed(case: Case) -> Function:
    """In chunks of tokens, the projection of each recomputed: one chunk's logits at a time in memory."""
    function = partial(checkpoint, naive(case), use_reentrant=False)

    def run(x: Tensor, w: Tensor, y: Tensor) -> Values:
        parts = [function(x, w, y) for x, y in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True)]
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    return run


def _gradients_in_forward(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Return the mean of the losses, chunk by chunk, each chunk's gradients added to ``.grad`` at once."""
    total: Any = 0
    for rows in torch.arange(len(y)).chunk(CHUNKS):
        loss = F.cross_entropy((x[rows] @ w.T).float(), y[rows], reduction="sum") / len(y)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total.requires_grad_()  # type: ignore[no-any-return]


def _losses(build: Build, *, entropy: bool = False) -> Build:
    """Return what builds, of a function that computes each token's loss, and perhaps its entropy, a case's values: a
    loss, or a log-probability, and the entropy.
    """

    def of_case(case: Case) -> Function:
        if case.y.dim() > 1 or ("entropy" in case.names and not entropy):
            raise UnsupportedError(f"computes logprob{' and entropy' * entropy} of one target a token alone")
        function = build(case)

        def run(x: Tensor, w: Tensor, y: Tensor) -> Values:
            loss, *others = values_in(function(x, w, y))
            return (-loss if "logprob" in case.names else loss), *others

        return run

    return of_case


def _on_gpu(module: str, function: str, **options: Any) -> Build:
    """Return what imports a package's loss for GPUs, with these keyword arguments."""
    return lambda case: partial(getattr(gpu_module(case, module), function), reduction=case.reduction, **options)


def _torch(case: Case) -> Function:
    """PyTorch's own, of torch 2.13 and newer, with its own choice of chunks."""
    from torch.nn.functional import linear_cross_entropy

    return partial(linear_cross_entropy, reduction=case.reduction)


def _quack(case: Case) -> Function:
    # 0.6.5 takes no chunks of as many rows as the hidden size has numbers
    options = {"chunk_size": 2048} if case.shape.D == 4096 else {}
    return _on_gpu("quack.linear_cross_entropy", "chunked_linear_cross_entropy", **options)(case)


def _liger_sm90(case: Case) -> Function:
    module = gpu_module(case, "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    return lambda x, w, y: module.LigerFusedLinearCrossEntropySM90Function.apply(x, w, y, IGNORED, "mean")


def _liger_scaled(case: Case) -> Function:
    """Liger's CuTe kernels for Hopper; elsewhere it would silently run plain PyTorch in chunks."""
    module = gpu_module(case, "liger_kernel.ops.fused_linear_scaled_cross_entropy")
    if torch.cuda.get_device_capability(case.x.device) != (9, 0):
        raise UnsupportedError("its kernels are for GPUs of compute capability 9.0")
    apply = module.LigerFusedLinearScaledCrossEntropyFunction.apply
    return lambda x, w, y: apply(x, w, y, 1.0, IGNORED, 1, "entropy" in case.names)


def _liger_native(case: Case) -> Function:
    """Liger's native function, from liger-cute-kernels, on a group of this process alone."""
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # no multicast: there is one rank
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    native = gpu_module(case, "liger_cute_kernels")
    if not dist.is_initialized():
        alone: Any = vars(dist)["HashStore"]
        dist.init_process_group("nccl", store=alone(), rank=0, world_size=1)
    sizes = {"max_tokens": case.shape.N, "hidden_size": case.shape.D, "local_vocab_size": case.shape.V}
    native.configure(flsce=native.FusedLinearCrossEntropyConfig(**sizes))
    module: Any = importlib.import_module("liger_kernel.ops.cute.fused_linear_scaled_cross_entropy_tp")
    apply = module.LigerFusedLinearScaledCrossEntropyNativeTPFunction.apply
    return lambda x, w, y: apply(x, w, y, 0, 1.0, IGNORED, 1, "entropy" in case.names, None)


def _trl(case: Case) -> Function:
    apply: Any = importlib.import_module("trl.kernels").ChunkedLogProbFunction.apply
    more = case.names[1:]  # the entropy

    def losses(x: Tensor, w: Tensor, y: Tensor) -> Values:
        logprobs, *others = apply(x, w, None, y, 1.0, TRL_COLUMNS, None, 1.0, more)
        return -logprobs, *others[: len(more)]

    return losses


_CCE = ("cut_cross_entropy", "linear_cross_entropy")
ALL_PEERS = by_name(
    Peer(LOWTIDE, _lowtide, about=_plan),
    Peer("naive", naive),
    Peer("compile", lambda case: compiled(naive(case))),
    Peer("liger", _on_gpu("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"), "liger-kernel"),
    Peer("liger-sm90", _liger_sm90, "liger-kernel"),
    Peer("liger-scaled", _losses(_liger_scaled, entropy=True), "liger-kernel"),
    Peer("liger-native", _losses(_liger_native, entropy=True), "liger-cute-kernels"),
    Peer("cce", _on_gpu(*_CCE), "cut-cross-entropy"),  # small gradients dropped
    Peer("cce-exact", _losses(_on_gpu(*_CCE, filter_eps=None)), "cut-cross-entropy"),
    Peer("quack", _quack, "quack-kernels"),
    Peer("trl", _losses(_trl, entropy=True), "trl"),
    Peer("torch", _losses(_torch)),
    Peer(f"checkpoint-{CHUNKS}", _checkpointed),
    Peer(f"forward-{CHUNKS}", lambda _: _gradients_in_forward),
)
PEERS = {name: ALL_PEERS[name] for name in HEAD_PEERS}
measure = partial(measure_cases, cases=lambda run, shape: [make_case(shape, run.dtype, run.device)])
