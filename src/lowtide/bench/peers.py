"""Who is measured: each peer is a function that returns a loss, and is imported when its turn comes.

A peer that cannot do what a setting asks for raises `CannotError`; that, a failed import and a failed run are rows
that say why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.harness import CannotError, Peer
from lowtide.bench.problem import Problem
from lowtide.bench.shapes import Shape
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions
from lowtide.head.planner import MIB

Loss = Callable[[Tensor, Tensor, Tensor, str], Tensor]  # x [N, D], w [V, D], y [N], reduction
LIGER = "liger"
LOWTIDE = "lowtide"
LOWTIDE_AT_LIGERS = "lowtide-liger-memory"


@dataclass(frozen=True)
class LossPeer(Peer):
    """One way to the loss: ``build`` returns a `Loss` for a `Problem`.

    Attributes:
        options: lowtide's options; None for everyone else.
        pace: how many times the limit it takes, about, and ``first`` the seconds that each new shape costs it before
            anything is measured: for estimates of how long a run will be, and for nothing else.
    """

    options: Callable[[Problem], HeadOptions] | None = None
    pace: float = 1.1
    first: float = 0.2


def liger_rows(shape: Shape) -> int:
    """Return the rows of a chunk that Liger's default takes: the logits of a chunk are about as large as the input."""
    chunks = -(-shape.V // shape.D)
    rows = -(-shape.N // chunks)
    return min(shape.N, 1 << (rows - 1).bit_length())


def liger_mib(problem: Problem) -> float:
    """Return the MiB that Liger's default takes above the gradients: one chunk of logits."""
    return liger_rows(problem.shape) * problem.shape.V * problem.dtype.itemsize / MIB


def lowtide_peer(name: str, about: str, workspace_mib: Callable[[Problem], float | None]) -> LossPeer:
    """Return lowtide with so much workspace as a peer; the setting says the rest."""

    def options(problem: Problem) -> HeadOptions:
        return HeadOptions(workspace_mib=workspace_mib(problem), accumulate=problem.setting.accumulate)

    def build(problem: Problem) -> Loss:
        chosen = options(problem)
        return lambda x, w, y, reduction: linear_cross_entropy(x, w, y, reduction=reduction, options=chosen)

    return LossPeer(name, about, build, options=options)


def _naive(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy((x @ w.T).float(), y, reduction=reduction)


def _compiled(problem: Problem) -> Loss:
    del problem
    torch.compiler.reset()  # else the second shape is compiled for any shape, which is slower
    return torch.compile(_naive, dynamic=False)


def _torch(**options: Any) -> Callable[[Problem], Loss]:
    def build(problem: Problem) -> Loss:
        del problem
        if not hasattr(F, "linear_cross_entropy"):
            raise CannotError(f"torch {torch.__version__} has no linear_cross_entropy")
        chosen = importlib.import_module("torch.nn").LinearCrossEntropyOptions(**options)
        fused: Any = F.linear_cross_entropy
        return lambda x, w, y, reduction: fused(x, w, y, reduction=reduction, options=chosen)

    return build


def _liger(**options: Any) -> Callable[[Problem], Loss]:
    def build(problem: Problem) -> Loss:
        _needs_cuda(problem)
        module = importlib.import_module("liger_kernel.transformers.functional")
        return lambda x, w, y, reduction: module.liger_fused_linear_cross_entropy(
            x, w, y, reduction=reduction, **options
        )

    return build


def _cce(**options: Any) -> Callable[[Problem], Loss]:
    def build(problem: Problem) -> Loss:
        _needs_cuda(problem)
        module = importlib.import_module("cut_cross_entropy")
        return lambda x, w, y, reduction: module.linear_cross_entropy(x, w, y, reduction=reduction, **options)

    return build


def _quack(problem: Problem) -> Loss:
    _needs_cuda(problem)
    if problem.setting.reduction == "none":
        raise CannotError("has no reduction none in chunks")
    module = importlib.import_module("quack.linear_cross_entropy")
    return lambda x, w, y, reduction: module.chunked_linear_cross_entropy(x, w, y, reduction=reduction)


def _trl(problem: Problem) -> Loss:
    del problem
    utils = importlib.import_module("trl.trainer.utils")
    function, columns = utils._ChunkedLogProbFunction, utils._CHUNKED_LOGPROB_CHUNK_SIZE

    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        logprobs: Tensor = function.apply(x, w, None, y, 1.0, columns, None, 1.0, ())[0]
        return -(logprobs.mean() if reduction == "mean" else logprobs)

    return loss


def _needs_cuda(problem: Problem) -> None:
    if problem.device.type != "cuda":
        raise CannotError("runs on GPUs only")


PEERS = {
    peer.name: peer
    for peer in (
        lowtide_peer(LOWTIDE, "as it comes", lambda _: None),
        lowtide_peer(LOWTIDE_AT_LIGERS, "in the memory that Liger's default takes", liger_mib),
        LossPeer("naive", "F.cross_entropy of float32 logits", lambda _: _naive, pace=2.0),
        LossPeer("compile", "torch.compile of naive", _compiled, pace=1.2, first=5.0),
        LossPeer("torch", "F.linear_cross_entropy, its own choice of chunks", _torch(), pace=4.5),
        LossPeer("torch-4096", "the same, 4096 rows", _torch(batch_chunk_size=4096, chunking_method=None), pace=1.9),
        LossPeer(LIGER, "Liger's default", _liger(), "liger-kernel", pace=2.0),
        LossPeer(
            "liger-large",
            "Liger with large chunks and a float32 sum",
            _liger(chunk_mem_const=8, accum_dtype=torch.float32),
            "liger-kernel",
            pace=1.3,
        ),
        LossPeer("cce", "cut cross entropy, small gradients dropped", _cce(), "cut-cross-entropy", pace=4.7, first=2.0),
        LossPeer(
            "cce-exact",
            "cut cross entropy, all gradients",
            _cce(filter_eps=None),
            "cut-cross-entropy",
            pace=4.7,
            first=2.0,
        ),
        LossPeer("quack", "quack's chunked loss", _quack, "quack-kernels", first=2.0),
        LossPeer("trl", "TRL's chunked log-probabilities", _trl, "trl", pace=1.6),
    )
}
