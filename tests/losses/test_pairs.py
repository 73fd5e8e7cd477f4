"""Preference losses: values and gradients against their formulas in float64, reductions, extremes, no pairs at all."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from losses.loops import NoHostSync
from lowtide import losses
from lowtide.losses import DPO_KINDS, cpo_loss, dpo_loss, kto_loss, kto_reference, orpo_loss, simpo_loss
from promises import promise

B = 6
SMOOTHED = {"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"}
PER_TOKEN = {"ipo", "sigmoid_norm"}
DIVERGENT = {"sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "discopop"}
DIVERGENCES = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("js", 0.5), ("alpha", 0.5), ("alpha", 1.5), ("alpha", 1)]
DESIRABLE = torch.tensor([1, 0, 1, 1, 0, 0])
KTO = {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8}


def smoothed(m: Tensor, e: float) -> Tensor:
    return -(1 - e) * logsigmoid(m) - e * logsigmoid(-m)


# In the letters of `dpo_loss`'s docstring; m is beta d, ``per_token`` IPO's difference.
FORMULAS: dict[str, Callable[[Any], Tensor]] = {
    "sigmoid": lambda p: smoothed(p.m, p.e),
    "robust": lambda p: (-(1 - p.e) * logsigmoid(p.m) + p.e * logsigmoid(-p.m)) / (1 - 2 * p.e),
    "hinge": lambda p: (1 - p.m).clamp(min=0),
    "ipo": lambda p: (p.per_token - 1 / (2 * p.beta)) ** 2,
    "sigmoid_norm": lambda p: -logsigmoid(p.beta * p.per_token),
    "exo_pair": lambda p: (
        p.m.sigmoid() * (logsigmoid(p.m) - math.log(1 - p.e)) + (-p.m).sigmoid() * (logsigmoid(-p.m) - math.log(p.e))
    ),
    "nca_pair": lambda p: -logsigmoid(p.beta * p.a) - (logsigmoid(-p.beta * p.a) + logsigmoid(-p.beta * p.b)) / 2,
    "bco_pair": lambda p: -logsigmoid(p.beta * p.a) - logsigmoid(-p.beta * p.b),
    "sppo_hard": lambda p: (p.a - 1 / (2 * p.beta)) ** 2 + (p.b + 1 / (2 * p.beta)) ** 2,
    "apo_zero": lambda p: 1 - (p.beta * p.a).sigmoid() + (p.beta * p.b).sigmoid(),
    "apo_down": lambda p: (p.beta * p.a).sigmoid() + 1 - (p.beta * (p.a - p.b)).sigmoid(),
    "discopop": lambda p: -(1 - (p.m / 0.05).sigmoid()) * logsigmoid(p.m) + (p.m / 0.05).sigmoid() * (-p.m).exp(),
    "aot": lambda p: smoothed(p.beta * ((p.c - p.r).sort().values - (p.rc - p.rr).sort().values), p.e),
    "aot_unpaired": lambda p: smoothed(p.beta * (p.a.sort().values - p.b.sort().values), p.e),
}


def score(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    t = log_ratio.exp()
    if divergence == "alpha" and alpha != 1:
        return (t ** (alpha - 1) - 1) / (alpha - 1)
    return {"forward_kl": 1 - 1 / t, "js": (2 * t / (1 + t)).log()}.get(divergence, log_ratio)


def sums() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities of pairs: the policy's of chosen and rejected, and the reference's of both."""
    ref = -10 + 3 * torch.randn(2, B, dtype=torch.float64)
    policy = ref + 2 * torch.randn(2, B, dtype=torch.float64)
    return policy[0], policy[1], ref[0], ref[1]


def means() -> tuple[Tensor, Tensor]:
    x = -torch.rand(2, B, dtype=torch.float64).exp() * torch.logspace(-6, 1, B, dtype=torch.float64)
    return x[0] - 0.01, x[1].flip(0) - 0.01  # differences of 1e-6 must not pass 0


def options(kind: str, B: int = B) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": kind, "beta": 0.3}
    if kind in SMOOTHED:
        found["label_smoothing"] = 0.1
    if kind in PER_TOKEN:
        found["chosen_length"] = torch.arange(1, B + 1)
        found["rejected_length"] = torch.arange(B, 0, -1)
    return found


