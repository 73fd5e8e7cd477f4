"""What linear_apply refuses, and that it refuses nothing else: coupled tokens, wrong results, wrong arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import HeadOptions, linear_apply
from lowtide.errors import LowtideError
from lowtide.head.function import checks as apply_checks
from support import head

COUPLED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean taken off": lambda z, y: (z - z.mean()).square().sum(-1),
    "mean over rows": lambda z, y: z - z.mean(0),
    "softmax over rows": lambda z, y: z.softmax(0),
    "softmax of everything": lambda z, y: z.flatten().softmax(0).view_as(z),
    "batch norm": lambda z, y: (z - z.mean(0)) / (z.var(0, correction=0) + 0.1).sqrt(),
    "difference of neighbours": lambda z, y: z[:, 0] - z[:, 0].roll(1),
    "running sum": lambda z, y: z.logsumexp(-1).cumsum(0),
    "rank": lambda z, y: z[:, 0].argsort().argsort(),
    "position": lambda z, y: torch.arange(len(z)),
    "largest of all": lambda z, y: z.amax(-1) == z.max(),
    "mean expanded": lambda z, y: F.cross_entropy(z, y).expand(len(z)),
    "divided by rows": lambda z, y: F.cross_entropy(z, y, reduction="none") / len(z),
    "one of two": lambda z, y: (z.sum(-1), {"a": z.logsumexp(-1) - z.logsumexp(-1).mean()}),
    "mirrored": lambda z, y: z + z.flip(0),
    "a nan of another": lambda z, y: z.sum(-1) + torch.where((y == 3).any(), torch.nan, 0.0),
}
NOT_ADDITIVE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": lambda z, y: F.cross_entropy(z, y),
    "mean of kept": lambda z, y: F.cross_entropy(z, y, ignore_index=3),
    "one of two": lambda z, y: (z.sum(), z.mean()),
    "with a constant": lambda z, y: z.square().sum() + 1,
    "maximum": lambda z, y: z.max(),
    "logsumexp": lambda z, y: z.flatten().logsumexp(0),
    "norm": lambda z, y: z.norm(),
    "chosen and rejected": lambda z, y: F.logsigmoid(pairs(z)[:, 0] - pairs(z)[:, 1]).sum() + z[-1].sum(),
    "share": lambda z, y: (z.argmax(-1) == y).float().mean(),
}


def noisy(z: Tensor) -> Tensor:
    return F.dropout(z, 0.3)


def pairs(z: Tensor) -> Tensor:
    """Rows by twos, as chosen and rejected completions may come; the last of an odd number by itself."""
    return z[: len(z) // 2 * 2].view(-1, 2, z.shape[1])


INDEPENDENT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nothing": lambda z, y: torch.zeros(len(z)),
    "nan": lambda z, y: z.sum(-1) * torch.nan,
    "inf": lambda z, y: (z / 0, z.exp() * 1e300),
    "cancelling": lambda z, y: (z.softmax(-1) * (z.log_softmax(-1) - (z + 1e4).log_softmax(-1))).sum(-1),
    "cancelling sums": lambda z, y: z.double().sum(-1).float() - z.flip(-1).sum(-1),
    "a product": lambda z, y: (z @ torch.ones(z.shape[1], 7)).square(),
    "a wild product": lambda z, y: ((z * 1e6) @ torch.randn(z.shape[1], 7, generator=torch.Generator().manual_seed(0))
                                    ).sum(-1),
    "bfloat16": lambda z, y: (z.bfloat16() @ torch.ones(z.shape[1], 7, dtype=torch.bfloat16)).sum(-1),
    "thresholds": lambda z, y: torch.where(z.softmax(-1) > 0.05, z, 0).sum(-1),
    "top k": lambda z, y: z.topk(3)[1],
    "dropout": lambda z, y: F.dropout(z, 0.5).sum(-1),
    "noise": lambda z, y: (z + torch.randn_like(z)).argmax(-1),
    "half": lambda z, y: z.half().log_softmax(-1),
    "heavy tails": lambda z, y: (z[:, 0] * torch.empty(len(z)).cauchy_(), z.logsumexp(-1)),
    "as many draws as it takes": lambda z, y: torch.poisson(z.exp()),
    "one draw for all": lambda z, y: z.sum(-1) * torch.rand(()),
    "infinite and random": lambda z, y: noisy(z) / 0,
    "cancelling beside noise": lambda z, y: (z.double().sum(-1).float() - z.flip(-1).sum(-1), torch.rand(len(z))),
}  # fmt: skip


@pytest.mark.parametrize("N", [2, 5, 100])
@pytest.mark.parametrize("name", COUPLED)
def test_coupled_tokens_are_refused(name: str, N: int) -> None:
    x, w, b, y = head(N, 5, 13)
    y[:] = torch.arange(N) % 5 if name != "a nan of another" else 0
    if name == "a nan of another":
        y[0] = 3
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="depend on the other tokens") as caught:
        linear_apply(COUPLED[name], x, w, y, linear_bias=b)
    assert isinstance(caught.value, LowtideError)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("N", [2, 5, 100])
@pytest.mark.parametrize("name", NOT_ADDITIVE)
@pytest.mark.parametrize("grad", [False, True])
def test_what_does_not_add_up_is_refused(name: str, N: int, grad: bool) -> None:
    x, w, b, y = head(N, 5, 13)
    y[:] = torch.arange(N) % 3
    if name == "share":
        y = F.linear(x, w, b).argmax(-1)
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="does not add up"):
        linear_apply(NOT_ADDITIVE[name], x, w, y, linear_bias=b, out="sum")


@pytest.mark.parametrize("out", ["token", "sum"])
def test_random_numbers_from_elsewhere_are_refused_with_that_reason(out: str) -> None:
    """Backward could not draw the same ones again."""
    x, w, _, _ = head(20, 5, 13)
    own = torch.Generator().manual_seed(0)
    for draw in (lambda z: torch.rand(z.shape, generator=own), lambda z: torch.full_like(z, random.random())):

        def fn(z: Tensor, draw: Any = draw) -> Tensor:
            loss = (z * draw(z)).sum(-1)
            return loss.sum() if out == "sum" else loss

        with pytest.raises(ValueError, match="default generators"):
            linear_apply(fn, x, w, out=out)


@pytest.mark.parametrize("N", [1, 2, 300])
@pytest.mark.parametrize("name", INDEPENDENT)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("out", ["token", "sum"])
def test_nothing_else_is_refused(name: str, N: int, autocast: bool, out: str) -> None:
    x, w, b, y = head(N, 5, 37)
    fn = INDEPENDENT[name]

    def summed(z: Tensor, y: Tensor) -> Any:
        return torch.utils._pytree.tree_map(lambda t: t.sum(), fn(z, y))

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        linear_apply(summed if out == "sum" else fn, x, w, y, linear_bias=b, out=out)


def test_rounding_that_depends_on_the_number_of_rows_is_not_refused() -> None:
    """Of a result that cancels, rounding may be all that is left: how far it carries is seen by shifting the logits."""
    x, w, b, _ = head(64, 5, 37)
    linear_apply(lambda z: z.sum(-1) - z.flip(-1).sum(-1) + 1e-7 * len(z), x, w, linear_bias=b)
    with pytest.raises(ValueError, match="depend on the other tokens"):
        linear_apply(lambda z: z.sum(-1) - z.flip(-1).sum(-1) + 1e-3 * len(z), x, w, linear_bias=b)


def test_a_sum_that_needs_a_gradient_for_later_rows_alone_is_refused_where_gradients_are_stored() -> None:
    x, w, _, y = head(40, 5, 13)
    y[:] = 0
    y[-1] = 1

    def fn(z: Tensor, y: Tensor) -> Any:
        return z.sum(), z.square().sum() if y.any() else z.detach().square().sum()

    options = HeadOptions(workspace_mib=1e-6)
    with pytest.raises(ValueError, match="for all rows"):
        linear_apply(fn, x, w, y, out="sum", options=options)
    one, two = linear_apply(fn, x, w, y, out="sum", options=HeadOptions(workspace_mib=1e-6, gradient="recompute"))
    (got,) = torch.autograd.grad(one + two, w)
    (want,) = torch.autograd.grad(F.linear(x, w).sum() + F.linear(x[-1], w).square().sum(), w)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_masked_rows_take_no_part_in_the_comparison() -> None:
    x, w, _, _ = head(40, 5, 13)
    mask = torch.arange(40) % 4 == 0
    with torch.no_grad():
        x[~mask] = torch.nan
    with pytest.raises(ValueError, match="depend on the other tokens"):
        linear_apply(lambda z: z - z.mean(0), x, w, mask=mask)
    linear_apply(lambda z: z.softmax(-1), x, w, mask=mask)


class Scorer(torch.nn.Module):
    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, z: Tensor) -> Tensor:
        self.rows.append(len(z))
        return z.sum(-1)


@pytest.mark.parametrize("kind", ["function", "partial", "module"])
def test_a_function_is_compared_once_for_its_code_and_shapes(kind: str) -> None:
    """One that is made anew for each step is the same; of a module its class is."""
    rows: list[int] = []

    def make() -> Any:
        def score(factor: float, z: Tensor) -> Tensor:
            rows.append(len(z))
            return factor * z.sum(-1)

        return {"function": lambda z: score(1.0, z), "partial": partial(score, 2.0), "module": Scorer(rows)}[kind]

    apply_checks._compared.clear()
    for V, comparisons in ((13, 1), (13, 0), (14, 1)):
        x, w, _, _ = head(1000, 5, V)
        rows.clear()
        linear_apply(make(), x, w)
        assert sum(rows) == 1000 + 2 * apply_checks.ROWS * comparisons


def test_a_function_that_draws_random_numbers_is_not_compared() -> None:
    """Its halves would draw others; and the generators are where they were."""
    x, w, _, _ = head(40, 5, 13)
    torch.manual_seed(3)
    value = linear_apply(lambda z: z.sum(-1) + torch.rand(len(z)), x, w)
    torch.manual_seed(3)
    assert torch.equal(value, linear_apply(lambda z: z.sum(-1) + torch.rand(len(z)), x, w))


def test_results_that_change_from_piece_to_piece_are_refused() -> None:
    x, w, _, y = head(40, 5, 13)
    y[:] = 0
    y[-1] = 1
    options = HeadOptions(workspace_mib=1e-6)
    for fn in (
        lambda z, y: z[:, : 1 + y.max()],
        lambda z, y: z.argmax(-1) if y.max() else z.amax(-1),
        lambda z, y: (z.sum(-1),) if y.max() else [z.sum(-1)],
        lambda z, y: None if y.max() else z.sum(-1),
    ):
        with pytest.raises(ValueError, match="fn: expected"), torch.random.fork_rng():
            linear_apply(lambda z, y, fn=fn: (torch.rand(1), fn(z, y))[1], x, w, y, options=options)


@pytest.mark.parametrize("fn", [lambda z, y: z[:, : 1 + y.max()], lambda z, y: [z.sum(-1)] * len(z)])
def test_results_whose_number_or_shape_depends_on_the_rows_are_refused(fn: Any) -> None:
    x, w, _, y = head(40, 5, 13)
    y[:] = torch.arange(40) % 13
    y[20:] = 0
    with pytest.raises(ValueError, match="same number and shapes for any rows"):
        linear_apply(fn, x, w, y)


def test_an_error_inside_fn_is_fns_own_with_a_note() -> None:
    x, w, _, y = head((4, 5), 5, 13)
    with pytest.raises(RuntimeError, match="shape") as caught:
        linear_apply(lambda z, y: z.view(4, 5, 13).sum(-1), x, w, y)
    assert any("any number of rows" in note for note in caught.value.__notes__)


def test_no_rows_give_results_of_the_right_shape() -> None:
    x, w, _, _ = head((3, 0), 5, 13)
    values, ids = linear_apply(lambda z: z.topk(4), x, w)
    assert (values.shape, ids.shape, ids.dtype) == ((3, 0, 4), (3, 0, 4), torch.int64)
    x, w, _, _ = head((3, 2), 5, 13)
    nothing = torch.zeros(3, 2, dtype=torch.bool)
    values, ids = linear_apply(lambda z: z.topk(4), x, w, mask=nothing)
    assert (values == 0).all()
    assert values.shape == (3, 2, 4)
    values.sum().backward()
    assert (x.grad == 0).all()
    assert (w.grad == 0).all()
