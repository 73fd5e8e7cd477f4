"""Who computes the loss: peers, imported when their turn comes. N tokens, D hidden size, V vocabulary.

A peer that cannot do what a case requests raises `CannotError`; that, a failed import and a failed run are rows with
the reason.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.bench.case import Case, Function
from lowtide.bench.harness import CannotError, Peer, by_name, compiled, needs_cuda
from lowtide.bench.variant import LIGER, LOWTIDE
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions

T = TypeVar("T")
OfLogits = Callable[[Tensor, Tensor], T]  # of a chunk's logits [C, V] in their own dtype, and its targets
Loss = Callable[[Tensor, Tensor, Tensor, str], Tensor]  # x [N, D], w [V, D], y [N], reduction
IGNORED = -100
CHUNKS = 8  # of tokens, in the forms that users write
TRL_COLUMNS = 32768  # classes of the logits that TRL 1.16 holds at a time


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


class GradientsInForward(torch.autograd.Function):
    """The mean of the losses, chunk by chunk in plain PyTorch, each chunk's gradients computed in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        """Return the mean."""
        leaves, total = [t.detach().requires_grad_() for t in (x, w)], torch.zeros((), device=x.device)
        for rows in torch.arange(len(y)).chunk(CHUNKS):
            with torch.enable_grad():
                loss = token_losses(leaves[0][rows] @ leaves[1].T, y[rows]).sum() / len(y)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        ctx.save_for_backward(*(leaf.grad for leaf in leaves))
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, scaled."""
        return *(gradient * upstream for gradient in ctx.saved_tensors), None


def _peer(name: str, make: Callable[[Case], Loss], package: str = "", *, only_mean: bool = False) -> Peer:
    def build(case: Case) -> Function:
        if only_mean and case.per_token:
            raise CannotError("has no reduction none in chunks")
        loss, reduction = make(case), "none" if case.per_token else "mean"
        return lambda: {"loss": loss(case.x, case.w, case.y, reduction)}

    return Peer(name, build, package)


def lowtide_peer(name: str, options: HeadOptions) -> Peer:
    """Return lowtide with these options as a peer."""

    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        return linear_cross_entropy(x, w, y, reduction=reduction, options=options)

    return Peer(name, _peer(name, lambda _: loss).build, options=options)


def _in_chunks(form: Callable[..., list[Tensor]], *, compile: bool = True) -> Callable[[Case], Loss]:
    """Return one of the two forms above; ``compile``: upcast and loss."""

    def make(_: Case) -> Loss:
        of_logits = compiled(token_losses) if compile else token_losses

        def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
            losses = torch.cat(form(of_logits, x, w, y))
            return losses if reduction == "none" else losses.mean()

        return loss

    return make


def _naive(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy((x @ w.T).float(), y, reduction=reduction)


def _torch(_: Case) -> Loss:
    """PyTorch's own, with its own choice of chunks."""
    if not hasattr(F, "linear_cross_entropy"):
        raise CannotError(f"torch {torch.__version__} has no linear_cross_entropy. Install torch 2.13 or newer")
    fused: Any = F.linear_cross_entropy
    return lambda x, w, y, reduction: fused(x, w, y, reduction=reduction)


def on_cuda(module: str, function: str, **options: Any) -> Callable[[Case], Loss]:
    """Return what imports a package's loss for GPUs, with these keyword arguments."""

    def make(case: Case) -> Loss:
        needs_cuda(case.x.device)
        loss = getattr(importlib.import_module(module), function)
        return lambda x, w, y, reduction: loss(x, w, y, reduction=reduction, **options)

    return make


def _liger(**options: Any) -> Callable[[Case], Loss]:
    return on_cuda("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy", **options)


def _cce(**options: Any) -> Callable[[Case], Loss]:
    return on_cuda("cut_cross_entropy", "linear_cross_entropy", **options)


def _quack(case: Case) -> Loss:
    # 0.6.5 takes no chunks of as many rows as the hidden size has numbers
    options = {"chunk_size": 2048} if case.shape.D == 4096 else {}
    return on_cuda("quack.linear_cross_entropy", "chunked_linear_cross_entropy", **options)(case)


def _liger_sm90(case: Case) -> Loss:
    needs_cuda(case.x.device)
    module: Any = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    apply = module.LigerFusedLinearCrossEntropySM90Function.apply
    return lambda x, w, y, reduction: apply(x, w, y, IGNORED, reduction)


def liger_native(case: Case, *, entropy: bool = False) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """Return Liger's native function, from liger-cute-kernels, on a group of this process alone.

    Its function returns each token's loss, and with ``entropy`` a pair with each one's entropy.
    """
    needs_cuda(case.x.device)
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # no multicast: there is one rank
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    native: Any = importlib.import_module("liger_cute_kernels")
    if not dist.is_initialized():
        alone: Any = torch._C._distributed_c10d
        dist.init_process_group("nccl", store=alone.HashStore(), rank=0, world_size=1)
    sizes = {"max_tokens": case.shape.N, "hidden_size": case.shape.D, "local_vocab_size": case.shape.V}
    native.configure(flsce=native.FusedLinearCrossEntropyConfig(**sizes))
    module: Any = importlib.import_module("liger_kernel.ops.cute.fused_linear_scaled_cross_entropy_tp")
    apply = module.LigerFusedLinearScaledCrossEntropyNativeTPFunction.apply
    return lambda x, w, y: apply(x, w, y, 0, 1.0, IGNORED, 1, entropy, None)


def _native(case: Case) -> Loss:
    losses = liger_native(case)
    return lambda x, w, y, reduction: losses(x, w, y) if reduction == "none" else losses(x, w, y).mean()


def trl_logprobs(x: Tensor, w: Tensor, y: Tensor, outputs: tuple[str, ...] = ()) -> Any:
    """Return TRL's log-probabilities [N], and the other outputs requested."""
    function: Any = importlib.import_module("trl.kernels").ChunkedLogProbFunction
    return function.apply(x, w, None, y, 1.0, TRL_COLUMNS, None, 1.0, outputs)


def _trl(_: Case) -> Loss:
    importlib.import_module("trl.kernels")

    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        losses: Tensor = -trl_logprobs(x, w, y)[0]
        return losses.mean() if reduction == "mean" else losses

    return loss


def _in_forward(_: Case) -> Loss:
    return lambda x, w, y, _: GradientsInForward.apply(x, w, y)  # type: ignore[no-untyped-call]


PEERS = by_name(
    lowtide_peer(LOWTIDE, HeadOptions()),
    _peer("naive", lambda _: _naive),
    _peer("compile", lambda _: compiled(_naive)),
    _peer(LIGER, _liger(), "liger-kernel"),
    _peer("liger-large", _liger(chunk_mem_const=8, accum_dtype=torch.float32), "liger-kernel"),
    _peer("liger-sm90", _liger_sm90, "liger-kernel", only_mean=True),
    _peer("liger-native", _native, "liger-cute-kernels"),
    _peer("cce", _cce(), "cut-cross-entropy"),  # small gradients dropped
    _peer("cce-exact", _cce(filter_eps=None), "cut-cross-entropy"),
    _peer("quack", _quack, "quack-kernels", only_mean=True),
    _peer("trl", _trl, "trl"),
    _peer("torch", _torch),
    _peer(f"checkpoint-{CHUNKS}", _in_chunks(checkpointed, compile=False)),
    _peer(f"checkpoint-compile-{CHUNKS}", _in_chunks(checkpointed)),
    _peer(f"torchtune-{CHUNKS}", _in_chunks(projected_first)),
    _peer(f"forward-{CHUNKS}", _in_forward, only_mean=True),
)
