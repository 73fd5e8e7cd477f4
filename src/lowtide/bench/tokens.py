"""Functions with a value for each token: peers on the same tensors, interleaved with the bare GEMMs.

N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.harness import Column, Peer, Row, Run, Table, release
from lowtide.bench.limit import NAME, SHARE, Bench, bare_gemms
from lowtide.bench.problem import ROWS, Problem, blocks
from lowtide.bench.reference import exact_products, relative_error

Values = dict[str, Tensor]  # by name, [N] or [N, K], or 0-d: their mean
Function = Callable[[], Values]
Tasks = Callable[[tuple[str, ...], Any, torch.dtype, torch.device, int], Iterator["Task"]]
"""Makes the tasks of the works' names, a shape, dtype, device and seed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every peer of one table computes.

    Attributes:
        head: hidden states, weight and targets; its setting says whether gradients are wanted, and which.
        names: of the values.
        upstream: the objective's gradient by each value, of its shape; empty where the setting has no gradients.
    """

    head: Problem
    names: tuple[str, ...]
    upstream: Values

    @property
    def name(self) -> str:
        """What is computed."""
        return self.head.setting.name

    @property
    def flops(self) -> int:
        """Operations of the products that it cannot do without."""
        return self.head.shape.flops(self.head.setting.gemms)

    def bare(self, rows: int) -> Callable[[], None]:
        """Return those products, over chunks of so many rows."""
        return bare_gemms(self.head, rows)

    def exact(self) -> Callable[[Tensor, slice], Values]:
        """Return what computes the values, differentiably, from logits in full of some rows and from which rows."""
        raise NotImplementedError

    def step(self, function: Function) -> Values:
        """Run a function once, with its backward pass where there is one, and return its values.

        A 0-d value is the tokens' mean; the upstream gradient of such a task is 1 / N for every token.
        """
        self.head.clear()
        with torch.set_grad_enabled(self.head.setting.grad):
            values = function()
        if self.head.setting.grad:
            self.backward(values)
        return {name: value.detach() for name, value in values.items()}

    def backward(self, values: Values, *, keep: bool = False) -> None:
        """Run the values' backward pass, and with ``keep`` leave their graph as it is."""
        upstream = self.upstream
        gradients = [upstream[name].to(v.dtype) if v.dim() else torch.ones_like(v) for name, v in values.items()]
        torch.autograd.backward(list(values.values()), gradients, retain_graph=keep)

    def run_of(self, function: Function) -> Callable[[], Values]:
        """Return what is measured of a function: `step`."""
        return lambda: self.step(function)


def by_name(*peers: Peer) -> dict[str, Peer]:
    """Return the peers by name, in their order; each builds a `Function` of a task."""
    return {peer.name: peer for peer in peers}


@dataclass(frozen=True)
class Truth:
    """Each value in float64, and the two gradients [N, D] and [V, D] in float32; None where there are none."""

    values: Values
    dx: Tensor | None
    dw: Tensor | None


@torch.no_grad()
def truth(task: Task) -> Truth:
    """Return values and gradients from float32 products of float32 copies; all between the products is in float64."""
    head, setting = task.head, task.head.setting
    w, values_of = head.w.float(), task.exact()
    dx = torch.empty_like(head.x, dtype=torch.float32) if setting.grad else None
    dw = torch.zeros_like(w) if setting.grad else None
    found: dict[str, list[Tensor]] = {name: [] for name in task.names}
    with exact_products():
        for rows in blocks(head.shape.N, ROWS):
            x = head.x[rows].float()
            z = (x @ w.T).double().requires_grad_(setting.grad)
            with torch.set_grad_enabled(setting.grad):
                values = values_of(z, rows)
            for name, value in values.items():
                found[name].append(value.detach())
            if dx is not None and dw is not None:
                upstream = [task.upstream[name][rows].double() for name in values]
                dz = torch.autograd.grad(list(values.values()), z, upstream)[0].float()
                torch.mm(dz, w, out=dx[rows])
                dw.addmm_(dz.T, x)
    return Truth({name: torch.cat(parts) for name, parts in found.items()}, dx, dw)


