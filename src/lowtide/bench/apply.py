"""The benchmark of `linear_apply`: functions of the logits beside the same on all logits, and training with both."""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.config import ApplyBenchConfig
from lowtide.bench.harness import Benchmark, Column, Peer, Row, Run, Table, release
from lowtide.bench.problem import Problem, make_problem
from lowtide.bench.shapes import Shape
from lowtide.bench.task import NAME, Bench, Task
from lowtide.bench.way import STOCK, Way
from lowtide.bench.ways import build_way, train_step
from lowtide.errors import ArgumentValueError, message
from lowtide.head.apply import linear_apply
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions
from lowtide.head.plan import HeadPlan, plan_head
from lowtide.head.planner import MIB
from lowtide.measure.resident import cuda_peak_bytes, reset_cuda_peak
from lowtide.measure.units import mib
from lowtide.train.shapes import DEFAULT

NAIVE = "naive"


cross_entropy = partial(F.cross_entropy, reduction="none")  # of each token


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each token's focal loss, gamma 2."""
    logp = -cross_entropy(logits, labels)
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


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Problem:
    """Return random inputs with a bias, whose labels are drawn from the softmax without it."""
    problem = make_problem(shape, dtype, device, seed=seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    b = torch.randn(shape.V, device=device, generator=generator).to(dtype).requires_grad_()
    return dataclasses.replace(problem, b=b)


def plan_of(inputs: Problem, options: HeadOptions) -> HeadPlan:
    """Return the `plan_head` of `linear_apply` with these options."""
    N, D, V = inputs.shape.N, inputs.shape.D, inputs.shape.V
    return plan_head(N, D, V, inputs.dtype, inputs.device, options, function=True)


def in_two_chunks(inputs: Problem) -> HeadOptions:
    """Return the least workspace with which the plan has two chunks."""
    sizes = range(1, 2**50)  # bytes

    def options(size: int) -> HeadOptions:
        return HeadOptions(workspace_mib=size / MIB)

    least = bisect_left(sizes, True, key=lambda size: plan_of(inputs, options(size)).chunks <= 2)
    return options(sizes[least])


def peers_of(function: str, head: Problem) -> Iterator[Peer]:
    """Yield the ways to compute the mean of a function of that name, lowtide's with their options."""
    fn = FUNCTIONS[function]
    x, w, b, y, N = head.x, head.w, head.b, head.y, head.shape.N
    wide = torch.promote_types(x.dtype, torch.float32)

    def peer(name: str, mean: Callable[[], Tensor], options: HeadOptions | None = None) -> Peer:
        planned = None if options is None else lambda _: options
        return Peer(name, lambda _: lambda: {"value": mean()}, options=planned)

    def total(logits: Tensor, labels: Tensor) -> Tensor:
        return fn(logits, labels).sum() / N

    def summed(name: str, options: HeadOptions, compile: bool = False) -> Peer:
        run = partial(linear_apply, total, x, w, y, linear_bias=b, out="sum", compile=compile, options=options)
        return peer(name, run, options)

    two, default = in_two_chunks(head), HeadOptions()
    yield peer(NAIVE, lambda: fn(F.linear(x, w, b).to(wide), y).mean())
    yield summed("two chunks", two)
    yield summed("default", default)
    yield peer("default, per token", lambda: linear_apply(fn, x, w, y, linear_bias=b).mean(), default)
    if function in FUSIBLE and x.is_cuda:
        yield summed("two chunks, compiled", two, compile=True)
        yield summed("default, compiled", default, compile=True)
    if function == "cross-entropy":
        yield peer("linear_cross_entropy", lambda: linear_cross_entropy(x, w, y, linear_bias=b))


class ApplyBench(Bench):
    """A function of the logits whose mean is computed in several ways, without a limit beside them.

    A row has, beside those of `Bench`, the ``function`` and the ``value``; ``value_error``, its absolute difference
    from the exact one; the gradients' relative errors (``dx_error``, ``dw_error``, ``db_error``); and lowtide's
    ``plan``. The naive way's, which is the first, is what the other rows' peaks are measured by: ``of_naive``.
    """

    naive_mib = 0.0  # unknown

    def __init__(self, function: str, inputs: Problem, *, warm: int, reps: int) -> None:
        self.function = function
        task = Task(
            head=inputs,
            names=("value",),
            upstream={"value": inputs.g},
            values_of=lambda z, rows: {"value": FUNCTIONS[function](z, inputs.y[rows])},
        )
        super().__init__(task, error=True, warm=warm, reps=reps, limited=False)

    def measure(self, peer: Peer) -> Row:
        """See `Bench`."""
        row = super().measure(peer) | {"function": self.function}
        row |= {f"{name}_error": error for name, error in row.pop("errors", {}).items()}
        if peer.options is not None:
            row["plan"] = dataclasses.asdict(plan_of(self.problem, peer.options(self.problem)))
        if "value_error" in row:
            row["value"] = self.values["value"].item()
            if peer.name == NAIVE:
                self.naive_mib = row["peak_mib"]
            if self.naive_mib:
                row["of_naive"] = row["peak_mib"] / self.naive_mib
        return row


CLIP, BETA, GROUP = 0.2, 0.04, 2
LEARNING_RATE = 3e-5
GRPO = ("old", "reference", "advantage")  # what a batch has beside ids and mask
Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Tensor]


