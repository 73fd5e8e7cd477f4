"""Peak memory, time and errors of functions of the logits, forward and backward: all logits beside linear_apply.

    python benchmarks/apply.py --shape 16384,4096,128256

linear_apply runs in two chunks, in its default chunks, compiled, and with one result per token. Errors of the value and
of the gradients (hidden states, weight, bias) are against autograd on GEMMs in a wider dtype.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from script import main
from torch import Tensor

from lowtide import HeadOptions, linear_apply, linear_cross_entropy, plan_head
from lowtide.bench.case import Case, make_case, measure_cases
from lowtide.bench.harness import Peer, Run, Table
from lowtide.bench.settings import Shape, ShapeSettings, setting, shape_setting

cross_entropy = partial(F.cross_entropy, reduction="none")  # of each token


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each token's focal loss, gamma 2."""
    logp = -cross_entropy(logits, labels)
    return -((1 - logp.exp()) ** 2) * logp


def entropy(logits: Tensor, _: Tensor) -> Tensor:
    """Return the entropy of each token's distribution."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def top_k(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how far the label's logit is below the logsumexp of the 50 largest."""
    largest = logits.topk(min(50, logits.shape[-1]), dim=-1).values
    return largest.logsumexp(-1) - logits.gather(-1, labels[:, None])[:, 0]


FUNCTIONS = {"cross-entropy": cross_entropy, "focal": focal, "entropy": entropy, "top-k": top_k}
NAMED = {"4x4096": (16384, 4096, 128256), "64x512": (32768, 768, 32000)}
TABLE = Table(
    {
        "name": "<24", "ms": "9.2f", "peak_mib": "10.1f",
        **{f"{name}_error": "12.1e" for name in ("value", "dx", "dw", "db")},
    },
    lambda row: ["{chunks} x {chunk_rows} rows".format(**row["plan"])] if "plan" in row else [],
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ApplyCase(Case):
    function: str

    def values_of(self, z: Tensor, rows: slice) -> tuple[Tensor]:
        return (FUNCTIONS[self.function](z, self.y[rows]),)


@dataclass(frozen=True, kw_only=True)
class ApplyConfig(ShapeSettings):
    benchmark = "apply"
    shape: tuple[str, ...] = shape_setting("4x4096", shapes=NAMED)
    function: tuple[str, ...] = setting((), "these functions alone", metavar="FUNCTION", names=FUNCTIONS)


def cases(run: Run, shape: Shape) -> Iterator[ApplyCase]:
    """Yield the requested functions on one shape's random inputs, with a bias."""
    torch.compiler.reset()  # else what was compiled for one shape would be made general for the next
    loss = make_case(shape, run.dtype, run.device)
    bias = torch.randn(shape.V, device=run.device).to(run.dtype).requires_grad_()
    for name in run.config.function or FUNCTIONS:
        about: Any = {**vars(loss), "names": ("value",), "leaves": (*loss.leaves, bias)}
        yield ApplyCase(**about | {"function": name, "name": name})


def plan_of(options: HeadOptions, case: Case) -> Any:
    return plan_head(*case.x.shape, len(case.w), case.x.dtype, case.x.device, options, function=True)


def in_two_chunks(case: Case) -> HeadOptions:
    """Return the least workspace with which the plan has two chunks."""
    sizes = range(1, 2**50)  # bytes
    few = bisect_left(sizes, True, key=lambda size: plan_of(HeadOptions(workspace_mib=size / 2**20), case).chunks <= 2)
    return HeadOptions(workspace_mib=sizes[few] / 2**20)


def peers_of(case: ApplyCase) -> Iterator[Peer]:
    """Yield the ways to compute the mean of the case's function, lowtide's with their plans."""
    fn, N = FUNCTIONS[case.function], case.shape.N
    (x, w, b), y = case.leaves, case.y

    def peer(name: str, mean: Callable[[], Tensor], options: HeadOptions | None = None) -> Peer:
        plan = {} if options is None else {"plan": asdict(plan_of(options, case))}
        return Peer(name, lambda _: lambda *_: mean(), about=lambda _: plan)

    def summed(name: str, options: HeadOptions, compile: bool = False) -> Peer:
        def total(logits: Tensor, labels: Tensor) -> Tensor:
            return fn(logits, labels).sum() / N

        run = partial(linear_apply, total, x, w, y, linear_bias=b, out="sum", compile=compile, options=options)
        return peer(f"lowtide, {name}", run, options)

    two, default = in_two_chunks(case), HeadOptions()
    yield peer("naive", lambda: fn(F.linear(x, w, b).to(torch.promote_types(x.dtype, torch.float32)), y).mean())
    yield summed("two chunks", two)
    yield summed("default", default)
    yield peer("lowtide, per token", lambda: linear_apply(fn, x, w, y, linear_bias=b).mean(), default)
    if case.function != "top-k" and x.is_cuda:  # of which a compiler makes fewer passes over the logits
        yield summed("two chunks, compiled", two, compile=True)
        yield summed("default, compiled", default, compile=True)
    if case.function == "cross-entropy":
        yield peer("linear_cross_entropy", lambda: linear_cross_entropy(x, w, y, linear_bias=b))


measure = partial(measure_cases, cases=cases, peers=peers_of, table=TABLE)


if __name__ == "__main__":
    sys.exit(main(measure, ApplyConfig, __doc__))