class TokenBench(Bench):
    """A task on which peers are measured.

    Their rows have ``errors``: of each value by name, the absolute difference, its mean over the tokens; ``dx`` and
    ``dw``, the relative errors of the two gradients.
    """

    true: Truth | None

    def __init__(self, task: Task, *, error: bool, warm: int, reps: int) -> None:
        self.task = task
        super().__init__(task.head, error=error, warm=warm, reps=reps)

    def truth(self) -> Truth:
        """See `Bench`."""
        return truth(self.task)

    def bare(self, rows: int) -> Callable[[], None]:
        """See `Bench`."""
        return self.task.bare(rows)

    @property
    def flops(self) -> int:
        """See `Bench`."""
        return self.task.flops

    @property
    def products(self) -> str:
        """See `Bench`."""
        return "the bare GEMMs"

    def prepare(self, peer: Peer, row: Row) -> Callable[[], Values]:
        """See `Bench`."""
        del row
        return self.task.run_of(peer.build(self.task))

    def errors(self, got: Values, row: Row) -> dict[str, float]:
        """See `Bench`."""
        del row
        head, true, errors = self.task.head, self.true, {}
        assert true is not None
        for name, exact in true.values.items():
            value = got.get(name)
            expected = exact if value is None or value.dim() else exact.mean()
            errors[name] = math.nan if value is None else (value.double() - expected).abs().mean().item()
        for name, leaf, gradient in (("dx", head.x, true.dx), ("dw", head.w, true.dw)):
            if gradient is not None:
                errors[name] = math.nan if leaf.grad is None else relative_error(leaf.grad, gradient)
        return errors

    def add_errors(self, errors: dict[str, float], row: Row) -> None:
        """See `Bench`."""
        row |= {"errors": errors} if errors else {}

    @property
    def table(self) -> Table:
        """How its rows are printed: with a column for each error."""
        names = (*self.task.names, "dx", "dw") if self.task.head.setting.grad else self.task.names
        columns = [Column(_TITLES.get(name, f"{name} err"), partial(_error, name), "14.1e") for name in names]
        return Table((NAME,), (*SHARE, *columns))

    def to_json(self) -> dict[str, Any]:
        """Return what is known before a peer runs."""
        return {
            "work": self.task.name,
            "limit_ms": self.limit_ms,
            "limit_rows": self.best_rows,
            "limit_ms_by_rows": {str(rows): ms for rows, ms in self.limit.items()},
            "tflops": self.tflops,
            "gradients_mib": self.gradients_mib,
        }


_TITLES = {"dx": "dX err", "dw": "dW err", "mean_logit": "mean err", "sum_sq_prob": "sumsq err"}


def _error(name: str, row: Row) -> float | None:
    found: float | None = row.get("errors", {}).get(name)
    return found


def measure_tables(run: Run[Any], tasks: Tasks) -> None:
    """Measure a table for each shape and each work of a run; ``tasks`` makes a shape's."""
    config, shapes = run.config, run.result.setdefault("shapes", [])
    run.result |= {"warm": config.warm, "reps": config.reps}
    for shape in config.shapes:
        tables: list[dict[str, Any]] = []
        shapes.append({**vars(shape), "dtype": run.dtype_name, "tables": tables})
        for task in tasks(config.works, shape, run.dtype, run.device, config.seed):
            bench = TokenBench(task, error=config.error, warm=config.warm, reps=config.reps)
            rows: list[Row] = []
            tables.append({**bench.to_json(), "rows": rows})
            run.say(bench.title() + bench.table.header)
            for name in config.peers:
                run.add(bench.measure(config.known_peers[name]), rows, bench.table)
            del bench, task  # its truth, before the next is computed
        release(run.device)