def grpo(logits: Tensor, ids: Tensor, old: Tensor, reference: Tensor, advantage: Tensor) -> Tensor:
    """Return each token's term of GRPO's objective, to be minimised."""
    logp = -cross_entropy(logits, ids)
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return BETA * ((reference - logp).exp() - (reference - logp) - 1) - gain


def _stock(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(input_ids=batch["ids"], labels=batch["ids"]).loss
    return loss


def _apply(function: Any, model: Any, batch: Batch, *names: str, mask: Tensor | None = None) -> Tensor:
    """Return a function's value for each token, by `linear_apply`."""
    hidden = model.model(input_ids=batch["ids"]).last_hidden_state[:, :-1]
    args = (batch["ids"][:, 1:], *(batch[name] for name in names))
    values: Tensor = linear_apply(function, hidden, model.lm_head.weight, *args, mask=mask)
    return values


def _masked_mean(terms: Tensor, mask: Tensor) -> Tensor:
    return (terms.where(mask, 0).sum(-1) / mask.sum(-1)).mean()


def _naive_grpo(model: Any, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["ids"]).logits[:, :-1].float()
    args = (batch["ids"][:, 1:], *(batch[name] for name in GRPO))
    terms = grpo(logits.flatten(0, 1), *(t.flatten() for t in args))
    return _masked_mean(terms.view_as(batch["mask"]), batch["mask"])


def _applied_grpo(model: Any, batch: Batch) -> Tensor:
    return _masked_mean(_apply(grpo, model, batch, *GRPO, mask=batch["mask"]), batch["mask"])


LOSSES: dict[str, dict[str, Loss]] = {
    "train": {"stock": _stock, "linear_apply": lambda model, batch: _apply(cross_entropy, model, batch).mean()},
    "grpo": {"naive": _naive_grpo, "linear_apply": _applied_grpo},
}


def compare(objective: str, run: Run[ApplyBenchConfig]) -> dict[str, Any]:
    """Train by an objective, "train" or "grpo", with each loss from the same weights on the same data.

    The result has both curves, and how they differ. `ArgumentValueError` where there is no such model.
    """
    config, device = run.config, run.device
    usual = "llama-3.2-1b" if device.type == "cuda" else DEFAULT
    name = usual if config.model == "auto" else config.model
    result: dict[str, Any] = {"model": name, "steps": config.steps, "batch": config.batch, "seq_len": config.seq_len}
    sizes = f"{config.steps} steps of {config.batch} x {config.seq_len} tokens"
    run.say(f"\n{objective}: {name}, {sizes}, {run.dtype}\n")
    curves: dict[str, list[float]] = {}
    for way, loss in LOSSES[objective].items():
        model = _model(name, run.dtype, device, config.seed)
        data = _data(model, objective, config, device)
        result[way] = trained = _trained(model, loss, data)
        curve = curves[way] = trained["losses"]
        peak = f", peak {trained['peak_mib']:.0f} MiB" if device.type == "cuda" else ""
        run.say(f"{way:16}loss {curve[0]:.6f} to {curve[-1]:.6f}, {trained['seconds']:.1f} s{peak}\n")
        del model, data
        release(device)
    one, other = curves.values()
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    result["largest_difference"] = max(differences)
    result["largest_relative_difference"] = max(d / max(abs(a), 1e-6) for d, a in zip(differences, one, strict=True))
    run.say(f"the curves differ by {max(differences):.2e} at most\n")
    return result


def _model(name: str, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    model = build_way(Way(impl=STOCK, policy="all"), name, dtype, device, seed=seed)
    if not isinstance(getattr(model, "lm_head", None), torch.nn.Linear) or not hasattr(model, "model"):
        raise ArgumentValueError(message("model", "a model with .model and .lm_head", type(model).__name__))
    return model


def _data(model: Any, objective: str, config: ApplyBenchConfig, device: torch.device) -> list[Batch]:
    """Return a batch for each step: runs of a few words each, which can be learned; for GRPO with rewards."""
    generator = torch.Generator().manual_seed(config.seed)
    V, T = model.get_input_embeddings().num_embeddings, config.seq_len
    data = []
    for _ in range(config.steps):
        start = torch.randint(0, V, (config.batch, 1), generator=generator)
        stride = torch.randint(1, 4, (config.batch, 1), generator=generator)
        strays = torch.rand(config.batch, T, generator=generator) < 0.1
        noise = strays * torch.randint(0, V, (T,), generator=generator)
        batch = {"ids": ((start + stride * torch.arange(T) + noise) % V).to(device)}
        if objective == "grpo":
            batch |= _rollout(model, batch["ids"], generator)
        data.append(batch)
    return data


@torch.no_grad()
def _rollout(model: Any, ids: Tensor, generator: torch.Generator) -> Batch:
    """Return log-probabilities of an older and of a reference policy, advantages within groups, and a mask."""
    B, T = ids.shape[0], ids.shape[1] - 1
    logp = -_apply(cross_entropy, model, {"ids": ids})
    shifted = [logp + 0.1 * torch.randn(B, T, generator=generator).to(logp.device) for _ in range(2)]
    reward = torch.randn(B, 1, generator=generator)
    group = min(GROUP, B)
    groups = reward[: B // group * group].view(-1, group)
    spread = groups.std(1, correction=0, keepdim=True) + 1e-4
    reward[: groups.numel()] = ((groups - groups.mean(1, keepdim=True)) / spread).view(-1, 1)
    mask = torch.arange(T, device=logp.device).expand(B, T) >= T // 4
    advantage = reward.expand(B, T).contiguous().to(logp.device)
    return {**dict(zip(GRPO, (*shifted, advantage), strict=True)), "mask": mask}


def _trained(model: Any, loss: Loss, data: list[Batch]) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    reset_cuda_peak()
    start = time.perf_counter()
    losses = [train_step(partial(loss, model, batch), optimizer) for batch in data]
    curve = torch.stack(losses).tolist()  # waits for the device
    return {"losses": curve, "seconds": time.perf_counter() - start, "peak_mib": mib(cuda_peak_bytes())}


def measure(run: Run[ApplyBenchConfig]) -> None:
    """Measure a table for each shape and function, and train; `ArgumentValueError` where there is no such model."""
    config = run.config
    run.result |= {"dtype": run.dtype_name, "warm": config.warm, "reps": config.reps, "shapes": []}
    for shape in config.shapes if config.table else ():
        torch._dynamo.reset()  # else what was compiled for one shape would be made general for the next
        inputs = make_inputs(shape, run.dtype, run.device, config.seed)
        rows: list[Row] = []
        run.result["shapes"].append({**vars(shape), "rows": rows})
        for name in config.chosen("functions"):
            run.say(f"\n{shape} {run.dtype_name}, {name}\n{TABLE.header}")
            bench = ApplyBench(name, inputs, warm=config.warm, reps=config.reps)
            for peer in peers_of(name, inputs):
                run.add(bench.measure(peer), rows, TABLE)
        del inputs
        release(run.device)
    for objective in LOSSES:
        if getattr(config, objective):
            run.result[objective] = compare(objective, run)
            run.save()


APPLY = Benchmark(measure=measure, failed=lambda row: "failed" in row and "plan" in row)
