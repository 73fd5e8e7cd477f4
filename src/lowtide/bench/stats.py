"""The benchmark of `linear_logprobs` and `linear_token_stats`: log-probabilities, entropies and more, per token.

N tokens, D hidden size, V vocabulary, K targets per token.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.chunked_losses import IGNORED, checkpointed, projected_first
from lowtide.bench.config import TokenBenchConfig
from lowtide.bench.harness import CannotError, Peer, Run, by_name, compiled, needs_cuda
from lowtide.bench.loss_peers import FLOAT32_HEAD, LOSSES, PEERS, TRL_TILE, cast_to_float32, not_float32
from lowtide.bench.problem import Problem, Setting, blocks, make_problem
from lowtide.bench.shapes import Shape
from lowtide.bench.task import Function, Task, Values, token_benchmark
from lowtide.bench.way import (
    AUTO_CHUNKER,
    CHECKPOINT,
    CHECKPOINT_COMPILED,
    CHUNKS,
    LOWTIDE,
    NEEDS,
    QUACK,
    TORCH,
    TORCH_CUTE,
)
from lowtide.head.options import HeadOptions
from lowtide.head.planner import MIB
from lowtide.head.token_stats import linear_logprobs, linear_token_stats

LOGPROB, ENTROPY, LSE, MEAN_LOGIT, SUM_SQ_PROB = "logprob", "entropy", "lse", "mean_logit", "sum_sq_prob"
TOPK = "topk"  # the values, without their classes
SEVERAL = 8  # targets of a token, or highest logits
VERL_ROWS = 512  # tokens whose logits verl's fused_linear_for_ppo holds at a time


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
    values = {}
    if {LOGPROB, ENTROPY, SUM_SQ_PROB}.intersection(names):
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


def _lowtide(task: StatsTask, options: HeadOptions | None = None, *, float32_head: bool = False) -> Function:
    y, topk = task.y, task.work.topk or None

    def head() -> tuple[Tensor, Tensor]:
        x, w = task.head.x, task.head.w
        return cast_to_float32(x, w) if float32_head else (x, w)

    if task.names == (LOGPROB,):
        return lambda: {LOGPROB: linear_logprobs(*head(), y, options=options)}

    def run() -> Values:
        stats = linear_token_stats(*head(), y, want=task.names, topk=topk, options=options)
        values = {name: getattr(stats, name) for name in task.names}
        return values if stats.topk is None else values | {TOPK: stats.topk.values}

    return run


def _lowtide_float32_head(task: StatsTask) -> Function:
    not_float32(task.head)
    return _lowtide(task, float32_head=True)


def _lowtide_at_trls(task: StatsTask) -> Function:
    tile = min(task.head.shape.N, TRL_TILE[0]) * TRL_TILE[1] * task.head.dtype.itemsize
    return _lowtide(task, HeadOptions(workspace_mib=tile / MIB, accumulate="float32"))


def _naive(x: Tensor, w: Tensor, y: Tensor, names: tuple[str, ...], topk: int) -> Values:
    return values_of((x @ w.T).float(), y, names, topk)


def _in_full(function: Callable[..., Values], task: StatsTask) -> Function:
    head = task.head
    return lambda: function(head.x, head.w, task.y, task.names, task.work.topk)


def _compiled(task: StatsTask) -> Function:
    _one_backward(task)
    return _in_full(compiled(_naive), task)


def _in_chunks(form: Callable[..., list[Values]], task: StatsTask, *, compile: bool) -> Function:
    """A form of `lowtide.bench.chunked_losses`; ``compile``: upcast and values."""
    if compile:
        _one_backward(task)

    def of_logits(z: Tensor, y: Tensor) -> Values:
        return values_of(z.float(), y, task.names, task.work.topk)

    head, function = task.head, compiled(of_logits) if compile else of_logits

    def run() -> Values:
        found = form(CHUNKS, function, head.x, head.w, task.y)
        return {name: torch.cat([values[name] for values in found]) for name in task.names}

    return run


def _trl(task: StatsTask, *, whole: bool = False) -> Function:
    _one_target(task)
    utils: Any = importlib.import_module("trl.trainer.utils")
    columns = task.head.shape.V if whole else utils._CHUNKED_LOGPROB_CHUNK_SIZE
    x, w, y = task.head.x, task.head.w, task.head.y
    outputs = tuple(name for name in task.names if name != LOGPROB)

    def run() -> Values:
        found = utils._ChunkedLogProbFunction.apply(x, w, None, y, 1.0, columns, None, 1.0, outputs)
        return dict(zip((LOGPROB, ENTROPY)[: len(task.names)], found, strict=False))

    return run


class _Rebuilt(torch.autograd.Function):
    """verl's plain PyTorch implementation: the float32 softmax in chunks of 512 tokens, recomputed in backward.

    The weight's gradient is summed in its own dtype. Without the entropy nothing of it is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        names = (LOGPROB, ENTROPY) if entropy else (LOGPROB,)
        found = [values_of((x[rows] @ w.T).float(), y[rows], names) for rows in blocks(len(x), VERL_ROWS)]
        ctx.save_for_backward(x, w, y)
        logprob = torch.cat([values[LOGPROB] for values in found])
        return logprob, torch.cat([values[ENTROPY] for values in found]) if entropy else None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        x, w, y = ctx.saved_tensors
        by_logprob, by_entropy = gradients
        assert by_logprob is not None
        dx, dw = torch.empty_like(x), torch.zeros_like(w)
        for rows in blocks(len(x), VERL_ROWS):
            logprobs = (x[rows] @ w.T).float().log_softmax(-1)
            p = logprobs.exp()
            dz = p * -by_logprob[rows, None]
            dz.scatter_add_(1, y[rows, None], by_logprob[rows, None])
            if by_entropy is not None:
                entropy = -(p * logprobs).sum(-1, keepdim=True)
                dz -= by_entropy[rows, None] * p * (logprobs + entropy)
            dz = dz.to(x.dtype)
            torch.mm(dz, w, out=dx[rows])
            dw += dz.T @ x[rows]
        return dx, dw, None, None


