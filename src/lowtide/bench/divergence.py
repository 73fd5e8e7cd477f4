"""The benchmark of `linear_divergence`: a student's divergence from a teacher, averaged over the tokens.

N tokens, V vocabulary, D the student's hidden size and D' the teacher's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.bench.config import TokenBenchConfig
from lowtide.bench.harness import CannotError, Peer, Run, by_name, compiled, needs_cuda
from lowtide.bench.loss_peers import TRL_TILE
from lowtide.bench.problem import Problem, Setting, blocks, make_problem
from lowtide.bench.shapes import PairShape
from lowtide.bench.task import Function, Task, Values, token_benchmark, wider
from lowtide.bench.way import LOWTIDE
from lowtide.head.divergence import linear_divergence
from lowtide.head.options import Accumulate, HeadOptions
from lowtide.head.planner import MIB

CHECKPOINT_ROWS = 1024
LIKENESS = 0.8  # correlation of the teacher's hidden states with the student's, in the coordinates that both have


@dataclass(frozen=True)
class Kind:
    """A divergence: its name in `linear_divergence`, and the teacher's share of the mixture; 0 and 1 for the KLs."""

    name: str
    beta: float
    title: str


KINDS = {
    "forward-kl": Kind("forward_kl", 0.0, "KL(teacher || student)"),
    "reverse-kl": Kind("reverse_kl", 1.0, "KL(student || teacher)"),
    "jsd": Kind("jsd", 0.5, "JSD(0.5)"),
}


def divergence_of(z: Tensor, teacher_z: Tensor, beta: float) -> Tensor:
    """Return the generalised JSD [N] of all logits [N, V]; the KLs for ``beta`` 0 and 1."""
    s, t = z.log_softmax(-1), teacher_z.log_softmax(-1)
    if beta == 0:
        return (t.exp() * (t - s)).sum(-1)
    if beta == 1:
        return (s.exp() * (s - t)).sum(-1)
    m = torch.lerp(s.exp(), t.exp(), beta).log()
    return beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)


@dataclass(frozen=True, kw_only=True)
class DivergenceTask(Task):
    """The mean divergence of a student's head from a teacher's, and the student's gradients.

    A peer that returns the mean needs each side's logits once. A value per token, whose upstream gradients are known in
    backward only, takes both sides' once more; its share is that of the same GEMMs.
    """

    teacher: Problem
    kind: Kind


def make_pair(
    shape: PairShape, dtype: torch.dtype, device: str | torch.device, *, seed: int = 0
) -> tuple[Problem, Problem]:
    """Return random hidden states and weights of a student, and of a teacher that is like it, as after some training.

    In the first of its coordinates, as many as the student has, the teacher's hidden states are correlated with the
    student's, and its weights are the student's.
    """
    student = make_problem(shape, dtype, device, seed=seed)
    teacher = make_problem(shape.teacher, dtype, device, seed=seed + 1)
    teacher = teacher.in_setting(Setting(name="teacher", gemms=1, grad=False))
    both = min(shape.D, shape.teacher_D)
    with torch.no_grad():
        x = teacher.x[:, :both]
        x.copy_(LIKENESS * student.x[:, :both] + (1 - LIKENESS**2) ** 0.5 * x)
        torch.mul(student.w[:, :both], (shape.D / shape.teacher_D) ** 0.5, out=teacher.w[:, :both])
    return student, teacher


def divergence_task(student: Problem, teacher: Problem, kind: Kind) -> DivergenceTask:
    """Return one divergence of the two: each token's upstream gradient is 1 / N, as of the mean."""
    name = f"{kind.title}, forward and backward, teacher's D {teacher.shape.D}"
    head = student.in_setting(Setting(name=name, gemms=3, reduction="mean"))

    def values_of(z: Tensor, rows: slice) -> Values:
        x, w = (t.to(wider(head.dtype)) for t in (teacher.x[rows], teacher.w))
        with torch.no_grad():
            teacher_z = (x @ w.T).double()
        return {"value": divergence_of(z, teacher_z, kind.beta)}

    upstream, others = {"value": head.g}, (teacher,)
    return DivergenceTask(
        head=head, names=("value",), upstream=upstream, values_of=values_of, others=others, teacher=teacher, kind=kind
    )  # fmt: skip


def divergence_tasks(run: Run[TokenBenchConfig], shape: PairShape) -> Iterator[DivergenceTask]:
    """Yield the requested divergences on one shape's random inputs."""
    student, teacher = make_pair(shape, run.dtype, run.device, seed=run.config.seed)
    for name in run.config.chosen("works"):
        yield divergence_task(student, teacher, KINDS[name])


