"""Supervised and distillation losses against plain PyTorch in float64, and at the extremes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuzz.loss_cases import token_loss
from losses.loops import Batch, batch
from lowtide import linear_divergence, linear_logprobs, losses
from lowtide.errors import LowtideError

# The loss, its arguments beside the mask by the reference's names, and its options.
CASES: dict[str, tuple[str, tuple[str, ...], dict]] = {
    "sft": ("sft_loss", ("logprob",), {}),
    "dft": ("dft_loss", ("logprob",), {}),
    "focal": ("focal_loss", ("logprob",), {}),
    "focal_half": ("focal_loss", ("logprob",), {"gamma": 0.5}),
    "label_smoothed": ("label_smoothed_loss", ("logprob", "mean_logit", "lse"), {"label_smoothing": 0.2}),
    "z": ("z_loss", ("lse",), {}),
    "gkd": ("gkd_loss", ("divergence",), {"temperature": 3}),
    "sampled": ("sampled_distillation_loss", ("logprob", "ref"), {}),
    "sampled_k3": ("sampled_distillation_loss", ("logprob", "ref"), {"kind": "k3"}),
}


def computed(name: str, b: Batch, **more: object) -> Tensor:
    loss, fields, o = CASES[name]
    return getattr(losses, loss)(*(getattr(b, field) for field in fields), b.mask, **o, **more)


def expected(name: str, b: Batch, **more: object) -> Tensor:
    """Return the same by the reference of the randomly generated tests."""
    loss, (first, *rest), o = CASES[name]
    others = {"other" if field == "ref" else field: getattr(b, field) for field in rest}
    return token_loss(loss, getattr(b, first), b.mask, **others, **o, **more)[0]


def same(name: str, b: Batch, reference: dict | None = None, **more: object) -> None:
    """Compare value and gradients with the reference's, to which ``reference`` is passed in place of ``more``."""
    leaves = [getattr(b, field) for field in CASES[name][1] if field != "ref"]
    close = {"rtol": 1e-11, "atol": 1e-13}
    got, true = computed(name, b, **more), expected(name, b, **(more if reference is None else reference))
    torch.testing.assert_close(got, true, **close)
    grads = (torch.autograd.grad(loss.sum(), leaves) for loss in (got, true))
    torch.testing.assert_close(*grads, **close)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    for seed in range(4):
        b = batch(seed)
        for field in CASES[name][1]:
            getattr(b, field).requires_grad_()
        for reduction in ("token", "none", "sequence", "sequence_sum", "sum"):
            same(name, b, reduction=reduction)
        for count in (29, torch.tensor(29)):
            same(name, b, {"num_items": 29}, num_items=count)


def test_label_smoothing_and_z_loss_are_those_of_the_head() -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(6, 11, generator=g, dtype=torch.float64)
    y = torch.randint(0, 11, (6,), generator=g)
    lse = z.logsumexp(1)
    logprob = z.log_softmax(1)[torch.arange(6), y]
    got = losses.label_smoothed_loss(logprob, z.mean(1), lse, label_smoothing=0.3)
    torch.testing.assert_close(got, F.cross_entropy(z, y, label_smoothing=0.3))
    torch.testing.assert_close(losses.sft_loss(logprob), F.cross_entropy(z, y))
    torch.testing.assert_close(losses.z_loss(lse, coef=0.1), 0.1 * (lse**2).mean())


@pytest.mark.parametrize("gamma", [0, 0.5, 1, 2])
@pytest.mark.parametrize("logprob", [0.0, -1e-40, -1e-10, -1.0, -1e4])
def test_focal_is_finite_from_certain_to_impossible(gamma: float, logprob: float) -> None:
    x = torch.tensor([logprob], requires_grad=True)
    loss = losses.focal_loss(x, gamma=gamma)
    loss.backward()
    assert loss.item() == pytest.approx(-((-math.expm1(logprob)) ** gamma) * logprob, rel=1e-5, abs=1e-37)
    assert x.grad.isfinite().all()


ONE = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda: losses.sft_loss(ONE.long()), "logprob: expected a floating-point tensor"),
        (lambda: losses.dft_loss(ONE, ONE[:1].bool()), "mask: expected shape"),
        (lambda: losses.focal_loss(ONE, gamma=-1), "gamma"),
        (lambda: losses.label_smoothed_loss(ONE, ONE[0], ONE), "mean_logit: expected shape"),
        (lambda: losses.label_smoothed_loss(ONE, ONE, ONE[0]), "lse: expected shape"),
        (lambda: losses.label_smoothed_loss(ONE, ONE, ONE, label_smoothing=2), "label_smoothing"),
        (lambda: losses.z_loss(ONE, coef=-1), "coef"),
        (lambda: losses.gkd_loss(ONE, temperature=0), "temperature"),
        (lambda: losses.gkd_loss(ONE, reduction="batchmean"), "reduction: expected 'token'"),
        (lambda: losses.sampled_distillation_loss(ONE, ONE, kind="k1"), "kind: expected 'k2' or 'k3'"),
        (lambda: losses.sampled_distillation_loss(ONE, ONE[0]), "teacher_logprob"),
        (lambda: losses.soft_target_loss(ONE[0, 0], ONE[0, 0]), "logprob: expected shape"),
        (lambda: losses.soft_target_loss(ONE[None], ONE), "target_prob: expected shape"),
    ],
)
def test_errors(f: Callable[[], Tensor], text: str) -> None:
    with pytest.raises(LowtideError, match=text):
        f()


def test_soft_targets() -> None:
    """Teacher's top 5, some unused, against cross entropy with class probabilities and the divergence's gradient."""
    B, T, D, V, g = 3, 11, 8, 29, torch.Generator().manual_seed(1)
    x, w = (torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_() for shape in ((B, T, D), (V, D)))
    mask = torch.rand(B, T, generator=g) < 0.8
    ids = torch.rand(B, T, V, generator=g).argsort(-1)[..., :5]
    target = torch.rand(B, T, 5, generator=g, dtype=torch.float64) / 5
    target[..., 3:][torch.rand(B, T, 2, generator=g) < 0.5] = 0
    dense = torch.zeros(B, T, V, dtype=torch.float64).scatter_(-1, ids, target)
    want = F.cross_entropy((x @ w.T)[mask], dense[mask])
    true = torch.autograd.grad(want, (x, w))
    kl = linear_divergence(x, w, None, None, teacher_topk=(ids, target.log(), "drop"), mask=mask, reduction="mean")
    for ids_BTK in (ids, ids.masked_fill(target == 0, -100)):
        got = losses.soft_target_loss(linear_logprobs(x, w, ids_BTK), target, mask)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, (x, w)), true)
    torch.testing.assert_close(torch.autograd.grad(kl, (x, w)), true)


def test_soft_targets_of_impossible_classes() -> None:
    logprob = torch.tensor([[[-1.0, -torch.inf], [-2.0, torch.nan]]], requires_grad=True)
    loss = losses.soft_target_loss(logprob, torch.tensor([[[0.5, 0.0], [0.25, 0.0]]]), reduction="sum")
    loss.backward()
    assert loss.item() == 1.0
    assert torch.equal(logprob.grad, torch.tensor([[[-0.5, 0.0], [-0.25, 0.0]]]))
