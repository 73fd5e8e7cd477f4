"""Who computes the loss: peers, imported when their turn comes. N tokens, D hidden size, V vocabulary.

A peer that cannot do what a setting requests raises `CannotError`; that, a failed import and a failed run are rows
with the reason.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.harness import CannotError, Peer, by_name, compiled, needs_cuda
from lowtide.bench.problem import Problem
from lowtide.bench.shapes import Shape
from lowtide.bench.task import Function, Task
from lowtide.bench.way import LOWTIDE
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions
from lowtide.head.planner import MIB

Loss = Callable[[Tensor, Tensor, Tensor, str], Tensor]  # x [N, D], w [V, D], y [N], reduction
LIGER = "liger"
TRL_TILE = (4096, 32768)  # tokens and classes of the logits (float32 for divergences) that TRL 1.16 holds at a time
LOWTIDE_AT_LIGERS = "lowtide-liger-memory"


def liger_rows(shape: Shape) -> int:
    """Return the rows of a chunk that Liger's default takes: the logits of a chunk are about as large as the input."""
    chunks = -(-shape.V // shape.D)
    rows = -(-shape.N // chunks)
    return min(shape.N, 1 << (rows - 1).bit_length())


def liger_mib(problem: Problem) -> float:
    """Return the MiB that Liger's default takes above the gradients: one chunk of logits."""
    return liger_rows(problem.shape) * problem.shape.V * problem.dtype.itemsize / MIB


def lowtide_peer(name: str, workspace_mib: Callable[[Problem], float | None]) -> Peer:
    """Return lowtide with so much workspace as a peer; the setting has the other options."""

    def options(problem: Problem) -> HeadOptions:
        return HeadOptions(workspace_mib=workspace_mib(problem), accumulate=problem.setting.accumulate)

    def make(problem: Problem) -> Loss:
        chosen = options(problem)
        return lambda x, w, y, reduction: linear_cross_entropy(x, w, y, reduction=reduction, options=chosen)

    return dataclasses.replace(_peer(name, make), options=options)


def _naive(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy((x @ w.T).float(), y, reduction=reduction)


def _torch(**options: Any) -> Callable[[Problem], Loss]:
    def make(problem: Problem) -> Loss:
        del problem
        if not hasattr(F, "linear_cross_entropy"):
            raise CannotError(f"torch {torch.__version__} has no linear_cross_entropy")
        chosen = importlib.import_module("torch.nn").LinearCrossEntropyOptions(**options)
        fused: Any = F.linear_cross_entropy
        return lambda x, w, y, reduction: fused(x, w, y, reduction=reduction, options=chosen)

    return make


def on_cuda(module: str, function: str, **options: Any) -> Callable[[Problem], Loss]:
    """Return what imports a package's loss for GPUs, with these keyword arguments."""

    def make(problem: Problem) -> Loss:
        needs_cuda(problem.device)
        loss = getattr(importlib.import_module(module), function)
        return lambda x, w, y, reduction: loss(x, w, y, reduction=reduction, **options)

    return make


_liger = partial(on_cuda, "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
cce = partial(on_cuda, "cut_cross_entropy", "linear_cross_entropy")


def _quack(problem: Problem) -> Loss:
    needs_cuda(problem.device)
    if problem.setting.reduction == "none":
        raise CannotError("has no reduction none in chunks")
    return on_cuda("quack.linear_cross_entropy", "chunked_linear_cross_entropy")(problem)


def _trl(problem: Problem) -> Loss:
    del problem
    utils = importlib.import_module("trl.trainer.utils")
    function, columns = utils._ChunkedLogProbFunction, utils._CHUNKED_LOGPROB_CHUNK_SIZE

    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        logprobs: Tensor = function.apply(x, w, None, y, 1.0, columns, None, 1.0, ())[0]
        return -(logprobs.mean() if reduction == "mean" else logprobs)

    return loss


def _peer(name: str, make: Callable[[Problem], Loss], package: str = "") -> Peer:
    def build(task: Task) -> Function:
        head, loss = task.head, make(task.head)
        return lambda: {"loss": loss(head.x, head.w, head.y, head.setting.reduction)}

    return Peer(name, build, package)


PEERS = by_name(
    lowtide_peer(LOWTIDE, lambda _: None),
    lowtide_peer(LOWTIDE_AT_LIGERS, liger_mib),
    _peer("naive", lambda _: _naive),
    _peer("compile", lambda _: compiled(_naive)),
    _peer("torch", _torch()),  # its own choice of chunks
    _peer("torch-4096", _torch(batch_chunk_size=4096, chunking_method=None)),
    _peer(LIGER, _liger(), "liger-kernel"),
    _peer("liger-large", _liger(chunk_mem_const=8, accum_dtype=torch.float32), "liger-kernel"),
    _peer("cce", cce(), "cut-cross-entropy"),  # small gradients dropped
    _peer("cce-exact", cce(filter_eps=None), "cut-cross-entropy"),
    _peer("quack", _quack, "quack-kernels"),
    _peer("trl", _trl, "trl"),
)
