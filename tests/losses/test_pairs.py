"""Preference losses: values and gradients against the references in float64, reductions, extremes, no pairs at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from losses.loops import NoHostSync
from losses.references import pair_loss
from lowtide import losses
from lowtide.losses import DPO_KINDS, cpo_loss, dpo_loss, kto_loss, kto_reference, orpo_loss, simpo_loss
from promises import promise

B = 6
SMOOTHED = {"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"}
PER_TOKEN = {"ipo", "sigmoid_norm"}
DIVERGENT = {"sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "discopop"}
DIVERGENCES = [("forward_kl", 0.5), ("js", 0.5), ("alpha", 0.5), ("alpha", 1.5), ("alpha", 1)]
DESIRABLE = torch.tensor([1, 0, 1, 1, 0, 0])
KTO = {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8}
# A loss, and the sets of options that are tried.
CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    **{
        kind: ("dpo_loss", [{}, *({"divergence": d, "alpha": a} for d, a in DIVERGENCES if kind in DIVERGENT)])
        for kind in DPO_KINDS
    },
    "simpo": ("simpo_loss", [{}, {"beta": 2.5, "gamma": 1.4, "label_smoothing": 0.2}]),
    "cpo": ("cpo_loss", [{}, {"beta": 0.4, "label_smoothing": 0.1}]),
    "orpo": ("orpo_loss", [{}, {"beta": 0.2}]),
    "kto": ("kto_loss", [{}, KTO]),
    "apo_zero_unpaired": ("kto_loss", [{"kind": "apo_zero"}]),
}
DEFAULTS = {"simpo": {"beta": 2.0}}  # other than the reference's


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


def computed(name: str, tensors: tuple[Tensor, ...], o: dict[str, Any]) -> Tensor:
    loss = CASES[name][0]
    if loss != "kto_loss":
        return getattr(losses, loss)(*tensors, **o)
    return kto_loss(*tensors, DESIRABLE, 0 if "kind" in o else 0.7, **o)


def expected(name: str, tensors: tuple[Tensor, ...], o: dict[str, Any]) -> Tensor:
    """Return the same by the reference of the randomly generated tests."""
    loss, o = CASES[name][0], DEFAULTS.get(name, {}) | o
    if loss == "kto_loss":
        o = {**o, "desirable": DESIRABLE.bool(), "kl": 0 if "kind" in o else 0.7}
    elif loss == "cpo_loss":
        *tensors, nll = tensors
        o = {**o, "nll": nll}
    return pair_loss(loss, *tensors, **o)[0]


@promise("values", "options")
@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_reductions(name: str) -> None:
    loss, sets = CASES[name]
    for more in sets * 2:
        c, r, rc, rr = sums()
        tensors = {"dpo_loss": (c, r, rc, rr), "cpo_loss": (c, r, rc), "kto_loss": (c, rc), "simpo_loss": (c, r)}.get(
            loss, means()
        )
        o = options(name) | more if loss == "dpo_loss" else more
        trained = tensors[: {"dpo_loss": 2, "kto_loss": 1}.get(loss)]
        for x in trained:
            x.requires_grad_()
        got, true = (f(name, tensors, {**o, "reduction": "none"}) for f in (computed, expected))
        torch.testing.assert_close(got, true, rtol=1e-10, atol=1e-12)
        grads = (torch.autograd.grad(x.sum(), trained) for x in (got, true))
        torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(computed(name, tensors, o), true.mean())
        torch.testing.assert_close(computed(name, tensors, {**o, "reduction": "sum"}), true.sum())
        for count in (11, torch.tensor(11)):
            torch.testing.assert_close(computed(name, tensors, {**o, "num_items": count}), true.sum() / 11)


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
        losses.wpo_weights(x[None], x[None].exp(), n[None] > 2)
    compiled = torch.compile(dpo_loss, fullgraph=True, backend="eager")
    four = [t.detach() for t in (x, y, u, v)]
    torch.testing.assert_close(compiled(*four), dpo_loss(*four))
