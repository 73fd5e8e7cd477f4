"""Time, peak memory and errors of a student's mean divergence from a teacher, forward and backward for the student.

    python benchmarks/divergence.py --skip compile

The limit is the bare GEMMs of both sides' logits and the student's two gradients. lowtide's first row is of the mean,
lowtide-none of a value per token. D is the student's hidden size, the fourth number the teacher's.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from script import main
from torch import Tensor

from lowtide import linear_divergence
from lowtide.bench.config import TokenBenchConfig
from lowtide.bench.harness import CannotError, Peer, Run, by_name, compiled, needs_cuda
from lowtide.bench.problem import Problem, Setting, make_problem
from lowtide.bench.shapes import Choice, Shape
from lowtide.bench.task import Function, Task, Values, token_benchmark, wider

LIKENESS = 0.8  # correlation of the teacher's hidden states with the student's, in the coordinates that both have
KINDS = {  # linear_divergence's name, and the teacher's share of the mixture
    "forward-kl": ("forward_kl", 0.0, "KL(teacher || student)"),
    "reverse-kl": ("reverse_kl", 1.0, "KL(student || teacher)"),
    "jsd": ("jsd", 0.5, "JSD(0.5)"),
}


@dataclass(frozen=True)
class PairShape(Shape):
    """A student's output layer, and the hidden size of its teacher."""

    teacher_D: int


NAMED = {
    "llama-8b-to-1b": PairShape("llama-8b-to-1b", 8192, 2048, 128256, 4096),
    "llama-8b-to-8b": PairShape("llama-8b-to-8b", 4096, 4096, 128256, 4096),
}


@dataclass(frozen=True, kw_only=True)
class DivergenceConfig(TokenBenchConfig):
    benchmark, program = "divergence", "python benchmarks/{benchmark}.py"
    choice = Choice(PairShape, "N,D,V,D of the teacher", "llama-8b-to-1b", NAMED)
    known: ClassVar = {
        "peers": ("lowtide", "lowtide-none", "naive", "compile", "trl", "liger-jsd", "liger-kl"),
        "works": tuple(KINDS),
    }


@dataclass(frozen=True, kw_only=True)
class DivergenceTask(Task):
    teacher: Problem
    kind: str
    beta: float


def divergence_of(z: Tensor, teacher_z: Tensor, beta: float) -> Tensor:
    """Return the generalised JSD [N] of all logits [N, V]; the KLs for ``beta`` 0 and 1."""
    s, t = z.log_softmax(-1), teacher_z.log_softmax(-1)
    if beta == 0:
        return (t.exp() * (t - s)).sum(-1)
    if beta == 1:
        return (s.exp() * (s - t)).sum(-1)
    m = torch.lerp(s.exp(), t.exp(), beta).log()
    return beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)


def tasks(run: Run[DivergenceConfig], shape: PairShape) -> Iterator[DivergenceTask]:
    """Yield the requested divergences of a student from a teacher that is like it, as after some training.

    In the first of its coordinates, as many as the student has, the teacher's hidden states are correlated with the
    student's, and its weights are the student's.
    """
    student = make_problem(shape, run.dtype, run.device, seed=run.config.seed)
    theirs = dataclasses.replace(shape, D=shape.teacher_D)
    teacher = make_problem(theirs, run.dtype, run.device, seed=run.config.seed + 1)
    teacher = teacher.in_setting(Setting(name="teacher", gemms=1, grad=False))
    both = min(shape.D, shape.teacher_D)
    with torch.no_grad():
        x = teacher.x[:, :both]
        x.copy_(LIKENESS * student.x[:, :both] + (1 - LIKENESS**2) ** 0.5 * x)
        torch.mul(student.w[:, :both], (shape.D / shape.teacher_D) ** 0.5, out=teacher.w[:, :both])
    for work in run.config.chosen("works"):
        kind, beta, title = KINDS[work]
        head = student.in_setting(Setting(name=f"{title}, forward and backward, teacher's D {shape.teacher_D}"))

        def values_of(z: Tensor, rows: slice, beta: float = beta) -> Values:
            x, w = (t.to(wider(run.dtype)) for t in (teacher.x[rows], teacher.w))
            return {"value": divergence_of(z, (x @ w.T).double(), beta)}

        yield DivergenceTask(
            head=head, names=("value",), upstream={"value": head.g}, values_of=values_of, others=(teacher,),
            teacher=teacher, kind=kind, beta=beta,
        )  # fmt: skip


Divergence = Callable[..., Tensor]  # of hidden states and weight of both: [N], or the mean


def _lowtide(reduction: str, task: DivergenceTask) -> Divergence:
    return partial(linear_divergence, kind=task.kind, beta=task.beta, reduction=reduction)


def _naive(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, *, beta: float) -> Tensor:
    return divergence_of((x @ w.T).float(), (teacher_x @ teacher_w.T).float(), beta)


def _trl(task: DivergenceTask) -> Divergence:
    function: Any = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    return lambda x, w, teacher_x, teacher_w: function.apply(x, w, None, teacher_x, teacher_w, None, task.beta)[0]


def _liger(task: DivergenceTask) -> Divergence:
    needs_cuda(task.head.device)
    loss = importlib.import_module("liger_kernel.transformers.fused_linear_jsd").LigerFusedLinearJSD(jsd_beta=task.beta)
    return lambda x, w, teacher_x, teacher_w: loss(x, w, teacher_x, teacher_w, None)


def _liger_kl(task: DivergenceTask) -> Divergence:
    if task.kind != "forward_kl":
        raise CannotError("computes the forward KL alone")
    needs_cuda(task.head.device)
    module: Any = importlib.import_module("liger_kernel.transformers.fused_linear_kl_div")
    loss = module.LigerFusedLinearKLDivLoss(reduction="batchmean")
    return lambda x, w, teacher_x, teacher_w: loss(x, w, (teacher_x @ teacher_w.T).float().softmax(-1))


def _peer(name: str, make: Callable[[DivergenceTask], Divergence], package: str = "") -> Peer:
    def build(task: DivergenceTask) -> Function:
        function = make(task)
        return lambda: {"value": function(task.head.x, task.head.w, task.teacher.x, task.teacher.w)}

    return Peer(name, build, package)


PEERS = by_name(
    _peer("lowtide", partial(_lowtide, "mean")),  # its gradients in forward
    _peer("lowtide-none", partial(_lowtide, "none")),
    _peer("naive", lambda task: partial(_naive, beta=task.beta)),
    _peer("compile", lambda task: partial(compiled(_naive), beta=task.beta)),
    _peer("trl", _trl, "trl"),
    _peer("liger-jsd", _liger, "liger-kernel"),  # a mean with its gradients in forward
    _peer("liger-kl", _liger_kl, "liger-kernel"),  # of all the teacher's probabilities
)
DIVERGENCE = token_benchmark(tasks, PEERS)

if __name__ == "__main__":
    sys.exit(main(DIVERGENCE, DivergenceConfig, __doc__))
