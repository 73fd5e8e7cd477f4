"""The benchmark of `linear_logprobs` and `linear_token_stats`: log-probabilities, entropies and more, per token.

N tokens, D hidden size, V vocabulary, K targets per token.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.config import TokenBenchConfig
from lowtide.bench.harness import CannotError, Peer, Run, by_name, compiled, needs_cuda
from lowtide.bench.loss_peers import IGNORED, LOSSES, PEERS, TRL_TILE, checkpointed, trl_logprobs
from lowtide.bench.problem import Problem, Setting, make_problem
from lowtide.bench.shapes import Shape
from lowtide.bench.task import Function, Task, Values, token_benchmark
from lowtide.bench.way import CHECKPOINT, LOWTIDE, QUACK, TORCH
from lowtide.head.options import HeadOptions
from lowtide.head.token_stats import linear_logprobs, linear_token_stats

LOGPROB, ENTROPY, LSE, MEAN_LOGIT, SUM_SQ_PROB = "logprob", "entropy", "lse", "mean_logit", "sum_sq_prob"
TOPK = "topk"  # the values, without their classes
SEVERAL = 8  # targets of a token, or highest logits


@dataclass(frozen=True)
class Work:
    """A use: the values, and the setting; how many targets per token, and how many highest logits; whether backward
    alone is measured, after one forward.
    """

    names: tuple[str, ...]
    setting: Setting
    targets: int = 1
    topk: int = 0
    backward_alone: bool = False


def _trained(name: str) -> Setting:
    return Setting(name=f"{name}, forward and backward", gemms=4, reduction="none")


def _scored(name: str) -> Setting:
    return Setting(name=f"{name}, no gradient", gemms=1, grad=False)


WORKS = {
    "logprob-entropy": Work((LOGPROB, ENTROPY), _trained("log-probability and entropy")),
    "logprob-entropy-backward": Work(
        (LOGPROB, ENTROPY), Setting(name="log-probability and entropy, backward alone"), backward_alone=True
    ),
    "logprob": Work((LOGPROB,), _trained("log-probability")),
    "targets": Work((LOGPROB,), _trained(f"log-probabilities of {SEVERAL} targets a token"), targets=SEVERAL),
    "logprob-forward": Work((LOGPROB,), _scored("log-probability")),
    "logprob-entropy-forward": Work((LOGPROB, ENTROPY), _scored("log-probability and entropy")),
    "all-forward": Work((LOGPROB, ENTROPY, LSE, MEAN_LOGIT, SUM_SQ_PROB), _scored("all statistics but the top k")),
    "topk-forward": Work((LSE, TOPK), _scored(f"logsumexp and {SEVERAL} highest logits"), topk=SEVERAL),
}
"""A policy that is trained, with and without an entropy bonus and on several candidates, and one that only scores."""


def values_of(z: Tensor, y: Tensor, names: tuple[str, ...], topk: int = 0) -> Values:
    """Return the values of those names from all logits [N, V] and targets [N] or [N, K]."""
    logprobs = z.log_softmax(-1) if {LOGPROB, ENTROPY, SUM_SQ_PROB}.intersection(names) else z
    functions = {
        LOGPROB: lambda: logprobs.gather(-1, y.view(len(y), -1)).view_as(y),
        ENTROPY: lambda: -(logprobs.exp() * logprobs).sum(-1),
        LSE: lambda: z.logsumexp(-1),
        MEAN_LOGIT: lambda: z.mean(-1),
        SUM_SQ_PROB: lambda: logprobs.exp().square().sum(-1),
        TOPK: lambda: z.topk(topk).values,
    }
    return {name: functions[name]() for name in names}


@dataclass(frozen=True, kw_only=True)
class StatsTask(Task):
    """Statistics of the head's logits, with targets ``y`` [N] or [N, K]."""

    work: Work
    y: Tensor

    def run_of(self, function: Function) -> Function:
        """See `Task`."""
        if not self.work.backward_alone:
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
    work = replace(work, topk=min(work.topk, V))
    if work.targets > 1:
        others = torch.randint(0, V, (N, work.targets - 1), device=y.device, generator=generator)
        y = torch.cat((y[:, None], others), 1)
    upstream = {
        name: torch.randn(y.shape if name == LOGPROB else (N,), device=head.device, generator=generator) / N
        for name in work.names
    }
    return StatsTask(
        head=head, names=work.names, upstream=upstream if work.setting.grad else {}, work=work, y=y,
        values_of=lambda z, rows: values_of(z, y[rows], work.names, work.topk),
    )  # fmt: skip


def stats_tasks(run: Run[TokenBenchConfig], shape: Shape) -> Iterator[StatsTask]:
    """Yield the requested works on one shape's random inputs."""
    seed = run.config.seed
    problem = make_problem(shape, run.dtype, run.device, seed=seed)
    for name in run.config.chosen("works"):
        yield stats_task(problem, WORKS[name], seed=seed)


