"""Time, peak memory and errors of a student's mean divergence from a teacher, forward and backward for the student.

    python benchmarks/divergence.py --only lowtide trl

The limit is the bare GEMMs of both sides' logits and the student's two gradients. lowtide's first row is of the mean,
lowtide-none of a value per token. D is the student's hidden size, the fourth number the teacher's.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from script import main
from torch import Tensor

from lowtide import linear_divergence
from lowtide.bench.case import Case, Function, Values, make_case, measure_cases, wider
from lowtide.bench.harness import Peer, Run, by_name, compiled, gpu_module
from lowtide.bench.settings import Shape, ShapeSettings, setting, shape_setting

LIKENESS = 0.8  # correlation of the teacher's hidden states with the student's, in the coordinates that both have
KINDS = {  # linear_divergence's name, and the teacher's share of the mixture
    "forward-kl": ("forward_kl", 0.0, "KL(teacher || student)"),
    "reverse-kl": ("reverse_kl", 1.0, "KL(student || teacher)"),
    "jsd": ("jsd", 0.5, "JSD(0.5)"),
}
SIZES = ("N", "D", "V", "teacher_D")
NAMED = {"llama-8b-to-1b": (8192, 2048, 128256, 4096), "llama-8b-to-8b": (4096, 4096, 128256, 4096)}


@dataclass(frozen=True, kw_only=True)
class DivergenceCase(Case):
    teacher: Case
    kind: str
    beta: float

    def call(self, function: Function) -> Values:
        return (function(self.x, self.w, self.teacher.x, self.teacher.w),)

    @property
    def flops(self) -> int:
        return super().flops + self.teacher.flops

    def bare(self, size: int) -> None:
        self.teacher.bare(size)
        super().bare(size)

    def values_of(self, z: Tensor, rows: slice) -> Values:
        with torch.no_grad():
            x, w = (t.to(wider(self.x.dtype)) for t in (self.teacher.x[rows], self.teacher.w))
            teacher_z = (x @ w.T).double()
        return (divergence_of(z, teacher_z, self.beta),)


def divergence_of(z: Tensor, teacher_z: Tensor, beta: float) -> Tensor:
    """Return the generalised JSD [N] of all logits [N, V]; the KLs for ``beta`` 0 and 1."""
    s, t = z.log_softmax(-1), teacher_z.log_softmax(-1)
    if beta == 0:
        return (t.exp() * (t - s)).sum(-1)
    if beta == 1:
        return (s.exp() * (s - t)).sum(-1)
    m = torch.lerp(s.exp(), t.exp(), beta).log()
    return beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)


def cases(run: Run, shape: Shape) -> Iterator[DivergenceCase]:
    """Yield the requested divergences of a student from a teacher that is like it, as after some training.

    In the first of its coordinates, as many as the student has, the teacher's hidden states are correlated with the
    student's, and its weights are the student's.
    """
    student = make_case(shape, run.dtype, run.device)
    theirs = Shape(N=shape.N, D=shape.teacher_D, V=shape.V)
    teacher = make_case(theirs, run.dtype, run.device, seed=1)
    both = min(shape.D, shape.teacher_D)
    with torch.no_grad():
        x = teacher.x[:, :both]
        x.copy_(LIKENESS * student.x[:, :both] + (1 - LIKENESS**2) ** 0.5 * x)
        torch.mul(student.w[:, :both], (shape.D / shape.teacher_D) ** 0.5, out=teacher.w[:, :both])
    fixed = tuple(leaf.detach() for leaf in teacher.leaves)
    teacher = dataclasses.replace(teacher, leaves=fixed, gemms=1, upstream=())
    for work in run.config.work or KINDS:
        kind, beta, title = KINDS[work]
        name = f"{title}, forward and backward, teacher's D {shape.teacher_D}"
        about: Any = {**vars(student), "name": name, "names": ("value",), "teacher": teacher}
        yield DivergenceCase(**about, kind=kind, beta=beta)


def _naive(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, *, beta: float) -> Tensor:
    return divergence_of((x @ w.T).float(), (teacher_x @ teacher_w.T).float(), beta)


def _trl(case: DivergenceCase) -> Function:
    function: Any = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    return lambda x, w, teacher_x, teacher_w: function.apply(x, w, None, teacher_x, teacher_w, None, case.beta)[0]


def _liger(case: DivergenceCase) -> Function:
    loss = gpu_module(case, "liger_kernel.transformers.fused_linear_jsd").LigerFusedLinearJSD(jsd_beta=case.beta)
    return lambda x, w, teacher_x, teacher_w: loss(x, w, teacher_x, teacher_w, None)


def _lowtide(reduction: str, case: DivergenceCase) -> Function:
    return partial(linear_divergence, kind=case.kind, beta=case.beta, reduction=reduction)


PEERS = by_name(
    Peer("lowtide", partial(_lowtide, "mean")),  # whose gradients are computed in forward
    Peer("lowtide-none", partial(_lowtide, "none")),
    Peer("naive", lambda case: partial(_naive, beta=case.beta)),
    Peer("compile", lambda case: partial(compiled(_naive), beta=case.beta)),
    Peer("trl", _trl, "trl"),
    Peer("liger-jsd", _liger, "liger-kernel"),  # a mean with its gradients in forward
)


@dataclass(frozen=True, kw_only=True)
class DivergenceConfig(ShapeSettings):
    benchmark = "divergence"
    shape: tuple[str, ...] = shape_setting("llama-8b-to-1b", SIZES, NAMED)
    only: tuple[str, ...] = setting((), "measure these alone", metavar="PEER", names=PEERS)
    work: tuple[str, ...] = setting((), "these divergences alone", metavar="WORK", names=KINDS)


measure = partial(measure_cases, cases=cases)


if __name__ == "__main__":
    sys.exit(main(measure, DivergenceConfig, __doc__, PEERS))
