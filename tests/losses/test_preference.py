"""Preference losses against plain PyTorch in float64, their gradients against differences, and their extremes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fuzz.loss_cases import pair_loss
from lowtide import losses
from lowtide.errors import ArgumentTypeError, ArgumentValueError, LowtideError
from lowtide.losses import DPO_KINDS, cpo_loss, dpo_loss, kto_loss, kto_reference, orpo_loss, simpo_loss

SMOOTHED = {"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"}
PER_TOKEN = {"ipo", "sigmoid_norm"}
DIVERGENT = {"sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "discopop"}


def sums(seed: int, B: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ref = -10 + 3 * torch.randn(2, B, generator=g, dtype=torch.float64)
    policy = ref + 2 * torch.randn(2, B, generator=g, dtype=torch.float64)
    return tuple(x.to(dtype) for x in (policy[0], policy[1], ref[0], ref[1]))  # type: ignore[return-value]


def options(kind: str, B: int = 6) -> dict:
    found: dict = {"beta": 0.3}
    if kind in SMOOTHED:
        found["label_smoothing"] = 0.1
    if kind in PER_TOKEN:
        found["chosen_length"] = torch.arange(1, B + 1)
        found["rejected_length"] = torch.arange(B, 0, -1)
    return found


def means(seed: int, B: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = -torch.rand(2, B, generator=g, dtype=torch.float64).exp() * torch.logspace(-6, 1, B, dtype=torch.float64)
    return x[0] - 0.01, x[1].flip(0) - 0.01  # differences of 1e-6 must not pass 0


def arguments(loss: str, seed: int) -> tuple[Tensor, ...]:
    c, r, rc, rr = sums(seed)
    return {
        "dpo_loss": (c, r, rc, rr), "simpo_loss": (c, r), "cpo_loss": (c, r, rc), "orpo_loss": means(seed),
        "kto_loss": (c, rc),
    }[loss]  # fmt: skip


DESIRABLE = torch.tensor([1, 0, 1, 1, 0, 0])
DIVERGENCES = [("forward_kl", 0.5), ("js", 0.5), ("alpha", 0.5), ("alpha", 1.5), ("alpha", 1)]
KTO = {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8}
CASES: list[tuple[str, dict]] = [
    *(("dpo_loss", {"kind": kind, **options(kind)}) for kind in DPO_KINDS),
    *(
        ("dpo_loss", {"kind": kind, **options(kind), "divergence": divergence, "alpha": alpha})
        for kind in sorted(DIVERGENT)
        for divergence, alpha in DIVERGENCES
    ),
    *(("simpo_loss", {"beta": 2.5, "gamma": 1.4, "label_smoothing": e}) for e in (0.0, 0.2)),
    ("cpo_loss", {"beta": 0.4, "label_smoothing": 0.1}),
    ("orpo_loss", {"beta": 0.2}),
    *(("kto_loss", {"kind": kind, **KTO}) for kind in ("kto", "apo_zero")),
]
NAMES = ["-".join((loss, *map(str, o.values()))) if "chosen_length" not in o else None for loss, o in CASES]


def computed(loss: str, tensors: tuple[Tensor, ...], o: dict) -> Tensor:
    if loss != "kto_loss":
        return getattr(losses, loss)(*tensors, **o)
    return kto_loss(*tensors, DESIRABLE, 0.7 if o["kind"] == "kto" else 0, **o)


def expected(loss: str, tensors: tuple[Tensor, ...], o: dict) -> Tensor:
    """Return the same by the reference of the randomly generated tests."""
    if loss == "kto_loss":
        o = {**o, "desirable": DESIRABLE.bool(), "kl": 0.7 if o["kind"] == "kto" else 0}
    elif loss == "cpo_loss":
        *tensors, nll = tensors
        o = {**o, "nll": nll}
    return pair_loss(loss, *tensors, **o)[0]


@pytest.mark.parametrize(("loss", "o"), CASES, ids=NAMES)
def test_values_gradients_and_reductions(loss: str, o: dict) -> None:
    for seed in range(4):
        tensors = arguments(loss, seed)
        trained = tensors[: {"dpo_loss": 2, "kto_loss": 1}.get(loss)]
        for x in trained:
            x.requires_grad_()
        true = expected(loss, tensors, {**o, "reduction": "none"})
        close = {"rtol": 1e-10, "atol": 0} if loss == "orpo_loss" else {}
        got = computed(loss, tensors, {**o, "reduction": "none"})
        torch.testing.assert_close(got, true, **close)
        grads = (torch.autograd.grad(x.sum(), trained) for x in (got, true))
        torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(computed(loss, tensors, o), true.mean())
        torch.testing.assert_close(computed(loss, tensors, {**o, "reduction": "sum"}), true.sum())
        for count in (11, torch.tensor(11)):
            torch.testing.assert_close(computed(loss, tensors, {**o, "num_items": count}), true.sum() / 11)


def test_the_alpha_divergence_meets_the_reverse_kl() -> None:
    four = sums(3)
    near = dpo_loss(*four, divergence="alpha", alpha=1 + 1e-9)
    torch.testing.assert_close(near, dpo_loss(*four), rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("kind", "divergence"),
    [(kind, "reverse_kl") for kind in DPO_KINDS]
    + [(kind, divergence) for kind in sorted(DIVERGENT) for divergence in ("forward_kl", "js", "alpha")],
)
@pytest.mark.parametrize("gap", [-3000.0, 3000.0])
def test_dpo_is_finite_at_extremes(kind: str, divergence: str, gap: float) -> None:
    if divergence in ("forward_kl", "alpha") and kind == "ipo":
        gap /= 1000  # a square of e^80 is beyond float32, whatever the code does
    c, r, rc, rr = (torch.tensor([x], requires_grad=True) for x in (gap - 5000, -gap - 5000, -5000.0, -5000.0))
    loss = dpo_loss(c, r, rc, rr, kind=kind, divergence=divergence, **options(kind, 1))
    loss.backward()
    assert loss.isfinite()
    assert c.grad.isfinite().all()
    assert r.grad.isfinite().all()


@pytest.mark.parametrize("kind", sorted(PER_TOKEN))
def test_an_answer_without_tokens_counts_as_one(kind: str) -> None:
    four, none = sums(8), torch.zeros(6, dtype=torch.long)
    got = dpo_loss(*four, kind=kind, chosen_length=none, rejected_length=none)
    torch.testing.assert_close(got, dpo_loss(*four, kind=kind, chosen_length=none + 1, rejected_length=none + 1))


def test_the_negative_log_likelihood_may_be_one_number_or_none() -> None:
    c, r, *_ = sums(1)
    torch.testing.assert_close(cpo_loss(c, r, torch.tensor(3.0)), cpo_loss(c, r, None) + 3)
    c, r = means(2)
    nll = torch.tensor(2.0, dtype=torch.float64)
    torch.testing.assert_close(orpo_loss(c, r, nll, beta=0.2), orpo_loss(c, r, beta=0.2) + c.mean() + 2)


@pytest.mark.parametrize("chosen", [0.0, -1e-30, -1e-12, -1e-7, -1.0, -200.0, -1e4])
@pytest.mark.parametrize("rejected", [0.0, -1e-30, -1e-7, -1.0, -1e4])
def test_orpo_is_finite_from_certain_to_impossible(chosen: float, rejected: float) -> None:
    c, r = (torch.tensor([x], requires_grad=True) for x in (chosen, rejected))
    loss = orpo_loss(c, r)
    loss.backward()
    assert loss.isfinite()
    assert c.grad.isfinite().all()
    assert r.grad.isfinite().all()
    if -1e-18 > chosen > -1 and rejected == -1.0:  # beyond float32's 1 - p the odds still move
        p, odds = math.exp(chosen), 1 / math.expm1(1)
        assert c.grad.item() == pytest.approx(-1 - 0.1 * odds / (p + odds * (1 - p)), rel=1e-6)


def test_kto_takes_a_bool_mask_and_a_tensor_that_is_not_differentiated() -> None:
    x, _, ref, _ = sums(3)
    values = kto_loss(x, ref, DESIRABLE, 0.7, reduction="none", **KTO)
    assert torch.equal(kto_loss(x, ref, DESIRABLE.bool(), 0.7, reduction="none", **KTO), values)
    mean = kto_loss(x, ref, DESIRABLE, torch.tensor(0.7, requires_grad=True), **KTO)
    torch.testing.assert_close(mean, values.mean())
    assert not mean.requires_grad


def test_kto_reference() -> None:
    x, _, ref, _ = sums(4)
    true = sum(v - u for v, u in zip(x.tolist(), ref.tolist(), strict=True)) / 6
    low, high = sorted([kto_reference(x, ref).item(), kto_reference(ref, x).item()])
    assert low == 0
    assert high == pytest.approx(abs(true), rel=1e-12)
    assert kto_reference(x[:0], ref[:0]).item() == 0
    assert not kto_reference(x.requires_grad_(), ref).requires_grad


def test_no_pairs_at_all_is_zero() -> None:
    none = torch.zeros(0, requires_grad=True)
    for loss in (
        *(dpo_loss(none, none, none, none, kind=kind, **options(kind, 0)) for kind in DPO_KINDS),
        simpo_loss(none, none),
        cpo_loss(none, none, None),
        orpo_loss(none, none),
        kto_loss(none, none, none.detach().bool(), 0.0),
    ):
        loss.backward()
        assert loss.item() == 0


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"kind": "dpo"}, ArgumentValueError, "kind: expected 'sigmoid', 'robust', 'hinge'"),
        ({"beta": 0}, ArgumentValueError, "beta: expected a finite number above 0, got 0"),
        ({"divergence": "kl"}, ArgumentValueError, "divergence: expected 'reverse_kl'"),
        ({"divergence": "js", "kind": "apo_zero"}, ArgumentValueError, "divergence: expected 'reverse_kl' with kind"),
        ({"label_smoothing": 0.1, "kind": "hinge"}, ArgumentValueError, "label_smoothing: expected 0 with kind"),
        ({"label_smoothing": 0.7}, ArgumentValueError, "label_smoothing: expected a number from 0 to 0.5"),
        ({"label_smoothing": 0.5, "kind": "robust"}, ArgumentValueError, "below 1/2"),
        ({"kind": "exo_pair"}, ArgumentValueError, "label_smoothing: expected a number above 0"),
        ({"kind": "ipo"}, ArgumentValueError, "chosen_length: expected tokens of each answer"),
        ({"kind": "ipo", "chosen_length": torch.ones(3)}, ArgumentValueError, "rejected_length"),
        ({"chosen_length": torch.ones(3)}, ArgumentValueError, "chosen_length: expected None with kind='sigmoid'"),
        ({"kind": "ipo", "chosen_length": 3, "rejected_length": 3}, ArgumentTypeError, "chosen_length"),
        ({"reduction": "token"}, ArgumentValueError, "'mean', 'sum' or 'none'"),
        ({"rejected_logprob": torch.ones(2)}, ArgumentValueError, r"rejected_logprob: expected shape \[3\]"),
    ],
)
def test_dpo_errors(kwargs: dict, error: type[Exception], text: str) -> None:
    names = ("chosen_logprob", "rejected_logprob", "ref_chosen_logprob", "ref_rejected_logprob")
    with pytest.raises(error, match=text) as raised:
        dpo_loss(**{**{name: torch.ones(3) for name in names}, **kwargs})
    assert isinstance(raised.value, LowtideError)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: simpo_loss(x, x, gamma=math.inf), "gamma: expected a finite number"),
        (lambda x: simpo_loss(x, x[:1]), "rejected_mean_logprob"),
        (lambda x: cpo_loss(x, x, x[:2]), "chosen_nll"),
        (lambda x: cpo_loss(x, x, 3.0), "chosen_nll: expected a torch.Tensor"),
        (lambda x: kto_loss(x, x, x, 0.0), "desirable: expected a bool or integer"),
        (lambda x: kto_loss(x, x, x.bool(), x), "kl: expected a number or a 0-d tensor"),
        (lambda x: kto_loss(x, x, x.bool(), 0.1, kind="apo_zero"), "kl: expected 0"),
        (lambda x: kto_loss(x, x, x.bool(), 0.1, kind="bco"), "kind: expected 'kto' or 'apo_zero'"),
        (lambda x: kto_loss(x, x, x.bool(), 0.1, desirable_weight=-1), "desirable_weight"),
        (lambda x: kto_reference(x, x[:1]), "ref_logprob"),
    ],
)
def test_other_errors(call: Callable[[Tensor], Tensor], text: str) -> None:
    with pytest.raises(LowtideError, match=text):
        call(torch.ones(3))
