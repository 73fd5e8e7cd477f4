"""Preference losses against loops over pairs in float64, their gradients against differences, and their extremes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from losses.loops import logsigmoid, sigmoid
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


def score(x: float, divergence: str, alpha: float) -> float:
    t = math.exp(x)
    if divergence == "forward_kl":
        return 1 - 1 / t
    if divergence == "js":
        return math.log(2 * t / (1 + t))
    if divergence == "alpha":
        return (t ** (alpha - 1) - 1) / (alpha - 1) if alpha != 1 else x
    return x


def one_pair(kind: str, a: float, b: float, s: Callable[[float], float], o: dict, i: int) -> float:
    """The loss of one pair from its log-ratios, as the papers write it."""
    beta, e = o["beta"], o.get("label_smoothing", 0.0)
    d = beta * (s(a) - s(b))
    if kind == "sigmoid":
        return -(1 - e) * logsigmoid(d) - e * logsigmoid(-d)
    if kind == "robust":
        return (-(1 - e) * logsigmoid(d) + e * logsigmoid(-d)) / (1 - 2 * e)
    if kind == "hinge":
        return max(0.0, 1 - d)
    if kind in PER_TOKEN:
        per_token = s(a) / o["chosen_length"][i].item() - s(b) / o["rejected_length"][i].item()
        return (per_token - 1 / (2 * beta)) ** 2 if kind == "ipo" else -logsigmoid(beta * per_token)
    if kind == "exo_pair":
        q = sigmoid(d)
        return q * math.log(q / (1 - e)) + (1 - q) * math.log((1 - q) / e)
    if kind == "nca_pair":
        return -logsigmoid(beta * a) - 0.5 * logsigmoid(-beta * a) - 0.5 * logsigmoid(-beta * b)
    if kind == "bco_pair":
        return -logsigmoid(beta * a) - logsigmoid(-beta * b)
    if kind == "sppo_hard":
        return (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2
    if kind == "apo_zero":
        return 1 - sigmoid(beta * a) + sigmoid(beta * b)
    if kind == "apo_down":
        return sigmoid(beta * a) + 1 - sigmoid(beta * (a - b))
    assert kind == "discopop"
    m = sigmoid(d / o.get("tau", 0.05))
    return -(1 - m) * logsigmoid(d) + m * math.exp(-d)


def dpo_reference(kind: str, four: tuple[Tensor, ...], o: dict) -> list[float]:
    c, r, rc, rr = (x.tolist() for x in four)
    a = [x - y for x, y in zip(c, rc, strict=True)]
    b = [x - y for x, y in zip(r, rr, strict=True)]
    if kind in ("aot", "aot_unpaired"):
        if kind == "aot":
            up = sorted(x - y for x, y in zip(c, r, strict=True))
            down = sorted(x - y for x, y in zip(rc, rr, strict=True))
        else:
            up, down = sorted(a), sorted(b)
        return [one_pair("sigmoid", x, y, lambda v: v, o, 0) for x, y in zip(up, down, strict=True)]

    def s(x: float) -> float:
        return score(x, o.get("divergence", "reverse_kl"), o.get("alpha", 0.5))

    return [one_pair(kind, x, y, s, o, i) for i, (x, y) in enumerate(zip(a, b, strict=True))]


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_dpo_kinds_and_reductions(kind: str) -> None:
    for seed in range(4):
        four, o = sums(seed), options(kind)
        true = torch.tensor(dpo_reference(kind, four, o), dtype=torch.float64)
        torch.testing.assert_close(dpo_loss(*four, kind=kind, reduction="none", **o), true)
        torch.testing.assert_close(dpo_loss(*four, kind=kind, **o), true.mean())
        torch.testing.assert_close(dpo_loss(*four, kind=kind, reduction="sum", **o), true.sum())
        for count in (11, torch.tensor(11)):
            torch.testing.assert_close(dpo_loss(*four, kind=kind, num_items=count, **o), true.sum() / 11)


@pytest.mark.parametrize("kind", sorted(DIVERGENT))
@pytest.mark.parametrize(
    ("divergence", "alpha"), [("forward_kl", 0.5), ("js", 0.5), ("alpha", 0.5), ("alpha", 1.5), ("alpha", 1)]
)
def test_dpo_divergences(kind: str, divergence: str, alpha: float) -> None:
    four, o = sums(9), {**options(kind), "divergence": divergence, "alpha": alpha}
    true = torch.tensor(dpo_reference(kind, four, o), dtype=torch.float64)
    torch.testing.assert_close(dpo_loss(*four, kind=kind, reduction="none", **o), true)


def test_the_alpha_divergence_meets_the_reverse_kl() -> None:
    four = sums(3)
    near = dpo_loss(*four, divergence="alpha", alpha=1 + 1e-9)
    torch.testing.assert_close(near, dpo_loss(*four), rtol=1e-7, atol=0)


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_dpo_gradients(kind: str) -> None:
    c, r, rc, rr = (x.requires_grad_() for x in sums(5))
    o = options(kind)
    assert torch.autograd.gradcheck(lambda x, y: dpo_loss(x, y, rc, rr, kind=kind, reduction="none", **o), (c, r))
    dpo_loss(c, r, rc, rr, kind=kind, **o).backward()
    assert rc.grad is None
    assert rr.grad is None


@pytest.mark.parametrize("kind", sorted(DIVERGENT))
@pytest.mark.parametrize("divergence", ["forward_kl", "js", "alpha"])
def test_dpo_gradients_of_divergences(kind: str, divergence: str) -> None:
    c, r, rc, rr = (x.requires_grad_() for x in sums(6))
    o = {**options(kind), "divergence": divergence}
    assert torch.autograd.gradcheck(lambda x, y: dpo_loss(x, y, rc, rr, kind=kind, **o), (c, r))


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


def test_float32_pairs_agree_with_float64() -> None:
    for kind in DPO_KINDS:
        o = options(kind)
        low = dpo_loss(*sums(7, dtype=torch.float32), kind=kind, **o)
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), dpo_loss(*sums(7), kind=kind, **o), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", sorted(PER_TOKEN))
def test_an_answer_without_tokens_counts_as_one(kind: str) -> None:
    four, none = sums(8), torch.zeros(6, dtype=torch.long)
    got = dpo_loss(*four, kind=kind, chosen_length=none, rejected_length=none)
    torch.testing.assert_close(got, dpo_loss(*four, kind=kind, chosen_length=none + 1, rejected_length=none + 1))


def test_simpo() -> None:
    c, r, _, _ = sums(0)
    for e in (0.0, 0.2):
        true = []
        for x, y in zip(c.tolist(), r.tolist(), strict=True):
            m = 2.5 * (x - y) - 1.4
            true.append(-(1 - e) * logsigmoid(m) - e * logsigmoid(-m))
        got = simpo_loss(c, r, beta=2.5, gamma=1.4, label_smoothing=e, reduction="none")
        torch.testing.assert_close(got, torch.tensor(true, dtype=torch.float64))
    assert torch.autograd.gradcheck(simpo_loss, (c.requires_grad_(), r.requires_grad_()))


def test_cpo() -> None:
    c, r, nll, _ = sums(1)
    true = [
        -0.9 * logsigmoid(0.4 * (x - y)) - 0.1 * logsigmoid(-0.4 * (x - y)) + z
        for x, y, z in zip(c.tolist(), r.tolist(), nll.tolist(), strict=True)
    ]
    got = cpo_loss(c, r, nll, beta=0.4, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(got, torch.tensor(true, dtype=torch.float64))
    alone = cpo_loss(c, r, None)
    torch.testing.assert_close(cpo_loss(c, r, torch.tensor(3.0)), alone + 3)
    leaves = tuple(x.requires_grad_() for x in (c, r, nll))
    assert torch.autograd.gradcheck(cpo_loss, leaves)


def means(seed: int, B: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = -torch.rand(2, B, generator=g, dtype=torch.float64).exp() * torch.logspace(-6, 1, B, dtype=torch.float64)
    return x[0], x[1].flip(0)


def test_orpo() -> None:
    c, r = means(2)
    true = []
    for x, y in zip(c.tolist(), r.tolist(), strict=True):
        odds = [math.log(math.exp(v) / -math.expm1(v)) for v in (x, y)]
        true.append(-x - 0.2 * logsigmoid(odds[0] - odds[1]))
    torch.testing.assert_close(
        orpo_loss(c, r, beta=0.2, reduction="none"), torch.tensor(true, dtype=torch.float64), rtol=1e-10, atol=0
    )
    nll = torch.tensor(2.0, dtype=torch.float64)
    torch.testing.assert_close(orpo_loss(c, r, nll, beta=0.2), orpo_loss(c, r, beta=0.2) + c.mean() + 2)
    leaves = tuple((x - 0.01).requires_grad_() for x in (c, r))  # differences of 1e-6 must not pass 0
    assert torch.autograd.gradcheck(orpo_loss, leaves)


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


@pytest.mark.parametrize("kind", ["kto", "apo_zero"])
def test_kto(kind: str) -> None:
    x, _, ref, _ = sums(3)
    desirable = torch.tensor([1, 0, 1, 1, 0, 0])
    kl = 0.7 if kind == "kto" else 0
    true = []
    for v, u, good in zip(x.tolist(), ref.tolist(), desirable.tolist(), strict=True):
        gain = 0.2 * (v - u - kl)
        true.append(1.3 * (1 - sigmoid(gain)) if good else 0.8 * (1 - sigmoid(-gain)))
    o = {"kind": kind, "beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8}
    for mask in (desirable, desirable.bool()):
        got = kto_loss(x, ref, mask, kl, reduction="none", **o)
        torch.testing.assert_close(got, torch.tensor(true, dtype=torch.float64))
    if kind == "kto":
        point = torch.tensor(kl, requires_grad=True)
        mean = kto_loss(x, ref, desirable, point, **o)
        torch.testing.assert_close(mean, got.mean())
        assert not mean.requires_grad
    assert torch.autograd.gradcheck(lambda v: kto_loss(v, ref, desirable, kl, **o), x.requires_grad_())


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
        ({"kind": ["sigmoid"]}, ArgumentValueError, "kind: expected "),
        ({"beta": 0}, ArgumentValueError, "beta: expected a finite number above 0, got 0"),
        ({"beta": math.inf}, ArgumentValueError, "beta"),
        ({"beta": "0.1"}, ArgumentTypeError, "beta: expected a number"),
        ({"divergence": "kl"}, ArgumentValueError, "divergence: expected 'reverse_kl'"),
        ({"divergence": "js", "kind": "apo_zero"}, ArgumentValueError, "divergence: expected 'reverse_kl' with kind"),
        ({"label_smoothing": 0.1, "kind": "hinge"}, ArgumentValueError, "label_smoothing: expected 0 with kind"),
        ({"label_smoothing": 0.7}, ArgumentValueError, "label_smoothing: expected a number from 0 to 0.5"),
        ({"label_smoothing": 0.5, "kind": "robust"}, ArgumentValueError, "below 1/2"),
        ({"kind": "exo_pair"}, ArgumentValueError, "label_smoothing: expected a number above 0"),
        ({"tau": 2}, ArgumentValueError, "tau"),
        ({"alpha": math.nan}, ArgumentValueError, "alpha"),
        ({"kind": "ipo"}, ArgumentValueError, "chosen_length: expected tokens of each answer"),
        ({"kind": "ipo", "chosen_length": torch.ones(3)}, ArgumentValueError, "rejected_length"),
        ({"chosen_length": torch.ones(3)}, ArgumentValueError, "chosen_length: expected None with kind='sigmoid'"),
        ({"kind": "ipo", "chosen_length": 3, "rejected_length": 3}, ArgumentTypeError, "chosen_length"),
        ({"reduction": "token"}, ArgumentValueError, "'mean', 'sum' or 'none'"),
        ({"rejected_logprob": torch.ones(2)}, ArgumentValueError, r"rejected_logprob: expected shape \[3\]"),
        ({"ref_chosen_logprob": torch.ones(3).int()}, ArgumentTypeError, "ref_chosen_logprob"),
        ({"ref_rejected_logprob": None}, ArgumentTypeError, "ref_rejected_logprob: expected a torch.Tensor"),
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
        (lambda x: simpo_loss(x, x, beta=-1), "beta"),
        (lambda x: simpo_loss(x, x, gamma=math.inf), "gamma: expected a finite number"),
        (lambda x: simpo_loss(x, x[:1]), "rejected_mean_logprob"),
        (lambda x: cpo_loss(x, x, x[:2]), "chosen_nll"),
        (lambda x: cpo_loss(x, x, 3.0), "chosen_nll: expected a torch.Tensor"),
        (lambda x: orpo_loss(x, x, beta=0), "beta"),
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