def check(loss: Callable[..., Tensor], true: Tensor, trained: Sequence[Tensor]) -> None:
    """Compare a loss in each reduction, and its gradients, with what it is of each pair."""
    got = loss(reduction="none")
    torch.testing.assert_close(got, true, rtol=1e-10, atol=1e-12)
    grads = (torch.autograd.grad(x.sum(), trained) for x in (got, true))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loss(), true.mean())
    torch.testing.assert_close(loss(reduction="sum"), true.sum())
    for count in (11, torch.tensor(11)):
        torch.testing.assert_close(loss(num_items=count), true.sum() / 11)


@promise("values", "options")
@pytest.mark.parametrize("kind", DPO_KINDS)
def test_dpo(kind: str) -> None:
    for divergence, alpha in DIVERGENCES if kind in DIVERGENT else DIVERGENCES[:1]:
        c, r, rc, rr = sums()
        trained = c.requires_grad_(), r.requires_grad_()
        o, a, b = options(kind), c - rc, r - rr
        p = SimpleNamespace(c=c, r=r, rc=rc, rr=rr, a=a, b=b, beta=0.3, e=o.get("label_smoothing"))
        x, y = score(a, divergence, alpha), score(b, divergence, alpha)
        p.m = p.beta * (x - y)
        p.per_token = x / torch.arange(1, B + 1) - y / torch.arange(B, 0, -1)
        loss = functools.partial(dpo_loss, c, r, rc, rr, divergence=divergence, alpha=alpha, **o)
        check(loss, FORMULAS[kind](p), trained)


@promise("values", "options")
def test_losses_without_pairs_of_models() -> None:
    for e, beta, gamma in ((0.0, 2.0, 1.0), (0.2, 2.5, 1.4)):
        c, r = (x.requires_grad_() for x in means())
        more = {"beta": beta, "gamma": gamma, "label_smoothing": e} if e else {}
        check(functools.partial(simpo_loss, c, r, **more), smoothed(beta * (c - r) - gamma, e), (c, r))
    for e, beta in ((0.0, 0.1), (0.1, 0.4)):
        c, r, nll, ref = (x.requires_grad_() for x in sums())
        more = {"beta": beta, "label_smoothing": e} if e else {}
        check(functools.partial(cpo_loss, c, r, nll, **more), smoothed(beta * (c - r), e) + nll, (c, r, nll))
        c, r = (x.requires_grad_() for x in means())
        odds = [x - torch.log(1 - x.exp()) for x in (c, r)]
        true = -c - beta * logsigmoid(odds[0] - odds[1])
        check(functools.partial(orpo_loss, c, r, **({"beta": beta} if e else {})), true, (c, r))
        c, _, ref, _ = sums()
        w = 0.8 + 0.5 * DESIRABLE.double() if e else 1.0
        gain = (0.2 if e else 0.1) * (c.requires_grad_() - ref - 0.7)
        true = w * (1 - torch.where(DESIRABLE != 0, gain, -gain).sigmoid())
        check(functools.partial(kto_loss, c, ref, DESIRABLE, 0.7, **(KTO if e else {})), true, (c,))


@promise("values")
@pytest.mark.parametrize("kind", DPO_KINDS)
def test_dpo_is_finite_at_extremes(kind: str) -> None:
    for divergence in ("reverse_kl", "forward_kl", "js", "alpha") if kind in DIVERGENT else ("reverse_kl",):
        for gap in (-3000.0, 3000.0):
            if divergence in ("forward_kl", "alpha") and kind == "ipo":
                gap /= 1000  # a square of e^80 is beyond float32, whatever the code does
            c, r, rc, rr = (torch.tensor([x], requires_grad=True) for x in (gap - 5000, -gap - 5000, -5000.0, -5000.0))
            loss = dpo_loss(c, r, rc, rr, divergence=divergence, **options(kind, 1))
            loss.backward()
            assert all(x.isfinite().all() for x in (loss, c.grad, r.grad))
            assert rc.grad is rr.grad is None


