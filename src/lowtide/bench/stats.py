"""The benchmark of `linear_logprobs` and `linear_token_stats`: log-probabilities and entropies of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lowtide.bench.problem import Problem, Setting, make_problem
from lowtide.bench.shapes import Shape
from lowtide.bench.tokens import Task, Values

LOGPROB, ENTROPY = "logprob", "entropy"


@dataclass(frozen=True)
class Work:
    """A use: the values that are wanted, and the setting."""

    names: tuple[str, ...]
    setting: Setting


WORKS = {
    "logprob-entropy": Work(
        (LOGPROB, ENTROPY),
        Setting(name="log-probability and entropy, forward and backward", gemms=4, reduction="none"),
    ),
    "logprob": Work((LOGPROB,), Setting(name="log-probability, forward and backward", gemms=4, reduction="none")),
    "logprob-forward": Work((LOGPROB,), Setting(name="log-probability, no gradient", gemms=1, grad=False)),
}
"""A policy that is trained, with and without an entropy bonus, and one that is only asked."""


def values_of(z: Tensor, y: Tensor, names: tuple[str, ...]) -> Values:
    """Return the values of those names from logits in full [N, V] and targets [N]."""
    logprobs = z.log_softmax(-1)
    values = {LOGPROB: logprobs.gather(-1, y[:, None])[:, 0]}
    if ENTROPY in names:
        values[ENTROPY] = -(logprobs.exp() * logprobs).sum(-1)
    return values


@dataclass(frozen=True, kw_only=True)
class StatsTask(Task):
    """Log-probabilities of the head's targets, and entropies where they are wanted."""

    def exact(self) -> Callable[[Tensor, slice], Values]:
        """See `Task`."""
        return lambda z, rows: values_of(z, self.head.y[rows], self.names)


def stats_task(problem: Problem, work: Work, *, seed: int = 0) -> StatsTask:
    """Return a work on a problem's numbers, its upstream gradients random, of both signs, and different by value."""
    head = problem.in_setting(work.setting)
    generator = torch.Generator(head.device).manual_seed(seed + 1)
    N = head.shape.N
    upstream = {name: torch.randn(N, device=head.device, generator=generator) / N for name in work.names}
    return StatsTask(head=head, names=work.names, upstream=upstream if work.setting.grad else {})


def stats_tasks(
    works: tuple[str, ...], shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[StatsTask]:
    """Yield the works of those names on one shape's random inputs."""
    problem = make_problem(shape, dtype, device, seed=seed)
    yield from map(partial(stats_task, problem, seed=seed), (WORKS[name] for name in works))
