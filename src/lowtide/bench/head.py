"""The head's benchmark: for each shape a table of peers, which are imported when their turn comes.

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

from lowtide.bench.case import TABLE, Bench, Case, Function, Values, make_case, values_in
from lowtide.bench.harness import Peer, Row, Run, Table, by_name, compiled, gpu_module, release
from lowtide.bench.variant import LIGER, LOWTIDE
from lowtide.errors import UnsupportedError
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.plan import plan_head

IGNORED, ENTROPY = -100, "entropy"
CHUNKS = 8  # of tokens, in the forms that users write
CCE = ("cut_cross_entropy", "linear_cross_entropy")
LIGER_LOSS = ("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
TRL_COLUMNS = 32768  # classes of the logits that TRL 1.16 holds at a time
LOSS_TABLE = Table(
    {**TABLE.columns, **dict.fromkeys(("loss_error", "dx_error", "dw_error"), "12.1e")},
    lambda row: ["{backend}, {chunks} x {chunk_rows} rows".format(**row["plan"])] if "plan" in row else [],
)


def checkpointed(of_logits: Callable[[Tensor, Tensor], Any], x: Tensor, w: Tensor, y: Tensor) -> list[Any]:
    """Return the function of each chunk's logits [C, V] and targets, its projection recomputed: one chunk's logits at a
    time in memory.
    """
    parts = zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True)
    return [checkpoint(lambda x, y: of_logits(x @ w.T, y), x, y, use_reentrant=False) for x, y in parts]


def summed_loss(z: Tensor, y: Tensor) -> Tensor:
    """Return the sum of the tokens' cross entropies from logits in their own dtype, upcast here."""
    return F.cross_entropy(z.float(), y, reduction="sum")


class GradientsInForward(torch.autograd.Function):
    """The mean of the losses, chunk by chunk in plain PyTorch, each chunk's gradients computed in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        """Return the mean."""
        x, w, total = x.detach().requires_grad_(), w.detach().requires_grad_(), torch.zeros((), device=x.device)
        for rows in torch.arange(len(y)).chunk(CHUNKS):
            with torch.enable_grad():
                loss = summed_loss(x[rows] @ w.T, y[rows]) / len(y)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        ctx.save_for_backward(x.grad, w.grad)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, scaled."""
        return *(gradient * upstream for gradient in ctx.saved_tensors), None


def naive(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Return the loss as most write it, from all logits."""
    return F.cross_entropy((x @ w.T).float(), y)


def in_chunks(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Return the loss from checkpointed chunks."""
    return torch.stack(checkpointed(summed_loss, x, w, y)).sum() / len(y)


def torch_loss(_: Case) -> Function:
    """Return PyTorch's own, with its own choice of chunks."""
    if not hasattr(F, "linear_cross_entropy"):
        raise UnsupportedError(f"torch {torch.__version__} has no linear_cross_entropy. Install torch 2.13 or newer")
    return F.linear_cross_entropy


def on_cuda(module: str, function: str, **options: Any) -> Callable[[Case], Function]:
    """Return what imports a package's loss for GPUs, with these keyword arguments."""
    return lambda case: partial(getattr(gpu_module(case, module), function), **options)


def _quack(case: Case) -> Function:
    # 0.6.5 takes no chunks of as many rows as the hidden size has numbers
    options: Any = {"reduction": "mean"} | ({"chunk_size": 2048} if case.shape.D == 4096 else {})
    return on_cuda("quack.linear_cross_entropy", "chunked_linear_cross_entropy", **options)(case)


def _liger_sm90(case: Case) -> Function:
    module = gpu_module(case, "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    return lambda x, w, y: module.LigerFusedLinearCrossEntropySM90Function.apply(x, w, y, IGNORED, "mean")


def liger_native(case: Case) -> Function:
    """Return Liger's native function, from liger-cute-kernels, on a group of this process alone: each token's loss, and
    its entropy where the case has that.
    """
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
    return lambda x, w, y: apply(x, w, y, 0, 1.0, IGNORED, 1, ENTROPY in case.names, None)


def trl(case: Case) -> Function:
    """Return TRL's function: each token's loss, and its entropy where the case has that."""
    apply: Any = importlib.import_module("trl.kernels").ChunkedLogProbFunction.apply
    outputs = tuple(name for name in case.names if name == ENTROPY)

    def losses(x: Tensor, w: Tensor, y: Tensor) -> Values:
        logprobs, *more = apply(x, w, None, y, 1.0, TRL_COLUMNS, None, 1.0, outputs)
        return -logprobs, *more[: len(outputs)]

    return losses


def _mean_of(make: Callable[[Case], Function]) -> Callable[[Case], Function]:
    def build(case: Case) -> Function:
        losses = make(case)
        return lambda x, w, y: values_in(losses(x, w, y))[0].mean()

    return build


PEERS = by_name(
    Peer(LOWTIDE, lambda _: linear_cross_entropy),
    Peer("naive", lambda _: naive),
    Peer("compile", lambda _: compiled(naive)),
    Peer(LIGER, on_cuda(*LIGER_LOSS), "liger-kernel"),
    Peer("liger-sm90", _liger_sm90, "liger-kernel"),
    Peer("liger-native", _mean_of(liger_native), "liger-cute-kernels"),
    Peer("cce", on_cuda(*CCE), "cut-cross-entropy"),  # small gradients dropped
    Peer("cce-exact", on_cuda(*CCE, filter_eps=None), "cut-cross-entropy"),
    Peer("quack", _quack, "quack-kernels"),
    Peer("trl", _mean_of(trl), "trl"),
    Peer("torch", torch_loss),
    Peer(f"checkpoint-{CHUNKS}", lambda _: in_chunks),
    Peer(f"forward-{CHUNKS}", lambda _: GradientsInForward.apply),
)


def loss_row(bench: Bench, peer: Peer) -> Row:
    """Return a peer's row of the loss, with ``loss_error``, the absolute difference, ``dx_error`` and ``dw_error``, the
    gradients' relative errors; lowtide's with the ``plan`` of `plan_head`.
    """
    case = bench.case
    row = bench.measure(peer) | {"setting": case.name, "tokens": len(case.x)}
    row |= {f"{name}_error": error for name, error in row.pop("errors", {}).items()}
    if peer.name == LOWTIDE:
        row["plan"] = asdict(plan_head(case.shape.N, case.shape.D, case.shape.V, case.x.dtype, case.x.device))
    return row


def bench_of(run: Run, shape: Any) -> Bench:
    """Return the bench of a shape's random inputs."""
    release(run.device)
    return Bench(make_case(shape, run.dtype, run.device), **run.rounds)


def measure_shape(run: Run, shape: Any) -> tuple[Bench, Row]:
    """Measure a run's peers, and return the bench and what the result has of the shape.

    That is ``limits``: milliseconds by rows of a chunk, the best of them, and its rate; ``gradients_mib``; and the rows
    of ``table``.
    """
    bench, table = bench_of(run, shape), list[Row]()
    limit = {"setting": bench.case.name, "tokens": shape.N, **bench.limits()}
    sizes = {**vars(shape), "dtype": run.dtype_name, "limits": [limit], "gradients_mib": bench.gradients_mib}
    result = {**sizes, "table": table}
    run.result |= run.rounds
    run.result.setdefault("shapes", []).append(result)
    run.fill(table, bench.title(), LOSS_TABLE, partial(loss_row, bench))
    return bench, result


def measure(run: Run) -> None:
    """Measure each shape."""
    for shape in run.config.shapes:
        measure_shape(run, shape)