@promise("values")
def test_orpo_is_finite_from_certain_to_impossible() -> None:
    for chosen in (0.0, -1e-30, -1e-12, -1e-7, -1.0, -200.0, -1e4):
        for rejected in (0.0, -1e-30, -1e-7, -1.0, -1e4):
            c, r = (torch.tensor([x], requires_grad=True) for x in (chosen, rejected))
            loss = orpo_loss(c, r)
            loss.backward()
            assert all(x.isfinite().all() for x in (loss, c.grad, r.grad)), (chosen, rejected)
            if -1e-18 > chosen > -1 and rejected == -1.0:  # beyond float32's 1 - p the odds still move
                p, odds = math.exp(chosen), 1 / math.expm1(1)
                assert c.grad.item() == pytest.approx(-1 - 0.1 * odds / (p + odds * (1 - p)), rel=1e-6)


@promise("options")
def test_lengths_one_number_and_what_is_not_differentiated() -> None:
    four, none = sums(), torch.zeros(B, dtype=torch.long)
    for kind in PER_TOKEN:  # an answer without tokens counts as one
        got, same = (dpo_loss(*four, kind=kind, chosen_length=n, rejected_length=n) for n in (none, none + 1))
        torch.testing.assert_close(got, same)
    c, r, ref, _ = four
    torch.testing.assert_close(cpo_loss(c, r, torch.tensor(3.0)), cpo_loss(c, r, None) + 3)
    values = kto_loss(c, ref, DESIRABLE, 0.7, reduction="none", **KTO)
    assert torch.equal(kto_loss(c, ref, DESIRABLE.bool(), 0.7, reduction="none", **KTO), values)
    mean = kto_loss(c, ref, DESIRABLE, torch.tensor(0.7, requires_grad=True), **KTO)
    torch.testing.assert_close(mean, values.mean())
    assert not mean.requires_grad
    near = dpo_loss(*four, divergence="alpha", alpha=1 + 1e-9)  # the alpha divergence meets the reverse KL
    torch.testing.assert_close(near, dpo_loss(*four), rtol=1e-7, atol=0)
    c, r = means()
    nll = torch.tensor(2.0, dtype=torch.float64)
    torch.testing.assert_close(orpo_loss(c, r, nll, beta=0.2), orpo_loss(c, r, beta=0.2) + c.mean() + 2)


@promise("values")
def test_kto_reference() -> None:
    x, _, ref, _ = sums()
    true = sum(v - u for v, u in zip(x.tolist(), ref.tolist(), strict=True)) / B
    low, high = sorted([kto_reference(x, ref).item(), kto_reference(ref, x).item()])
    assert low == 0
    assert high == pytest.approx(abs(true), rel=1e-12)
    assert kto_reference(x[:0], ref[:0]).item() == 0
    assert not kto_reference(x.requires_grad_(), ref).requires_grad


@promise("layouts")
def test_no_pairs_at_all_is_zero() -> None:
    none = torch.zeros(0, requires_grad=True)
    for loss in (
        *(dpo_loss(none, none, none, none, **options(kind, 0)) for kind in DPO_KINDS),
        simpo_loss(none, none),
        cpo_loss(none, none, None),
        orpo_loss(none, none),
        kto_loss(none, none, none.detach().bool(), 0.0),
    ):
        loss.backward()
        assert loss.item() == 0


@promise("host", "compile")
def test_no_host_synchronisation_and_one_graph() -> None:
    x, y, u, v = (-torch.rand(B, requires_grad=True) for _ in range(4))
    n, count = torch.arange(1, B + 1), torch.tensor(9)
    with NoHostSync():
        for kind in DPO_KINDS:
            dpo_loss(x, y, u, v, num_items=count, **options(kind)).backward(retain_graph=True)
        simpo_loss(x, y, num_items=count)
        cpo_loss(x, y, -x, num_items=count)
        orpo_loss(x, y, num_items=count)
        kto_loss(x, y, n > 3, kto_reference(x, y), num_items=count)
        losses.group_advantages(x, 3)
        losses.leave_one_out_advantages(x, 3)
    compiled = torch.compile(dpo_loss, fullgraph=True, backend="eager")
    four = [t.detach() for t in (x, y, u, v)]
    torch.testing.assert_close(compiled(*four), dpo_loss(*four))
