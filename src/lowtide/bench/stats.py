"""The benchmark of `linear_logprobs` and `linear_token_stats`: log-probabilities, entropies and more, per token.

N tokens, D hidden size, V vocabulary, K targets per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.case import Case, Function, Values, make_case, measure_cases, values_in
from lowtide.bench.config import SEVERAL, WORKS
from lowtide.bench.harness import Peer, Run, by_name, compiled, gpu_module
from lowtide.bench.head import CCE, ENTROPY, IGNORED, checkpointed, liger_native, on_cuda, torch_loss, trl
from lowtide.bench.variant import LOWTIDE
from lowtide.errors import UnsupportedError
from lowtide.head.token_stats import linear_logprobs, linear_token_stats

LOGPROB, TOPK = "logprob", "topk"  # the highest logits' values, without their classes


def stats_of(z: Tensor, y: Tensor, names: tuple[str, ...]) -> Values:
    """Return the values of those names from all logits [N, V] and targets [N] or [N, K]."""
    logprobs = z.log_softmax(-1) if {LOGPROB, ENTROPY, "sum_sq_prob"} & {*names} else z
    functions: dict[str, Callable[[], Tensor]] = {
        LOGPROB: lambda: logprobs.gather(-1, y.view(len(y), -1)).view_as(y),
        ENTROPY: lambda: -(logprobs.exp() * logprobs).sum(-1),
        "lse": lambda: z.logsumexp(-1),
        "mean_logit": lambda: z.mean(-1),
        "sum_sq_prob": lambda: logprobs.exp().square().sum(-1),
        TOPK: lambda: z.topk(min(SEVERAL, z.shape[-1])).values,
    }
    return tuple(functions[name]() for name in names)


class StatsCase(Case):
    """Statistics of the head's logits, with targets ``y`` [N] or [N, K]."""

    def values_of(self, z: Tensor, rows: slice) -> Values:
        """See `Case`."""
        return stats_of(z, self.y[rows], self.names)


def stats_case(case: Case, work: str) -> StatsCase:
    """Return a work on a case's numbers, its upstream gradients random, of both signs, and different by value.

    Of several targets the first is the case's, the others are random classes.
    """
    title, names, gemms = WORKS[work]
    x, w, y, N = case.x.detach(), case.w.detach(), case.y, len(case.x)
    random: Any = {"device": x.device, "generator": torch.Generator(x.device).manual_seed(1)}
    if work == "targets":
        y = torch.cat((y[:, None], torch.randint(0, len(w), (N, SEVERAL - 1), **random)), 1)
    trained = gemms > 1
    upstream = tuple(torch.randn(y.shape if n == LOGPROB else (N,), **random) / N for n in names if trained)
    x, w = (t.requires_grad_(trained) for t in (x, w))
    name = f"{title}, {'forward and backward' if trained else 'no gradient'}"
    return StatsCase(shape=case.shape, name=name, gemms=gemms, x=x, w=w, y=y, names=names, upstream=upstream)


def stats_cases(run: Run, shape: Any) -> Iterator[StatsCase]:
    """Yield the requested works on one shape's random inputs."""
    case = make_case(shape, run.dtype, run.device)
    for work in WORKS:
        if not run.config.work or work in run.config.work:
            yield stats_case(case, work)


def _lowtide(case: Case) -> Function:
    if case.names == (LOGPROB,):
        return linear_logprobs
    topk = SEVERAL if TOPK in case.names else None

    def run(x: Tensor, w: Tensor, y: Tensor) -> Values:
        stats: Any = linear_token_stats(x, w, y, want=case.names, topk=topk and min(topk, len(w)))
        return tuple(stats.topk.values if name == TOPK else getattr(stats, name) for name in case.names)

    return run


def _naive(x: Tensor, w: Tensor, y: Tensor, names: tuple[str, ...]) -> Values:
    return stats_of((x @ w.T).float(), y, names)


def _checkpointed(case: Case) -> Function:
    def of_logits(z: Tensor, y: Tensor) -> Values:
        return stats_of(z.float(), y, case.names)

    return lambda *arguments: tuple(map(torch.cat, zip(*checkpointed(of_logits, *arguments), strict=True)))


def _losses(
    name: str, make: Callable[[Case], Function], package: str = "", known: tuple[str, ...] = (LOGPROB,)
) -> Peer:
    """Return the peer of what ``make`` builds for a case: a function that returns each token's loss, and its entropy if
    the case has that and the peer knows it.
    """

    def build(case: Case) -> Function:
        if case.y.dim() > 1 or not {*known}.issuperset(case.names):
            raise UnsupportedError(f"computes {' and '.join(known)} of one target a token alone")
        function = make(case)

        def run(x: Tensor, w: Tensor, y: Tensor) -> Values:
            losses, *entropies = values_in(function(x, w, y))
            return -losses, *entropies

        return run

    return Peer(name, build, package)


def _liger_scaled(case: Case) -> Function:
    """Liger's CuTe kernels for Hopper; elsewhere it would silently run plain PyTorch in chunks."""
    module = gpu_module(case, "liger_kernel.ops.fused_linear_scaled_cross_entropy")
    if torch.cuda.get_device_capability(case.x.device) != (9, 0):
        raise UnsupportedError("its kernels are for GPUs of compute capability 9.0")
    apply = module.LigerFusedLinearScaledCrossEntropyFunction.apply
    return lambda x, w, y: apply(x, w, y, 1.0, IGNORED, 1, ENTROPY in case.names)


PEERS = by_name(
    Peer(LOWTIDE, _lowtide),
    Peer("naive", lambda case: partial(_naive, names=case.names)),
    Peer("compile", lambda case: partial(compiled(_naive), names=case.names)),
    _losses("trl", trl, "trl", (LOGPROB, ENTROPY)),
    _losses("liger-scaled", _liger_scaled, "liger-kernel", (LOGPROB, ENTROPY)),
    _losses("liger-native", liger_native, "liger-cute-kernels", (LOGPROB, ENTROPY)),
    _losses("cce-exact", on_cuda(*CCE, filter_eps=None, reduction="none"), "cut-cross-entropy"),
    _losses("torch", lambda case: partial(torch_loss(case), reduction="none")),
    Peer("checkpoint-8", _checkpointed),
)


def measure(run: Run) -> None:
    """Measure each work on each shape."""
    measure_cases(run, stats_cases)
