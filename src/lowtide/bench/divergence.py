"""The benchmark of `linear_divergence`: a student's distance from a teacher, averaged over the tokens.

N tokens, V vocabulary, D the student's hidden size and D' the teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.bench.limit import bare_gemms
from lowtide.bench.problem import Problem, Setting, make_problem
from lowtide.bench.shapes import Shape
from lowtide.bench.tokens import Task, Values
from lowtide.errors import ArgumentValueError, message

LIKENESS = 0.8  # correlation of the teacher's hidden states with the student's, in the coordinates that both have


@dataclass(frozen=True)
class PairShape:
    """A student's output layer, and the hidden size of its teacher."""

    name: str
    N: int
    D: int
    V: int
    teacher_D: int

    @property
    def student(self) -> Shape:
        """The student's shape."""
        return self._named(self.D)

    @property
    def teacher(self) -> Shape:
        """The teacher's shape."""
        return self._named(self.teacher_D)

    def _named(self, D: int) -> Shape:
        return Shape(self.name if self.name in PAIR_SHAPES else f"{self.N},{D},{self.V}", self.N, D, self.V)


PAIR_SHAPES = {
    shape.name: shape
    for shape in (
        PairShape("llama-8b-to-1b", 8192, 2048, 128256, 4096),
        PairShape("llama-8b-to-8b", 4096, 4096, 128256, 4096),
    )
}


def parse_pair(text: str) -> PairShape:
    """Return the shape of that name, or of four numbers ``N,D,V,D'``.

    Raises:
        ArgumentValueError: It is neither.
    """
    if text in PAIR_SHAPES:
        return PAIR_SHAPES[text]
    numbers = text.split(",")
    if len(numbers) == 4 and all(n.isascii() and n.isdigit() and int(n) > 0 for n in numbers):
        N, D, V, teacher_D = map(int, numbers)
        return PairShape(text, N, D, V, teacher_D)
    expected = f"{', '.join(PAIR_SHAPES)}, all or four numbers above 0: N,D,V,D of the teacher"
    raise ArgumentValueError(message("shape", expected, repr(text)))


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
    """Return the generalised JSD [N] of logits in full [N, V]; the KLs for ``beta`` 0 and 1."""
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

    Who returns the mean needs each side's logits once. A value for each token, whose upstream gradients are known in
    backward only, takes both sides' once more; its share is that of the same products.
    """

    teacher: Problem
    kind: Kind

    @property
    def flops(self) -> int:
        """See `Task`."""
        return super().flops + self.teacher.shape.flops(1)

    def bare(self, rows: int) -> Callable[[], None]:
        """See `Task`."""
        student, teacher = bare_gemms(self.head, rows), bare_gemms(self.teacher, rows)

        def run() -> None:
            teacher()
            student()

        return run

    def exact(self) -> Callable[[Tensor, slice], Values]:
        """See `Task`."""
        w = self.teacher.w.float()

        def values_of(z: Tensor, rows: slice) -> Values:
            with torch.no_grad():
                teacher_z = (self.teacher.x[rows].float() @ w.T).double()
            return {self.names[0]: divergence_of(z, teacher_z, self.kind.beta)}

        return values_of


def make_pair(
    shape: PairShape, dtype: torch.dtype, device: str | torch.device, *, seed: int = 0
) -> tuple[Problem, Problem]:
    """Return random hidden states and weights of a student, and of a teacher that is like it, as after some training.

    In the first of its coordinates, as many as the student has, the teacher's hidden states are correlated with the
    student's, and its weights are the student's.
    """
    student = make_problem(shape.student, dtype, device, seed=seed)
    teacher = make_problem(shape.teacher, dtype, device, seed=seed + 1)
    teacher = teacher.in_setting(Setting(name="teacher", gemms=1, grad=False))
    both = min(shape.D, shape.teacher_D)
    with torch.no_grad():
        x = teacher.x[:, :both]
        x.copy_(LIKENESS * student.x[:, :both] + (1 - LIKENESS**2) ** 0.5 * x)
        torch.mul(student.w[:, :both], (shape.D / shape.teacher_D) ** 0.5, out=teacher.w[:, :both])
    return student, teacher


def divergence_task(student: Problem, teacher: Problem, kind: Kind) -> DivergenceTask:
    """Return one divergence of the two: each token's upstream gradient is 1 / N, which functions of the mean can do."""
    name = f"{kind.title}, forward and backward, teacher's D {teacher.shape.D}"
    head = student.in_setting(Setting(name=name, gemms=3, reduction="mean"))
    N = head.shape.N
    upstream = {"value": torch.full((N,), 1 / N, device=head.device)}
    return DivergenceTask(head=head, names=("value",), upstream=upstream, teacher=teacher, kind=kind)


def divergence_tasks(
    works: tuple[str, ...], shape: PairShape, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[DivergenceTask]:
    """Yield the divergences of those names on one shape's random inputs."""
    student, teacher = make_pair(shape, dtype, device, seed=seed)
    for name in works:
        yield divergence_task(student, teacher, KINDS[name])
