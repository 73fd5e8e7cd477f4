"""The benchmark of `linear_apply`: functions of the logits beside the logits in full, and training with both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.config import ApplyBenchConfig
from lowtide.bench.harness import Benchmark, Column, Row, Run, Table, reason_in, release
from lowtide.bench.limit import NAME
from lowtide.bench.problem import ROWS, blocks, make_problem
from lowtide.bench.reference import exact_products, relative_error
from lowtide.bench.shapes import Shape
from lowtide.head.apply import linear_apply
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions
from lowtide.head.plan import HeadPlan, plan_head
from lowtide.measure.timing import peak_above, time_side_by_side
from lowtide.measure.units import mib

NAIVE, TWO_CHUNKS, DEFAULT, TOKEN = "naive", "two chunks", "default", "default, per token"
FUSED, COMPILED, TWO_COMPILED = "linear_cross_entropy", "default, compiled", "two chunks, compiled"


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each token's cross entropy."""
    return F.cross_entropy(logits, labels, reduction="none")


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each token's focal loss, gamma 2."""
    logp = -F.cross_entropy(logits, labels, reduction="none")
    return -((1 - logp.exp()) ** 2) * logp


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the entropy of each token's distribution."""
    del labels
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def top_k(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how far the label's logit is below the logsumexp of the 50 largest."""
    largest = logits.topk(min(50, logits.shape[-1]), dim=-1).values
    return largest.logsumexp(-1) - logits.gather(-1, labels[:, None])[:, 0]


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy, "focal": focal, "entropy": entropy, "top-k": top_k,
}  # fmt: skip
FUSIBLE = ("cross-entropy", "focal", "entropy")  # of which a compiler makes fewer passes over the logits


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
class Inputs:
    """Hidden states [N, D], weight [V, D], bias [V] (leaves) and labels [N]."""

    shape: Shape
    x: Tensor
    w: Tensor
    b: Tensor
    y: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what gets a gradient."""
        return self.x, self.w, self.b

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def step(self, mean: Callable[[], Tensor]) -> Tensor:
        """Run forward and backward, and return the value."""
        self.clear()
        value = mean()
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def plan(self, options: HeadOptions) -> HeadPlan:
        """Return what `plan_head` says of `linear_apply` with these options."""
        N, D, V = self.shape.N, self.shape.D, self.shape.V
        return plan_head(N, D, V, self.x.dtype, self.x.device, options, function=True)


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Return random inputs whose labels are drawn from the model's own softmax."""
    problem = make_problem(shape, dtype, device, seed=seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    b = torch.randn(shape.V, device=device, generator=generator).to(dtype).requires_grad_()
    return Inputs(shape=shape, x=problem.x, w=problem.w, b=b, y=problem.y)


def in_two_chunks(inputs: Inputs) -> HeadOptions:
    """Return the least workspace with which the plan has two chunks."""
    low, high = 0.0, 1.0
    while inputs.plan(HeadOptions(workspace_mib=high)).chunks > 2:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        enough = inputs.plan(HeadOptions(workspace_mib=middle)).chunks <= 2
        low, high = (low, middle) if enough else (middle, high)
    return HeadOptions(workspace_mib=high)


def ways(name: str, inputs: Inputs) -> dict[str, tuple[Callable[[], Tensor], HeadOptions | None]]:
    """Return each way to compute the mean of a function, with the options of lowtide's."""
    fn, (x, w, b), y, N = FUNCTIONS[name], inputs.leaves, inputs.y, inputs.shape.N

    def total(logits: Tensor, labels: Tensor) -> Tensor:
        return fn(logits, labels).sum() / N

    def summed(options: HeadOptions, compile: bool = False) -> Callable[[], Tensor]:
        return lambda: linear_apply(total, x, w, y, linear_bias=b, out="sum", compile=compile, options=options)

    two, default = in_two_chunks(inputs), HeadOptions()
    found: dict[str, tuple[Callable[[], Tensor], HeadOptions | None]] = {
        NAIVE: (lambda: fn(F.linear(x, w, b).to(_wide(x.dtype)), y).mean(), None),
        TWO_CHUNKS: (summed(two), two),
        DEFAULT: (summed(default), default),
        TOKEN: (lambda: linear_apply(fn, x, w, y, linear_bias=b).mean(), default),
    }
    if name in FUSIBLE and x.is_cuda:
        found[TWO_COMPILED] = (summed(two, compile=True), two)
        found[COMPILED] = (summed(default, compile=True), default)
    if name == "cross-entropy":
        found[FUSED] = (lambda: linear_cross_entropy(x, w, y, linear_bias=b), None)
    return found


def exact(name: str, inputs: Inputs) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return a function's mean and gradients by autograd on some rows of logits at a time, from wider inputs.

    float64 for float32 inputs, float32 for narrower ones, with exact products.
    """
    dtype = torch.float64 if inputs.x.dtype == torch.float32 else torch.float32
    w, b = (t.detach().to(dtype) for t in (inputs.w, inputs.b))
    dx, dw, db = torch.empty_like(inputs.x, dtype=dtype), torch.zeros_like(w), torch.zeros_like(b)
    value = torch.zeros((), dtype=torch.float64, device=w.device)
    with exact_products():
        for rows in blocks(inputs.shape.N, ROWS):
            x = inputs.x[rows].detach().to(dtype)
            z = torch.addmm(b, x, w.T).requires_grad_()
            mean = FUNCTIONS[name](z, inputs.y[rows]).sum() / inputs.shape.N
            (dz,) = torch.autograd.grad(mean, z)
            value += mean.detach()
            dx[rows] = dz @ w
            dw.addmm_(dz.T, x)
            db += dz.sum(0)
    return value, (dx, dw, db)


def rows_of(name: str, inputs: Inputs, *, warm: int, reps: int) -> Iterator[Row]:
    """Yield the row of each way to compute a function's mean and its gradients; one that fails says why.

    A row has the ``function`` and the way's ``name``; ``ms``, the median time of forward and backward; ``peak_mib``,
    the most memory at once above the inputs, gradients included, and ``of_naive``, that over the naive way's; the
    ``value``, and ``value_error``, its absolute difference from exact products in a wider dtype; the gradients'
    relative errors against the same (``dx_error``, ``dw_error``, ``db_error``); and lowtide's the ``plan``.
    """
    device = inputs.x.device
    value, gradients = exact(name, inputs)
    release(device)
    naive_mib = None
    for way, (mean, options) in ways(name, inputs).items():
        row: Row = {"function": name, "name": way}
        if options is not None:
            row["plan"] = dataclasses.asdict(inputs.plan(options))
        with reason_in(row):
            step = {way: partial(inputs.step, mean)}
            row["ms"] = time_side_by_side(step, device, warm=warm, reps=reps)[way].median_ms
            inputs.clear()
            got: list[Tensor] = []
            row["peak_mib"] = mib(peak_above(partial(_keep, got, inputs, mean), device))
            row |= {"value": got[0].item(), "value_error": (got[0].double() - value).abs().item()}
            for leaf, error, true in zip(inputs.leaves, ("dx_error", "dw_error", "db_error"), gradients, strict=True):
                assert leaf.grad is not None
                row[error] = relative_error(leaf.grad.view(len(true), -1), true.view(len(true), -1))
            naive_mib = row["peak_mib"] if way == NAIVE else naive_mib
            if naive_mib is not None:
                row["of_naive"] = row["peak_mib"] / naive_mib
        inputs.clear()
        release(device)
        yield row


def _keep(into: list[Tensor], inputs: Inputs, mean: Callable[[], Tensor]) -> None:
    into.append(inputs.step(mean))


def measure(run: Run[ApplyBenchConfig]) -> None:
    """Measure a table for each shape and function, and train.

    Raises:
        ArgumentValueError: there is no such model.
    """
    config = run.config
    run.result |= {"dtype": run.dtype_name, "warm": config.warm, "reps": config.reps, "shapes": []}
    for shape in config.shapes if config.table else ():
        torch._dynamo.reset()  # else what was compiled for one shape would be made general for the next
        inputs = make_inputs(shape, run.dtype, run.device, config.seed)
        rows: list[Row] = []
        run.result["shapes"].append({**vars(shape), "rows": rows})
        for name in config.functions:
            run.say(f"\n{shape} {run.dtype_name}, {name}\n{TABLE.header}")
            for row in rows_of(name, inputs, warm=config.warm, reps=config.reps):
                run.add(row, rows, TABLE)
        del inputs
        release(run.device)
    if config.train or config.grpo:
        from lowtide.bench.apply_train import compare

        for objective in [name for name in ("train", "grpo") if getattr(config, name)]:
            run.result[objective] = compare(objective, run)
            run.save()


APPLY = Benchmark(name="apply", measure=measure, failed=lambda row: "failed" in row and "plan" in row)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
