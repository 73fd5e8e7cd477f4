"""The benchmark of `linear_logprobs` and `linear_token_stats`: log-probabilities, entropies and more of tokens.

N tokens, V vocabulary, K targets a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lowtide.bench.problem import Problem, Setting, make_problem
from lowtide.bench.shapes import Shape
from lowtide.bench.tokens import Function, Task, Values

LOGPROB, ENTROPY, LSE, MEAN_LOGIT, SUM_SQ_PROB = "logprob", "entropy", "lse", "mean_logit", "sum_sq_prob"
TOPK = "topk"  # the values, without their classes
SEVERAL = 8  # targets of a token, or highest logits


@dataclass(frozen=True)
class Work:
    """A use: the values that are wanted, and the setting; how many targets a token, and how many highest logits."""

    names: tuple[str, ...]
    setting: Setting
    targets: int = 1
    topk: int = 0
    backward_alone: bool = False


def _trained(name: str) -> Setting:
    return Setting(name=f"{name}, forward and backward", gemms=4, reduction="none")


def _asked(name: str) -> Setting:
    return Setting(name=f"{name}, no gradient", gemms=1, grad=False)


WORKS = {
    "logprob-entropy": Work((LOGPROB, ENTROPY), _trained("log-probability and entropy")),
    "logprob-entropy-backward": Work(
        (LOGPROB, ENTROPY), Setting(name="log-probability and entropy, backward alone"), backward_alone=True
    ),
    "logprob": Work((LOGPROB,), _trained("log-probability")),
    "targets": Work((LOGPROB,), _trained(f"log-probabilities of {SEVERAL} targets a token"), targets=SEVERAL),
    "logprob-forward": Work((LOGPROB,), _asked("log-probability")),
    "logprob-entropy-forward": Work((LOGPROB, ENTROPY), _asked("log-probability and entropy")),
    "all-forward": Work((LOGPROB, ENTROPY, LSE, MEAN_LOGIT, SUM_SQ_PROB), _asked("all statistics but the top k")),
    "topk-forward": Work((LSE, TOPK), _asked(f"logsumexp and {SEVERAL} highest logits"), topk=SEVERAL),
}
"""A policy that is trained, with and without an entropy bonus and on several candidates, and one that is only asked."""


def values_of(z: Tensor, y: Tensor, names: tuple[str, ...], topk: int = 0) -> Values:
    """Return the values of those names from logits in full [N, V] and targets [N] or [N, K]."""
    values = {}
    if not {LOGPROB, ENTROPY, SUM_SQ_PROB}.isdisjoint(names):
        logprobs = z.log_softmax(-1)
    if LOGPROB in names:
        values[LOGPROB] = logprobs.gather(-1, y.view(len(y), -1)).view_as(y)
    if ENTROPY in names:
        values[ENTROPY] = -(logprobs.exp() * logprobs).sum(-1)
    if LSE in names:
        values[LSE] = z.logsumexp(-1)
    if MEAN_LOGIT in names:
        values[MEAN_LOGIT] = z.mean(-1)
    if SUM_SQ_PROB in names:
        values[SUM_SQ_PROB] = logprobs.exp().square().sum(-1)
    if TOPK in names:
        values[TOPK] = z.topk(topk).values
    return values


@dataclass(frozen=True, kw_only=True)
class StatsTask(Task):
    """Statistics of the head's logits.

    Attributes:
        y: targets [N] or [N, K].
        topk: how many of the highest logits.
        backward_alone: whether forward, run once, is not measured.
    """

    y: Tensor
    topk: int = 0
    backward_alone: bool = False

    def exact(self) -> Callable[[Tensor, slice], Values]:
        """See `Task`."""
        return lambda z, rows: values_of(z, self.y[rows], self.names, self.topk)

    def run_of(self, function: Function) -> Callable[[], Values]:
        """See `Task`."""
        if not self.backward_alone:
            return super().run_of(function)
        values = function()

        def backward() -> Values:
            self.head.clear()
            self.backward(values, keep=True)
            return {name: value.detach() for name, value in values.items()}

        return backward


def stats_task(problem: Problem, work: Work, *, seed: int = 0) -> StatsTask:
    """Return a work on a problem's numbers, its upstream gradients random, of both signs, and different by value.

    Of several targets the first is the problem's, the others are random classes.
    """
    head = problem.in_setting(work.setting)
    generator = torch.Generator(head.device).manual_seed(seed + 1)
    N, V, y = head.shape.N, head.shape.V, head.y
    if work.targets > 1:
        others = torch.randint(0, V, (N, work.targets - 1), device=y.device, generator=generator)
        y = torch.cat((y[:, None], others), 1)
    upstream = {
        name: torch.randn(y.shape if name == LOGPROB else (N,), device=head.device, generator=generator) / N
        for name in work.names
    }
    return StatsTask(
        head=head, names=work.names, upstream=upstream if work.setting.grad else {}, y=y, topk=work.topk,
        backward_alone=work.backward_alone,
    )  # fmt: skip


def stats_tasks(
    works: tuple[str, ...], shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[StatsTask]:
    """Yield the works of those names on one shape's random inputs."""
    problem = make_problem(shape, dtype, device, seed=seed)
    yield from map(partial(stats_task, problem, seed=seed), (WORKS[name] for name in works))
