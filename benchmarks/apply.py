"""Peak memory, time and errors of functions of the logits, forward and backward: all logits beside linear_apply.

    python benchmarks/apply.py --shape 16384,4096,128256

linear_apply runs in two chunks, in its default chunks, compiled, and with one result per token. Errors of the value and
of the gradients (hidden states, weight, bias) are against autograd on GEMMs in a wider dtype.
"""

from __future__ import annotations

import dataclasses
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from script import main
from torch import Tensor

from lowtide import HeadOptions, linear_apply, linear_cross_entropy
from lowtide.bench.harness import Benchmark, Column, Peer, Row, Run, Table, release
from lowtide.bench.problem import Problem, make_problem
from lowtide.bench.settings import ShapeSettings, setting
from lowtide.bench.shapes import Choice, Shape
from lowtide.bench.task import NAME, Bench, Task
from lowtide.head.plan import HeadPlan, plan_head

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
NAMED = {"4x4096": Shape("4x4096", 16384, 4096, 128256), "64x512": Shape("64x512", 32768, 768, 32000)}
TABLE = Table(
    (NAME,),
    (
        Column("ms", "ms", "9.2f"), Column("MiB", "peak_mib", "9.1f"), Column("of naive", "of_naive", "9.3f"),
        Column("value err", "value_error", "11.1e"),
        *(Column(f"{of} err", f"{of.lower()}_error", "9.1e") for of in ("dX", "dW", "db")),
    ),
    lambda row: [f"{row['plan']['chunks']} x {row['plan']['chunk_rows']} rows"] if "plan" in row else [],
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ApplyConfig(ShapeSettings):
    benchmark, program = "apply", "python benchmarks/{benchmark}.py"
    choice = Choice(Shape, "N,D,V", "4x4096", NAMED)
    known: ClassVar = {"functions": tuple(FUNCTIONS)}
    only: tuple[str, ...] = setting((), "these functions alone: {functions}", metavar="FUNCTION", known="functions")


def plan_of(head: Problem, options: HeadOptions) -> HeadPlan:
    """Return the `plan_head` of `linear_apply` with these options."""
    return plan_head(head.shape.N, head.shape.D, head.shape.V, head.dtype, head.device, options, function=True)


def in_two_chunks(head: Problem) -> HeadOptions:
    """Return the least workspace with which the plan has two chunks."""
    sizes = range(1, 2**50)  # bytes
    few = partial(bisect_left, sizes, True)
    least = few(key=lambda size: plan_of(head, HeadOptions(workspace_mib=size / 2**20)).chunks <= 2)
    return HeadOptions(workspace_mib=sizes[least] / 2**20)


def peers_of(function: str, head: Problem) -> Iterator[Peer]:
    """Yield the ways to compute the mean of a function of that name, lowtide's with their options."""
    fn, N = FUNCTIONS[function], head.shape.N
    x, w, b, y = head.x, head.w, head.b, head.y

    def peer(name: str, mean: Callable[[], Tensor], options: HeadOptions | None = None) -> Peer:
        planned = None if options is None else lambda _: options
        return Peer(name, lambda _: lambda: {"value": mean()}, options=planned)

    def summed(name: str, options: HeadOptions, compile: bool = False) -> Peer:
        def total(logits: Tensor, labels: Tensor) -> Tensor:
            return fn(logits, labels).sum() / N

        run = partial(linear_apply, total, x, w, y, linear_bias=b, out="sum", compile=compile, options=options)
        return peer(name, run, options)

    two, default = in_two_chunks(head), HeadOptions()
    yield peer("naive", lambda: fn(F.linear(x, w, b).to(torch.promote_types(x.dtype, torch.float32)), y).mean())
    yield summed("two chunks", two)
    yield summed("default", default)
    yield peer("default, per token", lambda: linear_apply(fn, x, w, y, linear_bias=b).mean(), default)
    if function != "top-k" and x.is_cuda:  # of which a compiler makes fewer passes over the logits
        yield summed("two chunks, compiled", two, compile=True)
        yield summed("default, compiled", default, compile=True)
    if function == "cross-entropy":
        yield peer("linear_cross_entropy", lambda: linear_cross_entropy(x, w, y, linear_bias=b))


def measure(run: Run[ApplyConfig]) -> None:
    config = run.config
    run.result |= {"dtype": run.dtype_name, "warm": config.warm, "reps": config.reps, "shapes": []}
    for shape in config.shapes:
        torch.compiler.reset()  # else what was compiled for one shape would be made general for the next
        problem = make_problem(shape, run.dtype, run.device, seed=config.seed)
        b = torch.randn(shape.V, device=run.device).to(run.dtype).requires_grad_()
        head = dataclasses.replace(problem, b=b)
        rows: list[Row] = []
        run.result["shapes"].append({**vars(shape), "rows": rows})
        for name in config.chosen("functions"):
            run.say(f"\n{shape} {run.dtype_name}, {name}\n{TABLE.header}")

            def values_of(z: Tensor, rows: slice, name: str = name, y: Tensor = head.y) -> dict[str, Tensor]:
                return {"value": FUNCTIONS[name](z, y[rows])}

            task = Task(head=head, names=("value",), upstream={"value": head.g}, values_of=values_of)
            bench = Bench(task, error=True, warm=config.warm, reps=config.reps, limited=False)
            naive_mib = None
            for peer in peers_of(name, head):
                row = bench.measure(peer) | {"function": name}
                row |= {f"{of}_error": error for of, error in row.pop("errors", {}).items()}
                if peer.options is not None:
                    row["plan"] = dataclasses.asdict(plan_of(head, peer.options(head)))
                naive_mib = naive_mib or row.get("peak_mib")
                if naive_mib and "peak_mib" in row:
                    row["of_naive"] = row["peak_mib"] / naive_mib
                run.add(row, rows, TABLE)
        release(run.device)


APPLY = Benchmark(measure=measure, failed=lambda row: "failed" in row and "plan" in row)

if __name__ == "__main__":
    sys.exit(main(APPLY, ApplyConfig, __doc__))
