"""Who computes the loss: peers, imported when their turn comes. N tokens, D hidden size, V vocabulary.

A peer that cannot do what a setting requests raises `CannotError`; that, a failed import and a failed run are rows
with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.bench.harness import CannotError, Peer, by_name, compiled, needs_cuda
from lowtide.bench.problem import PLAIN, Problem
from lowtide.bench.shapes import Shape
from lowtide.bench.task import Function, Task
from lowtide.bench.way import (
    CHECKPOINT,
    CHECKPOINT_COMPILED,
    CHUNKS,
    LIGER,
    LIGER_SM90,
    LOWTIDE,
    QUACK,
    TORCH,
    TORCHTUNE,
    TRL,
)
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions

T = TypeVar("T")
OfLogits = Callable[[Tensor, Tensor], T]  # of a chunk's logits [C, V] in their own dtype, and its targets
Loss = Callable[[Tensor, Tensor, Tensor, str], Tensor]  # x [N, D], w [V, D], y [N], reduction
IGNORED = -100
TRL_TILE = (4096, 32768)  # tokens and classes of the logits that TRL 1.16 holds at a time
LOWTIDE_AT_LIGERS = "lowtide-liger-memory"


def checkpointed(of_logits: OfLogits[T], x: Tensor, w: Tensor, y: Tensor) -> list[T]:
    """Return the function of each chunk, its projection recomputed: one chunk's logits at a time in memory."""

    def run(x: Tensor, w: Tensor, y: Tensor) -> T:
        return of_logits(x @ w.T, y)

    parts = zip(x.chunk(CHUNKS), [w] * CHUNKS, y.chunk(CHUNKS), strict=False)
    return [checkpoint(run, *part, use_reentrant=False) for part in parts]


def projected_first(of_logits: OfLogits[T], x: Tensor, w: Tensor, y: Tensor) -> list[T]:
    """Return the function of each chunk, as torchtune: all logits are saved in the inputs' dtype, upcast by chunk."""
    logits = [part @ w.T for part in x.chunk(CHUNKS)]
    return list(map(of_logits, logits, y.chunk(CHUNKS)))


def token_losses(z: Tensor, y: Tensor) -> Tensor:
    """Return each token's cross entropy from logits in their own dtype, upcast here."""
    return F.cross_entropy(z.float(), y, reduction="none")


def _in_chunks(form: Callable[..., list[Tensor]], *, compile: bool) -> Callable[[Problem], Loss]:
    """Return one of the two forms above; ``compile``: upcast and loss."""

    def make(_: Problem) -> Loss:
        of_logits = compiled(token_losses) if compile else token_losses

        def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
            losses = torch.cat(form(of_logits, x, w, y))
            return losses if reduction == "none" else losses.sum() / (y != IGNORED).sum()

        return loss

    return make


