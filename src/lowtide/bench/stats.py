"""The benchmark of `linear_logprobs` and `linear_token_stats`: log-probabilities, entropies and more, per token.

N tokens, D hidden size, V vocabulary, K targets per token.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.case import Case, Function, Values, make_case, token_benchmark
from lowtide.bench.harness import CannotError, Peer, Run, by_name, compiled, needs_cuda
from lowtide.bench.loss_peers import IGNORED, PEERS, checkpointed, liger_native, trl_logprobs
from lowtide.bench.settings import TokenSettings
from lowtide.bench.shapes import Shape
from lowtide.bench.variant import LOWTIDE
from lowtide.head.token_stats import linear_logprobs, linear_token_stats

LOGPROB, ENTROPY, LSE, MEAN_LOGIT, SUM_SQ_PROB = "logprob", "entropy", "lse", "mean_logit", "sum_sq_prob"
TOPK = "topk"  # the values, without their classes
SEVERAL = 8  # targets of a token, or highest logits


@dataclass(frozen=True)
class Work:
    """A use: its title, the values, and the GEMMs it needs (1: no gradients; 3: backward alone is measured, after one
    forward); how many targets a token has.
    """

    title: str
    names: tuple[str, ...]
    gemms: int
    targets: int = 1

    @property
    def name(self) -> str:
        """The title and what is measured, as results have it."""
        return f"{self.title}, {({1: 'no gradient', 3: 'backward alone', 4: 'forward and backward'})[self.gemms]}"


_BOTH = "log-probability and entropy"
WORKS = {
    "logprob-entropy": Work(_BOTH, (LOGPROB, ENTROPY), 4),
    "logprob-entropy-backward": Work(_BOTH, (LOGPROB, ENTROPY), 3),
    "logprob": Work("log-probability", (LOGPROB,), 4),
    "targets": Work(f"log-probabilities of {SEVERAL} targets a token", (LOGPROB,), 4, SEVERAL),
    "logprob-forward": Work("log-probability", (LOGPROB,), 1),
    "logprob-entropy-forward": Work(_BOTH, (LOGPROB, ENTROPY), 1),
    "all-forward": Work("all statistics but the top k", (LOGPROB, ENTROPY, LSE, MEAN_LOGIT, SUM_SQ_PROB), 1),
    "topk-forward": Work(f"logsumexp and {SEVERAL} highest logits", (LSE, TOPK), 1),
}
"""A policy that is trained, with and without an entropy bonus and on several candidates, and one that only scores."""


def stats_of(z: Tensor, y: Tensor, names: tuple[str, ...]) -> Values:
    """Return the values of those names from all logits [N, V] and targets [N] or [N, K]."""
    logprobs = z.log_softmax(-1) if {LOGPROB, ENTROPY, SUM_SQ_PROB}.intersection(names) else z
    functions: dict[str, Callable[[], Tensor]] = {
        LOGPROB: lambda: logprobs.gather(-1, y.view(len(y), -1)).view_as(y),
        ENTROPY: lambda: -(logprobs.exp() * logprobs).sum(-1),
        LSE: lambda: z.logsumexp(-1),
        MEAN_LOGIT: lambda: z.mean(-1),
        SUM_SQ_PROB: lambda: logprobs.exp().square().sum(-1),
        TOPK: lambda: z.topk(min(SEVERAL, z.shape[-1])).values,
    }
    return {name: functions[name]() for name in names}


@dataclass(frozen=True, kw_only=True)
class StatsCase(Case):
    """Statistics of the head's logits, with targets ``y`` [N] or [N, K]."""

    def values_of(self, z: Tensor, rows: slice) -> Values:
        """See `Case`."""
        return stats_of(z, self.y[rows], self.names)

    def run_of(self, function: Function) -> Function:
        """See `Case`: of three GEMMs the backward pass alone."""
        if self.gemms != 3:
            return super().run_of(function)
        values = function()

        def backward() -> Values:
            self.clear()
            self.backward(values, keep=True)
            return {name: value.detach() for name, value in values.items()}

        return backward


def stats_case(case: Case, work: Work, *, seed: int = 0) -> StatsCase:
    """Return a work on a case's numbers, its upstream gradients random, of both signs, and different by value.

    Of several targets the first is the case's, the others are random classes.
    """
    x, w, y, (N, V) = case.x.detach(), case.w.detach(), case.y, (case.shape.N, case.shape.V)
    generator = torch.Generator(x.device).manual_seed(seed + 1)
    if work.targets > 1:
        others = torch.randint(0, V, (N, work.targets - 1), device=y.device, generator=generator)
        y = torch.cat((y[:, None], others), 1)
    upstream = {
        name: torch.randn(y.shape if name == LOGPROB else (N,), device=x.device, generator=generator) / N
        for name in work.names
        if work.gemms > 1
    }
    x, w = (t.requires_grad_(work.gemms > 1) for t in (x, w))
    more: dict[str, Any] = {"name": work.name, "gemms": work.gemms, "names": work.names, "per_token": True}
    return StatsCase(shape=case.shape, x=x, w=w, y=y, upstream=upstream, **more)