Divergence = Callable[..., Tensor]  # of a task's operands: [N], or the mean


def _lowtide(accumulate: Accumulate = "auto", reduction: str = "mean", *, at_trls: bool = False) -> Any:
    def make(task: DivergenceTask) -> Divergence:
        tiles = 2 * min(task.head.shape.N, TRL_TILE[0]) * TRL_TILE[1] * 4
        options = HeadOptions(workspace_mib=tiles / MIB if at_trls else None, accumulate=accumulate)
        kind: Any = {"kind": task.kind.name, "beta": task.kind.beta}
        return partial(linear_divergence, **kind, reduction=reduction, options=options)

    return make


def _values(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, *, beta: float) -> Tensor:
    with torch.no_grad():
        teacher_z = (teacher_x @ teacher_w.T).float()
    return divergence_of((x @ w.T).float(), teacher_z, beta)


def _whole(task: DivergenceTask, function: Callable[..., Tensor] = _values) -> Divergence:
    return partial(function, beta=task.kind.beta)


def _checkpointed(task: DivergenceTask) -> Divergence:
    whole = _whole(task)

    def values(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor) -> Tensor:
        parts = [
            checkpoint(whole, x[rows], w, teacher_x[rows], teacher_w, use_reentrant=False)
            for rows in blocks(len(x), CHECKPOINT_ROWS)
        ]
        return torch.cat(parts)

    return values


def _trl(task: DivergenceTask) -> Divergence:
    function: Any = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    return lambda x, w, teacher_x, teacher_w: function.apply(x, w, None, teacher_x, teacher_w, None, task.kind.beta)[0]


def _liger(task: DivergenceTask) -> Divergence:
    needs_cuda(task.head.device)
    module: Any = importlib.import_module("liger_kernel.transformers.fused_linear_jsd")
    loss = module.LigerFusedLinearJSD(jsd_beta=task.kind.beta)
    return lambda x, w, teacher_x, teacher_w: loss(x, w, teacher_x, teacher_w, None)


def _liger_chunked(task: DivergenceTask) -> Divergence:
    module: Any = importlib.import_module("liger_kernel.chunked_loss")
    torch.compiler.reset()
    loss = module.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=task.kind.beta)
    return lambda x, w, teacher_x, teacher_w: loss(x, w, teacher_x, teacher_w, task.head.y)


def _liger_kl(task: DivergenceTask) -> Divergence:
    if task.kind.name != "forward_kl":
        raise CannotError("computes the forward KL alone")
    needs_cuda(task.head.device)
    module: Any = importlib.import_module("liger_kernel.transformers.fused_linear_kl_div")
    loss = module.LigerFusedLinearKLDivLoss(reduction="batchmean")

    def value(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor) -> Tensor:
        with torch.no_grad():
            probabilities = (teacher_x @ teacher_w.T).float().softmax(-1)
        result: Tensor = loss(x, w, probabilities)
        return result

    return value


def _peer(name: str, make: Callable[[DivergenceTask], Divergence], package: str = "") -> Peer:
    def build(task: DivergenceTask) -> Function:
        function = make(task)
        return lambda: {"value": function(task.head.x, task.head.w, task.teacher.x, task.teacher.w)}

    return Peer(name, build, package)


DIVERGENCE_PEERS = by_name(
    _peer(LOWTIDE, _lowtide()),  # the mean, its gradients in forward
    _peer(f"{LOWTIDE}-none", _lowtide(reduction="none")),  # a value per token, as TRL's
    _peer(f"{LOWTIDE}-float32", _lowtide("float32")),
    _peer(f"{LOWTIDE}-trl-memory", _lowtide("float32", "none", at_trls=True)),  # with the scratch of TRL's tiles
    _peer("naive", _whole),
    _peer("compile", lambda task: _whole(task, compiled(_values))),
    _peer("checkpoint", _checkpointed),  # naive in chunks of 1024 tokens, recomputed in backward
    _peer("trl", _trl, "trl"),
    _peer("liger-jsd", _liger, "liger-kernel"),  # a mean with its gradients in forward
    _peer("liger-chunked", _liger_chunked, "liger-kernel"),  # its distillation loss without the hard loss
    _peer("liger-kl", _liger_kl, "liger-kernel"),  # of all the teacher's probabilities
)
DIVERGENCE = token_benchmark(divergence_tasks, DIVERGENCE_PEERS)
