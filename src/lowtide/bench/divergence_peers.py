"""Who computes a student's distance from a teacher from the hidden states of both. N tokens, V vocabulary."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.bench.divergence import DivergenceTask, divergence_of
from lowtide.bench.harness import CannotError, Peer
from lowtide.bench.peers import LOWTIDE
from lowtide.bench.problem import blocks
from lowtide.bench.tokens import Function, by_name
from lowtide.head.divergence import linear_divergence
from lowtide.head.options import HeadOptions
from lowtide.head.planner import MIB

TRL_TILE = (4096, 32768)  # tokens and classes of each side's float32 logits that TRL 1.16 holds at a time
CHECKPOINT_ROWS = 1024


def _lowtide(task: DivergenceTask, options: HeadOptions | None = None, reduction: str = "mean") -> Function:
    student, teacher = task.head, task.teacher
    asked: dict[str, Any] = {"kind": task.kind.name, "beta": task.kind.beta, "reduction": reduction, "options": options}
    return lambda: {"value": linear_divergence(student.x, student.w, teacher.x, teacher.w, **asked)}


def _lowtide_of_each(task: DivergenceTask) -> Function:
    return _lowtide(task, reduction="none")


def _lowtide_in_float32(task: DivergenceTask) -> Function:
    return _lowtide(task, HeadOptions(accumulate="float32"))


def _lowtide_at_trls(task: DivergenceTask) -> Function:
    tiles = 2 * min(task.head.shape.N, TRL_TILE[0]) * TRL_TILE[1] * 4
    return _lowtide(task, HeadOptions(workspace_mib=tiles / MIB, accumulate="float32"), reduction="none")


def _values(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, beta: float) -> Tensor:
    with torch.no_grad():
        teacher_z = (teacher_x @ teacher_w.T).float()
    return divergence_of((x @ w.T).float(), teacher_z, beta)


def _naive(task: DivergenceTask) -> Function:
    student, teacher = task.head, task.teacher
    return lambda: {"value": _values(student.x, student.w, teacher.x, teacher.w, task.kind.beta)}


def _compiled(task: DivergenceTask) -> Function:
    torch.compiler.reset()  # else the second task is compiled for any shape, which is slower
    student, teacher, function = task.head, task.teacher, torch.compile(_values, dynamic=False)
    return lambda: {"value": function(student.x, student.w, teacher.x, teacher.w, task.kind.beta)}


def _checkpointed(task: DivergenceTask) -> Function:
    student, teacher = task.head, task.teacher

    def run() -> dict[str, Tensor]:
        parts = [
            checkpoint(
                _values, student.x[rows], student.w, teacher.x[rows], teacher.w, task.kind.beta, use_reentrant=False
            )
            for rows in blocks(student.shape.N, CHECKPOINT_ROWS)
        ]
        return {"value": torch.cat(parts)}

    return run


def _trl(task: DivergenceTask) -> Function:
    module: Any = importlib.import_module("trl.kernels.chunked_divergence")
    student, teacher = task.head, task.teacher

    def run() -> dict[str, Tensor]:
        function = module.ChunkedDivergenceFunction
        return {"value": function.apply(student.x, student.w, None, teacher.x, teacher.w, None, task.kind.beta)[0]}

    return run


def _liger(task: DivergenceTask) -> Function:
    _needs_cuda(task)
    module: Any = importlib.import_module("liger_kernel.transformers.fused_linear_jsd")
    loss = module.LigerFusedLinearJSD(jsd_beta=task.kind.beta)
    student, teacher = task.head, task.teacher
    return lambda: {"value": loss(student.x, student.w, teacher.x, teacher.w, None)}


def _liger_chunked(task: DivergenceTask) -> Function:
    module: Any = importlib.import_module("liger_kernel.chunked_loss")
    torch.compiler.reset()
    loss = module.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=task.kind.beta)
    student, teacher = task.head, task.teacher
    return lambda: {"value": loss(student.x, student.w, teacher.x, teacher.w, student.y)}


def _liger_kl(task: DivergenceTask) -> Function:
    if task.kind.name != "forward_kl":
        raise CannotError("computes the forward KL alone")
    _needs_cuda(task)
    module: Any = importlib.import_module("liger_kernel.transformers.fused_linear_kl_div")
    loss = module.LigerFusedLinearKLDivLoss(reduction="batchmean")
    student, teacher = task.head, task.teacher

    def run() -> dict[str, Tensor]:
        with torch.no_grad():
            probabilities = (teacher.x @ teacher.w.T).float().softmax(-1)
        return {"value": loss(student.x, student.w, probabilities)}

    return run


def _needs_cuda(task: DivergenceTask) -> None:
    if task.head.device.type != "cuda":
        raise CannotError("runs on GPUs only")


DIVERGENCE_PEERS = by_name(
    Peer(LOWTIDE, "the mean, its gradients in forward", _lowtide),
    Peer(f"{LOWTIDE}-none", "a value for each token, as TRL's", _lowtide_of_each),
    Peer(f"{LOWTIDE}-float32", "the mean, dW summed in float32", _lowtide_in_float32),
    Peer(f"{LOWTIDE}-trl-memory", "as -none with the scratch of TRL's tiles, dW in float32", _lowtide_at_trls),
    Peer("naive", "log_softmax of float32 logits of both", _naive),
    Peer("compile", "torch.compile of naive", _compiled),
    Peer("checkpoint", "naive, 1024 tokens at a time, rebuilt in backward", _checkpointed),
    Peer("trl", "TRL's chunked divergence", _trl, "trl"),
    Peer("liger-jsd", "Liger's fused linear JSD, a mean with its gradients in forward", _liger, "liger-kernel"),
    Peer("liger-chunked", "Liger's chunked distillation loss, no hard loss", _liger_chunked, "liger-kernel"),
    Peer("liger-kl", "Liger's fused linear KL, of the teacher's softmax in full", _liger_kl, "liger-kernel"),
)
