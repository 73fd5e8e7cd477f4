"""Who computes the loss: peers, imported when their turn comes. N tokens, D hidden size, V vocabulary.

A peer that cannot do what a setting requests raises `CannotError`; that, a failed import and a failed run are rows
with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.chunked_losses import (
    IGNORED,
    ToGradient,
    checkpointed,
    gradients_in_forward,
    projected_first,
    reduced,
    softmax_in_place,
    token_losses,
)
from lowtide.bench.harness import CannotError, Peer, by_name, compiled, needs_cuda
from lowtide.bench.problem import PLAIN, Problem
from lowtide.bench.shapes import Shape
from lowtide.bench.task import Function, Task
from lowtide.bench.way import (
    AUTO_CHUNKER,
    CHECKPOINT,
    CHECKPOINT_COMPILED,
    CHUNKS,
    FORWARD,
    FORWARD_TRITON,
    LIGER,
    LIGER_SM90,
    LOWTIDE,
    NEEDS,
    QUACK,
    TORCH,
    TORCH_CUTE,
    TORCHTUNE,
    TRL,
)
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions
from lowtide.head.planner import MIB

Loss = Callable[[Tensor, Tensor, Tensor, str], Tensor]  # x [N, D], w [V, D], y [N], reduction
TRL_TILE = (4096, 32768)  # tokens and classes of the logits (float32 for divergences) that TRL 1.16 holds at a time
LOWTIDE_AT_LIGERS = "lowtide-liger-memory"
FLOAT32_HEAD = "lowtide-float32-head"  # casts of the inputs: lowtide sees that they are
_OPERATOR = "linear_cross_entropy_batch_chunked"  # part of the names of those behind F.linear_cross_entropy


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
        more: dict[str, Any] = {"options": options(problem), "softcap": problem.setting.softcap}
        return lambda x, w, y, reduction: linear_cross_entropy(x, w, y, reduction=reduction, **more)

    return dataclasses.replace(_peer(name, make), options=options)


def _naive(problem: Problem) -> Loss:
    cap = problem.setting.cap

    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(cap((x @ w.T).float()), y, reduction=reduction)

    return loss


def cast_to_float32(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and weight as trainers cast a head to float32."""
    return x.float(), w.float()


def not_float32(problem: Problem) -> None:
    """Raise `CannotError` where hidden states are float32 already, for a peer that casts them."""
    if problem.x.dtype == torch.float32:
        raise CannotError("casts hidden states and weight of bfloat16, and these are float32")


def _float32_head(problem: Problem) -> Loss:
    not_float32(problem)
    cap = problem.setting.softcap
    return lambda x, w, y, reduction: linear_cross_entropy(*cast_to_float32(x, w), y, reduction=reduction, softcap=cap)


def _torch(*, cutedsl: bool = False, **options: Any) -> Callable[[Problem], Loss]:
    """PyTorch's own, with its CuTe kernel or without: PyTorch takes that wherever it is registered.

    It is (torch 2.15) where nvidia-cutlass-dsl, of a version that this torch accepts, and apache-tvm-ffi are installed.
    Each call switches it, as peers alternate; when the loss is dropped, it is on as before.
    """

    def make(problem: Problem) -> Loss:
        if not hasattr(F, "linear_cross_entropy"):
            raise CannotError(f"torch {torch.__version__} has no linear_cross_entropy. Install torch 2.13 or newer")
        operators = _cute_operators()
        if cutedsl:
            needs_cuda(problem.device)
            if not operators:
                hint = "Install torch 2.15 or newer for CUDA, nvidia-cutlass-dsl of a version it accepts, and"
                raise CannotError(f"torch {torch.__version__} has no CuTe kernel for it here. {hint} apache-tvm-ffi")
        chosen = importlib.import_module("torch.nn").LinearCrossEntropyOptions(**options)
        fused: Any = F.linear_cross_entropy

        def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
            _switch(operators, on=cutedsl)
            value: Tensor = fused(x, w, y, reduction=reduction, options=chosen)
            return value

        weakref.finalize(loss, _switch, operators, on=True)
        return loss

    return make


def _cute_operators() -> list[str]:
    """Return those behind `F.linear_cross_entropy` that have a CuTe kernel."""
    with contextlib.suppress(ModuleNotFoundError):
        native: Any = importlib.import_module("torch.backends.python_native")
        return [name for name in native.get_dsl_operations("cutedsl") if _OPERATOR in name]
    return []


def _switch(operators: list[str], *, on: bool) -> None:
    """Have these operators' CuTe kernels on or off; the switch itself is slow, and left where it is already right."""
    native: Any = importlib.import_module("torch.backends.python_native") if operators else None
    if changed := [name for name in operators if native.is_operation_disabled(name) == on]:
        (native.enable_operations if on else native.disable_operations)(*changed)


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


def one_loss(problem: Problem) -> None:
    """Raise `CannotError` where each token's loss is requested, for a peer that computes their mean alone."""
    if problem.setting.reduction == "none":
        raise CannotError("has no reduction none in chunks")


def _quack(problem: Problem) -> Loss:
    needs_cuda(problem.device)
    one_loss(problem)
    # 0.6.5 takes no chunks of as many rows as the hidden size has numbers
    options = {"chunk_size": 2048} if problem.shape.D == 4096 else {}
    return on_cuda("quack.linear_cross_entropy", "chunked_linear_cross_entropy", **options)(problem)


def _liger_sm90(problem: Problem) -> Loss:
    needs_cuda(problem.device)
    one_loss(problem)
    module: Any = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    apply = module.LigerFusedLinearCrossEntropySM90Function.apply
    return lambda x, w, y, reduction: apply(x, w, y, IGNORED, reduction)