def liger_rows(shape: Shape) -> int:
    """Return the rows of a chunk that Liger's default takes: the logits of a chunk are about as large as the input."""
    chunks = -(-shape.V // shape.D)
    rows = -(-shape.N // chunks)
    return min(shape.N, 1 << (rows - 1).bit_length())


def liger_mib(problem: Problem) -> float:
    """Return the MiB that Liger's default takes above the gradients: one chunk of logits."""
    return liger_rows(problem.shape) * problem.shape.V * problem.dtype.itemsize / 2**20


def lowtide_peer(name: str, workspace_mib: Callable[[Problem], float | None]) -> Peer:
    """Return lowtide with so much workspace as a peer; the setting has the other options."""

    def options(problem: Problem) -> HeadOptions:
        return HeadOptions(workspace_mib=workspace_mib(problem), accumulate=problem.setting.accumulate)

    def make(problem: Problem) -> Loss:
        more: dict[str, Any] = {"options": options(problem), "softcap": problem.setting.softcap}
        return lambda x, w, y, reduction: linear_cross_entropy(x, w, y, reduction=reduction, **more)

    return replace(_peer(name, make), options=options)


def _naive(problem: Problem) -> Loss:
    cap = problem.setting.cap

    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(cap((x @ w.T).float()), y, reduction=reduction)

    return loss


def _torch(_: Problem) -> Loss:
    """PyTorch's own, with its own choice of chunks."""
    if not hasattr(F, "linear_cross_entropy"):
        raise CannotError(f"torch {torch.__version__} has no linear_cross_entropy. Install torch 2.13 or newer")
    fused: Any = F.linear_cross_entropy
    return lambda x, w, y, reduction: fused(x, w, y, reduction=reduction)


def on_cuda(module: str, function: str, **options: Any) -> Callable[[Problem], Loss]:
    """Return what imports a package's loss for GPUs, with these keyword arguments."""

    def make(problem: Problem) -> Loss:
        needs_cuda(problem.device)
        loss, cap = getattr(importlib.import_module(module), function), problem.setting.softcap
        more = options if cap is None else {**options, "softcap": cap}
        return lambda x, w, y, reduction: loss(x, w, y, reduction=reduction, **more)

    return make


_liger = partial(on_cuda, "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
cce = partial(on_cuda, "cut_cross_entropy", "linear_cross_entropy")


def _the_mean(problem: Problem) -> None:
    if problem.setting.reduction == "none":
        raise CannotError("has no reduction none in chunks")


def _quack(problem: Problem) -> Loss:
    _the_mean(problem)
    # 0.6.5 takes no chunks of as many rows as the hidden size has numbers
    options = {"chunk_size": 2048} if problem.shape.D == 4096 else {}
    return on_cuda("quack.linear_cross_entropy", "chunked_linear_cross_entropy", **options)(problem)


def _liger_sm90(problem: Problem) -> Loss:
    needs_cuda(problem.device)
    _the_mean(problem)
    module: Any = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    apply = module.LigerFusedLinearCrossEntropySM90Function.apply
    return lambda x, w, y, reduction: apply(x, w, y, IGNORED, reduction)


def trl_logprobs(x: Tensor, w: Tensor, y: Tensor, *, columns: int = TRL_TILE[1], outputs: tuple[str, ...] = ()) -> Any:
    """Return TRL's log-probabilities [N], and the other outputs requested, in chunks of so many classes."""
    function: Any = importlib.import_module("trl.kernels").ChunkedLogProbFunction
    return function.apply(x, w, None, y, 1.0, columns, None, 1.0, outputs)


def _trl(_: Problem) -> Loss:
    importlib.import_module("trl.kernels")

    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        valid = y != IGNORED
        losses: Tensor = -trl_logprobs(x, w, y.where(valid, 0))[0].where(valid, 0)
        return losses.sum() / valid.sum() if reduction == "mean" else losses

    return loss


LOSSES: dict[str, Callable[[Problem], Loss]] = {}  # by the name of the peer
CAPS = {"naive", "compile", LIGER, "liger-large", "cce", "cce-exact", LOWTIDE, LOWTIDE_AT_LIGERS}  # know a soft cap


def _peer(name: str, make: Callable[[Problem], Loss], package: str = "") -> Peer:
    def build(task: Task) -> Function:
        head = task.head
        if head.setting.softcap is not None and name.partition(" ")[0] not in CAPS:
            raise CannotError("measured here without a soft cap")
        loss = make(head)
        return lambda: {"loss": loss(head.x, head.w, head.y, head.setting.reduction)}

    LOSSES[name] = make
    return Peer(name, build, package)


PEERS = by_name(
    lowtide_peer(LOWTIDE, lambda _: None),
    lowtide_peer(LOWTIDE_AT_LIGERS, liger_mib),
    _peer("naive", _naive),
    _peer("compile", lambda problem: compiled(_naive(problem))),
    _peer(LIGER, _liger(), "liger-kernel"),
    _peer("liger-large", _liger(chunk_mem_const=8, accum_dtype=torch.float32), "liger-kernel"),
    _peer("cce", cce(), "cut-cross-entropy"),  # small gradients dropped
    _peer("cce-exact", cce(filter_eps=None), "cut-cross-entropy"),
    _peer(TORCH, _torch),
    _peer(TRL, _trl, "trl"),
    _peer(QUACK, _quack, "quack-kernels"),
    _peer(LIGER_SM90, _liger_sm90, "liger-kernel"),
    _peer(CHECKPOINT, _in_chunks(checkpointed, compile=False)),
    _peer(CHECKPOINT_COMPILED, _in_chunks(checkpointed, compile=True)),
    _peer(TORCHTUNE, _in_chunks(projected_first, compile=True)),
)


def loss_on(name: str, w: Tensor) -> Loss:
    """Return the loss of a peer by its name, for this weight [V, D]; `CannotError` where the peer does not run."""
    x, y = w.detach()[:0], torch.empty(0, device=w.device, dtype=torch.int64)
    shape = Shape("", 0, w.shape[1], w.shape[0])
    problem = Problem(shape=shape, setting=PLAIN, dtype=w.dtype, x=x, w=w, y=y, g=torch.empty(0))
    loss: Loss = replace(PEERS[name], build=LOSSES[name]).built(problem)
    return loss