def stats_cases(run: Run[TokenSettings], shape: Shape) -> Iterator[StatsCase]:
    """Yield the requested works on one shape's random inputs."""
    case = make_case(shape, run.dtype, run.device, seed=run.config.seed)
    for name in run.config.chosen("works"):
        yield stats_case(case, WORKS[name], seed=run.config.seed)


def _lowtide(case: StatsCase) -> Function:
    x, w, y = case.x, case.w, case.y
    if case.names == (LOGPROB,):
        return lambda: {LOGPROB: linear_logprobs(x, w, y)}
    topk = min(SEVERAL, case.shape.V) if TOPK in case.names else None

    def run() -> Values:
        stats = linear_token_stats(x, w, y, want=case.names, topk=topk)
        values = {name: getattr(stats, name) for name in case.names}
        return values if stats.topk is None else values | {TOPK: stats.topk.values}

    return run


def _naive(x: Tensor, w: Tensor, y: Tensor, names: tuple[str, ...]) -> Values:
    return stats_of((x @ w.T).float(), y, names)


def _compiled(case: StatsCase) -> Function:
    if case.gemms == 3:
        raise CannotError("frees its buffers in backward, which runs once")
    function = compiled(_naive)
    return lambda: function(case.x, case.w, case.y, case.names)


def _checkpointed(case: StatsCase) -> Function:
    def of_logits(z: Tensor, y: Tensor) -> Values:
        return stats_of(z.float(), y, case.names)

    def run() -> Values:
        chunks = checkpointed(of_logits, case.x, case.w, case.y)
        return {name: torch.cat([values[name] for values in chunks]) for name in case.names}

    return run


def _only(case: StatsCase, *names: str) -> None:
    """Raise `CannotError` where a case has several targets or another value than these."""
    if case.y.dim() > 1 or not {*names}.issuperset(case.names):
        raise CannotError(f"computes {' and '.join(names)} of one target a token alone")


def _trl(case: StatsCase) -> Function:
    _only(case, LOGPROB, ENTROPY)
    importlib.import_module("trl.kernels")
    outputs = tuple(name for name in case.names if name != LOGPROB)
    return lambda: dict(zip(case.names, trl_logprobs(case.x, case.w, case.y, outputs), strict=False))


def _liger(case: StatsCase) -> Function:
    _only(case, LOGPROB)
    module: Any = importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo")
    x, w, y = case.x[None], case.w, case.y[None]
    return lambda: {LOGPROB: module.LigerFusedLinearPPOBase.chunk_forward(x, w, y)[0]}


def _of_losses(losses: Callable[[StatsCase, bool], Callable[..., Any]]) -> Callable[[StatsCase], Function]:
    """Return what builds a function of Liger's, whose losses come with entropies where these are requested."""

    def build(case: StatsCase) -> Function:
        _only(case, LOGPROB, ENTROPY)
        needs_cuda(case.x.device)
        entropy = ENTROPY in case.names
        function = losses(case, entropy)

        def run() -> Values:
            values = function(case.x, case.w, case.y)
            return {LOGPROB: -values[0], ENTROPY: values[1]} if entropy else {LOGPROB: -values}

        return run

    return build


def _liger_scaled(case: StatsCase, entropy: bool) -> Callable[..., Any]:
    """Liger's CuTe kernels for Hopper; elsewhere it would silently run plain PyTorch in chunks."""
    if torch.cuda.get_device_capability(case.x.device) != (9, 0):
        raise CannotError("its kernels are for GPUs of compute capability 9.0")
    module: Any = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    apply = module.LigerFusedLinearScaledCrossEntropyFunction.apply
    return lambda x, w, y: apply(x, w, y, 1.0, IGNORED, 1, entropy)


def _quack(case: StatsCase) -> Function:
    """quack's cross entropy of each token from all logits: its loss in chunks returns the mean alone."""
    _only(case, LOGPROB)
    needs_cuda(case.x.device)
    loss = importlib.import_module("quack.linear_cross_entropy").linear_cross_entropy_func
    return lambda: {LOGPROB: -loss(case.x, case.w, None, case.y, reduction="none")}


def _of_loss(name: str) -> Peer:
    """Return a peer of the loss, whose loss of each token is the negative log-probability."""

    def build(case: StatsCase) -> Function:
        _only(case, LOGPROB)
        losses = PEERS[name].build(case)
        return lambda: {LOGPROB: -losses()["loss"]}

    return Peer(name, build, PEERS[name].package)


STATS_PEERS = by_name(
    Peer(LOWTIDE, _lowtide),
    Peer("naive", lambda case: lambda: _naive(case.x, case.w, case.y, case.names)),
    Peer("compile", _compiled),
    Peer("trl", _trl, "trl"),
    Peer("liger-grpo", _liger, "liger-kernel"),  # the log-probabilities in Liger's GRPO loss
    Peer("liger-scaled", _of_losses(_liger_scaled), "liger-kernel"),
    Peer("liger-native", _of_losses(lambda case, entropy: liger_native(case, entropy=entropy)), "liger-cute-kernels"),
    Peer("quack", _quack, "quack-kernels"),
    *map(_of_loss, ("cce-exact", "torch")),
    Peer("checkpoint-8", _checkpointed),
)
STATS = token_benchmark(stats_cases, STATS_PEERS)