def _auto_chunker(problem: Problem) -> Loss:
    """Return the naive loss compiled with inductor's auto-chunker, which takes 8 chunks by itself.

    Where it cannot chunk, it compiles silently: hence the count, which graphs out of a cache are not in. The
    caches are off while a number of tokens is compiled, and only then.
    """
    one_loss(problem)
    if not hasattr(importlib.import_module("torch._inductor.config"), "auto_chunker"):
        raise CannotError(f"torch {torch.__version__} has no auto-chunker. Install a newer torch")
    metrics: Any = importlib.import_module("torch._inductor.metrics")
    uncached = partial(importlib.import_module("torch.compiler.config").patch, force_disable_caches=True)
    function, chunked = compiled(_naive(problem), {"auto_chunker.enable": True}), set[torch.Size]()

    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        if x.shape in chunked:
            return function(x, w, y, reduction)
        before = metrics.num_auto_chunking
        with uncached(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one about the caches
            value = function(x, w, y, reduction)
        if metrics.num_auto_chunking == before:
            raise CannotError("inductor has not chunked it: logits below its threshold, or no gradients")
        chunked.add(x.shape)
        return value

    return loss


def _trl(problem: Problem) -> Loss:
    del problem
    utils = importlib.import_module("trl.trainer.utils")
    function, columns = utils._ChunkedLogProbFunction, utils._CHUNKED_LOGPROB_CHUNK_SIZE

    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        valid = y != IGNORED
        logprobs: Tensor = function.apply(x, w, None, y.where(valid, 0), 1.0, columns, None, 1.0, ())[0]
        losses = -logprobs.where(valid, 0)
        return losses.sum() / valid.sum() if reduction == "mean" else losses

    return loss


def _in_chunks(form: Callable[..., list[Tensor]], chunks: int, *, compile: bool) -> Callable[[Problem], Loss]:
    """Return one of the two forms of `chunked_losses` that autograd differentiates; ``compile``: upcast and loss."""

    def make(problem: Problem) -> Loss:
        del problem
        losses = compiled(token_losses) if compile else token_losses
        return lambda x, w, y, reduction: reduced(form(chunks, losses, x, w, y), y, reduction)

    return make


def _in_forward(to_gradient: Callable[[Problem], ToGradient]) -> Callable[[Problem], Loss]:
    def make(problem: Problem) -> Loss:
        one_loss(problem)
        if problem.setting.wide:
            raise CannotError("computes its gradients outside autocast")
        chosen = to_gradient(problem)
        return lambda x, w, y, _: gradients_in_forward(CHUNKS, chosen, x, w, y)

    return make


def _triton(problem: Problem) -> ToGradient:
    needs_cuda(problem.device)
    kernel = importlib.import_module("lowtide.bench.chunk_kernel").gradient_in_place
    return partial(kernel, ignored=IGNORED)


LOSSES: dict[str, Callable[[Problem], Loss]] = {}  # by the name of the peer


CAPS = {"naive", "compile", LIGER, "liger-large", "cce", "cce-exact"}  # and lowtide: know a soft cap


def _peer(name: str, make: Callable[[Problem], Loss], package: str = "") -> Peer:
    def build(task: Task) -> Function:
        head = task.head
        if head.setting.softcap is not None and name not in CAPS and not name.startswith(LOWTIDE):
            raise CannotError("measured here without a soft cap")
        loss = make(head)
        return lambda: {"loss": loss(head.x, head.w, head.y, head.setting.reduction)}

    LOSSES[name] = make
    install = NEEDS[name][1] if name in NEEDS else package
    return Peer(name, build, install.partition("[")[0], install)


PEERS = by_name(
    lowtide_peer(LOWTIDE, lambda _: None),
    _peer(FLOAT32_HEAD, _float32_head),
    lowtide_peer(LOWTIDE_AT_LIGERS, liger_mib),
    _peer("naive", _naive),
    _peer("compile", lambda problem: compiled(_naive(problem))),
    _peer("torch-4096", _torch(batch_chunk_size=4096, chunking_method=None)),
    _peer(LIGER, _liger()),
    _peer("liger-large", _liger(chunk_mem_const=8, accum_dtype=torch.float32), "liger-kernel"),
    _peer("cce", cce(), "cut-cross-entropy"),  # small gradients dropped
    _peer("cce-exact", cce(filter_eps=None), "cut-cross-entropy"),
    _peer(TORCH, _torch()),  # its own choice of chunks
    _peer(TORCH_CUTE, _torch(cutedsl=True)),
    _peer(AUTO_CHUNKER, _auto_chunker),
    _peer(TRL, _trl),
    _peer(QUACK, _quack),
    _peer(LIGER_SM90, _liger_sm90),
    _peer(CHECKPOINT, _in_chunks(checkpointed, CHUNKS, compile=False)),
    _peer(CHECKPOINT_COMPILED, _in_chunks(checkpointed, CHUNKS, compile=True)),
    _peer(FORWARD, _in_forward(lambda _: softmax_in_place)),
    _peer(FORWARD_TRITON, _in_forward(_triton)),
    *(_peer(name, _in_chunks(projected_first, chunks, compile=True)) for name, chunks in TORCHTUNE.items()),
)


def loss_on(name: str, w: Tensor) -> Loss:
    """Return the loss of a peer by its name, for this weight [V, D]; `CannotError` where the peer does not run."""
    x, y = w.detach()[:0], torch.empty(0, device=w.device, dtype=torch.int64)
    shape = Shape("", 0, w.shape[1], w.shape[0])
    problem = Problem(shape=shape, setting=PLAIN, dtype=w.dtype, x=x, w=w, y=y, g=torch.empty(0))
    with PEERS[name].imports():
        return LOSSES[name](problem)
