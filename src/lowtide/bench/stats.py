"""The benchmark of `linear_logprobs` and `linear_token_stats`: log-probabilities, entropies and more, per token.

N tokens, D hidden size, V vocabulary, K targets per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lowtide.bench.case import Case, make_case, measure_cases
from lowtide.bench.config import SEVERAL, STATS_PEERS, WORKS
from lowtide.bench.harness import Run
from lowtide.bench.head import ALL_PEERS

PEERS = {name: ALL_PEERS[name] for name in STATS_PEERS}


def stats_case(case: Case, work: str) -> Case:
    """Return a work on a case's numbers, its upstream gradients random, of both signs, and different by value.

    Of several targets the first is the case's, the others are random classes.
    """
    title, names, gemms = WORKS[work]
    y, N, trained = case.y, len(case.x), gemms > 1
    random: Any = {"device": y.device, "generator": torch.Generator(y.device).manual_seed(1)}
    if work == "targets":
        y = torch.cat((y[:, None], torch.randint(len(case.w), (N, SEVERAL - 1), **random)), 1)
    upstream = tuple(torch.randn(y.shape if n == "logprob" else (N,), **random) / N for n in names if trained)
    leaves = tuple(leaf.detach().requires_grad_(trained) for leaf in case.leaves)
    title += ", forward and backward" if trained else ", no gradient"
    return replace(case, name=title, names=names, gemms=gemms, leaves=leaves, y=y, upstream=upstream)


def stats_cases(run: Run, shape: Any) -> Iterator[Case]:
    """Yield the requested works on one shape's random inputs."""
    case = make_case(shape, run.dtype, run.device)
    for work in run.config.work or WORKS:
        yield stats_case(case, work)


measure = partial(measure_cases, cases=stats_cases)