def _lowtide(task: StatsTask, options: HeadOptions | None = None) -> Function:
    head, y, topk = task.head, task.y, task.work.topk or None
    if task.names == (LOGPROB,):
        return lambda: {LOGPROB: linear_logprobs(head.x, head.w, y, options=options)}

    def run() -> Values:
        stats = linear_token_stats(head.x, head.w, y, want=task.names, topk=topk, options=options)
        values = {name: getattr(stats, name) for name in task.names}
        return values if stats.topk is None else values | {TOPK: stats.topk.values}

    return run


def _lowtide_at_trls(task: StatsTask) -> Function:
    tile = min(task.head.shape.N, TRL_TILE[0]) * TRL_TILE[1] * task.head.dtype.itemsize
    return _lowtide(task, HeadOptions(workspace_mib=tile / 2**20, accumulate="float32"))


def _naive(x: Tensor, w: Tensor, y: Tensor, names: tuple[str, ...], topk: int) -> Values:
    return values_of((x @ w.T).float(), y, names, topk)


def _in_full(task: StatsTask, *, compile: bool = False) -> Function:
    if compile:
        _one_backward(task)
    head, function = task.head, compiled(_naive) if compile else _naive
    return lambda: function(head.x, head.w, task.y, task.names, task.work.topk)


def _checkpointed(task: StatsTask) -> Function:
    def of_logits(z: Tensor, y: Tensor) -> Values:
        return values_of(z.float(), y, task.names, task.work.topk)

    def run() -> Values:
        found = checkpointed(of_logits, task.head.x, task.head.w, task.y)
        return {name: torch.cat([values[name] for values in found]) for name in task.names}

    return run


def _trl(task: StatsTask) -> Function:
    _one_target(task)
    importlib.import_module("trl.kernels")
    head = task.head
    outputs = tuple(name for name in task.names if name != LOGPROB)
    return lambda: dict(zip(task.names, trl_logprobs(head.x, head.w, head.y, outputs=outputs), strict=False))


def _liger(task: StatsTask) -> Function:
    _logprobs_alone(task)
    module: Any = importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo")
    x, w, y = task.head.x, task.head.w, task.head.y
    return lambda: {LOGPROB: module.LigerFusedLinearPPOBase.chunk_forward(x[None], w, y[None])[0]}


def _liger_scaled(task: StatsTask) -> Function:
    """Liger's CuTe kernels for Hopper; elsewhere it would silently run plain PyTorch in chunks."""
    _one_target(task)
    head, entropy = task.head, ENTROPY in task.names
    needs_cuda(head.device)
    if torch.cuda.get_device_capability(head.device) != (9, 0):
        raise CannotError("its kernels are for GPUs of compute capability 9.0")
    module: Any = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    apply = module.LigerFusedLinearScaledCrossEntropyFunction.apply

    def run() -> Values:
        found = apply(head.x, head.w, head.y, 1.0, IGNORED, 1, entropy)
        return {LOGPROB: -found[0], ENTROPY: found[1]} if entropy else {LOGPROB: -found}

    return run


def _quack(task: StatsTask) -> Function:
    """quack's cross entropy of each token from all logits: its loss in chunks returns the mean alone."""
    _logprobs_alone(task)
    head = task.head
    needs_cuda(head.device)
    loss = importlib.import_module("quack.linear_cross_entropy").linear_cross_entropy_func
    return lambda: {LOGPROB: -loss(head.x, head.w, None, head.y, reduction="none")}


def _of_loss(name: str) -> Peer:
    """Return a peer of `lowtide.bench.loss_peers` whose loss of each token is the negative log-probability."""

    def build(task: StatsTask) -> Function:
        _logprobs_alone(task)
        head = task.head
        loss = LOSSES[name](replace(head, setting=replace(head.setting, reduction="none")))
        return lambda: {LOGPROB: -loss(head.x, head.w, head.y, "none")}

    return Peer(name, build, PEERS[name].package)


def _one_backward(task: StatsTask) -> None:
    if task.work.backward_alone:
        raise CannotError("frees its buffers in backward, which runs once")


def _one_target(task: StatsTask) -> None:
    if not {LOGPROB, ENTROPY}.issuperset(task.names) or task.y.dim() > 1:
        raise CannotError("computes log-probabilities of one target a token, and entropies")


def _logprobs_alone(task: StatsTask) -> None:
    _one_target(task)
    if task.names != (LOGPROB,):
        raise CannotError("computes log-probabilities and no entropy")


STATS_PEERS = by_name(
    Peer(LOWTIDE, _lowtide),
    Peer(f"{LOWTIDE}-trl-memory", _lowtide_at_trls),
    Peer("naive", _in_full),
    Peer("compile", lambda task: _in_full(task, compile=True)),
    Peer("trl", _trl, "trl"),
    Peer("liger-grpo", _liger, "liger-kernel"),  # the log-probabilities in Liger's GRPO loss
    Peer("liger-scaled", _liger_scaled, "liger-kernel"),
    Peer(QUACK, _quack, "quack-kernels"),
    *map(_of_loss, ("cce-exact", TORCH)),
    Peer(CHECKPOINT, _checkpointed),
)
STATS = token_benchmark(stats_tasks, STATS_PEERS)