def _verl_style(task: StatsTask) -> Function:
    _one_target(task)
    head, entropy = task.head, ENTROPY in task.names

    def run() -> Values:
        found = _Rebuilt.apply(head.x, head.w, head.y, entropy)  # type: ignore[no-untyped-call]
        return dict(zip((LOGPROB, ENTROPY)[: len(task.names)], found, strict=False))

    return run


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

    return Peer(name, build, PEERS[name].package, PEERS[name].install)


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
    Peer(FLOAT32_HEAD, _lowtide_float32_head),
    Peer(f"{LOWTIDE}-trl-memory", _lowtide_at_trls),
    Peer("naive", partial(_in_full, _naive)),
    Peer("compile", _compiled),
    Peer("trl", _trl, "trl"),  # its chunk of 32768 classes
    Peer("trl-vocabulary", partial(_trl, whole=True), "trl"),  # all classes in a chunk
    Peer("verl-style", _verl_style),
    Peer("liger-grpo", _liger, "liger-kernel"),  # the log-probabilities in Liger's GRPO loss
    Peer("liger-scaled", _liger_scaled, "liger-kernel", "liger-kernel[cutedsl]"),
    Peer(QUACK, _quack, NEEDS[QUACK][1]),
    *map(_of_loss, ("cce-exact", TORCH, TORCH_CUTE, AUTO_CHUNKER)),
    Peer(CHECKPOINT, partial(_in_chunks, checkpointed, compile=False)),
    Peer(CHECKPOINT_COMPILED, partial(_in_chunks, checkpointed, compile=True)),
    Peer(f"torchtune-{CHUNKS}", partial(_in_chunks, projected_first, compile=True)),
)
STATS = token_benchmark(stats_tasks, STATS_PEERS)
