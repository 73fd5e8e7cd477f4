"""What losses are made of, against loops over sequences and tokens: ratios, corrections, advantages, denominators."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from losses.loops import Batch, batch, each
from losses.references import k_estimate, reduced
from lowtide import linear_divergence, linear_logprobs, losses
from promises import promise

pytestmark = promise("values")


def same(got: Tensor, true: Tensor | float) -> None:
    torch.testing.assert_close(got, torch.as_tensor(true, dtype=torch.float64), rtol=1e-11, atol=1e-13)


def at_level(b: Batch, difference: Callable[[int, int], float], level: str) -> Callable[[int, int], float]:
    """Return the exponential of a log-ratio at a token: its own, or its sequence's sum or mean."""

    def ratio(i: int, t: int) -> float:
        if level == "token":
            return math.exp(difference(i, t))
        ts = b.kept()[i]
        total = sum(difference(i, u) for u in ts)
        return math.exp(total / len(ts) if level.startswith("geometric") else total)

    return ratio


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "geometric_token"])
def test_importance_ratio(level: str) -> None:
    for seed in range(2):
        b = batch(seed)
        got = losses.importance_ratio(b.logprob, b.old, b.mask, level=level)
        same(got, each(b, at_level(b, lambda i, t, b=b: b.logprob[i, t].item() - b.old[i, t].item(), level)))
        if level != "geometric_token":
            surrogate = losses.clipped_surrogate(got, b.advantage)
            ppo = losses.ppo_loss(b.logprob, b.old, b.advantage, b.mask, level=level)
            same(ppo, reduced(surrogate, b.mask, "token")[0])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_sampler_correction(level: str, kind: str) -> None:
    for seed, (low, high) in enumerate([(0.0, 2.0), (0.8, 1.1), (0.9, math.inf)]):
        b = batch(seed)
        b.sampler[0, 0] = math.nan  # a kept token that the sampler could not score

        def difference(i: int, t: int, b: Batch = b) -> float:
            s = b.sampler[i, t].item()
            return 0.0 if math.isnan(s) else b.old[i, t].item() - s

        def weight(i: int, t: int, low: float = low, high: float = high, of: Callable = at_level) -> float:
            w = of(b, difference, level)(i, t)  # noqa: B023
            return min(max(w, low), high) if kind == "truncate" else (w if low <= w <= high else 0.0)

        got = losses.sampler_correction(b.old, b.sampler, b.mask, level=level, kind=kind, low=low, high=high)
        same(got, each(b, weight))


def test_kl_estimates() -> None:
    b = batch(0)
    for kind in ("k1", "k2", "k3"):
        same(
            losses.kl_estimate(b.logprob, b.ref, b.mask, kind=kind),
            reduced(k_estimate(b.logprob, b.ref, kind), b.mask, "none")[0],
        )
    x = torch.full((1, 64), -3.0)  # of close models k3 is not noise
    ref = x + 1e-3
    d = (ref - x).double()
    true = torch.expm1(d) - d
    assert ((losses.kl_estimate(x, ref) - true).abs() < 1e-3 * true).all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages(scale: str) -> None:
    reward = torch.randn(12, dtype=torch.float64).requires_grad_()
    got = losses.group_advantages(reward, 4, scale=scale, eps=1e-3)
    r = reward.tolist()

    def std(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))

    for i in range(12):
        group = r[i // 4 * 4 : i // 4 * 4 + 4]
        a = r[i] - sum(group) / 4
        a /= {"group": std(group) + 1e-3, "batch": std(r) + 1e-3, "none": 1.0}[scale]
        assert got[i].item() == pytest.approx(a, rel=1e-11)
    assert not got.requires_grad
    assert losses.group_advantages(torch.ones(6), 3, scale=scale).tolist() == [0] * 6
    assert losses.group_advantages(torch.ones(0), 3, scale=scale).shape == (0,)


def test_leave_one_out_advantages() -> None:
    reward = torch.randn(12, dtype=torch.float64)
    got = losses.leave_one_out_advantages(reward, 3)
    r = reward.tolist()
    for i in range(12):
        others = [r[j] for j in range(i // 3 * 3, i // 3 * 3 + 3) if j != i]
        assert got[i].item() == pytest.approx(r[i] - sum(others) / 2, rel=1e-11)


def test_the_clip_takes_the_gradient_on_its_own_side_alone() -> None:
    r = torch.tensor([[0.5, 0.9, 1.1, 1.5, 5.0]] * 2, requires_grad=True)
    losses.clipped_surrogate(r, torch.tensor([1.0, -1.0]), ratio_max=3.0).sum().backward()
    assert r.grad.tolist() == [[-1, -1, -1, 0, 0], [0, 1, 1, 1, 0]]


def test_grpo_takes_the_papers_beta_where_there_is_a_reference() -> None:
    b = batch(0)
    plain = losses.grpo_loss(b.logprob, b.old, b.advantage, b.mask)
    kl = reduced(k_estimate(b.logprob, b.ref, "k3"), b.mask, "sequence")[0]
    same(losses.grpo_loss(b.logprob, b.old, b.advantage, b.mask, ref_logprob=b.ref), plain + 0.04 * kl)
    same(losses.grpo_loss(b.logprob, b.old, b.advantage, b.mask, ref_logprob=b.ref, beta=0), plain)


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    b = batch(1, B=6)
    for reduction, count in (("token", b.mask.sum()), ("sequence", 6), ("sequence_sum", 6)):
        whole = losses.reduce_tokens(b.logprob, b.mask, reduction=reduction)
        pieces = (slice(i, i + 2) for i in (0, 2, 4))
        found = (losses.reduce_tokens(b.logprob[i], b.mask[i], reduction=reduction, num_items=count) for i in pieces)
        torch.testing.assert_close(sum(found), whole)


def test_sequences() -> None:
    b = batch(4)
    sums, means, weights = [], [], []
    for i, ts in enumerate(b.kept()):
        logs = [b.logprob[i, t].item() for t in ts]
        sums.append(sum(logs))
        means.append(sum(logs) / max(len(ts), 1))
        over = [b.logprob[i, t].item() - math.log(b.sum_sq_prob[i, t].item()) for t in ts]
        weights.append(math.exp(sum(over) / max(len(ts), 1)))
    same(losses.sequence_logprobs(b.logprob, b.mask), torch.tensor(sums, dtype=torch.float64))
    same(losses.sequence_logprobs(b.logprob, b.mask, average=True), torch.tensor(means, dtype=torch.float64))
    got = losses.wpo_weights(b.logprob.clone().requires_grad_(), b.sum_sq_prob.clone().requires_grad_(), b.mask)
    same(got, torch.tensor(weights, dtype=torch.float64))
    assert not got.requires_grad


def test_focal_is_finite_from_certain_to_impossible() -> None:
    for gamma in (0, 0.5, 1, 2):
        for logprob in (0.0, -1e-40, -1e-10, -1.0, -1e4):
            x = torch.tensor([logprob], requires_grad=True)
            loss = losses.focal_loss(x, gamma=gamma)
            loss.backward()
            assert loss.item() == pytest.approx(-((-math.expm1(logprob)) ** gamma) * logprob, rel=1e-5, abs=1e-37)
            assert x.grad.isfinite().all()


def test_soft_targets() -> None:
    """Teacher's top 5, some unused, against cross entropy with class probabilities and the divergence's gradient."""
    B, T, D, V = 3, 11, 8, 29
    x, w = (torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((B, T, D), (V, D)))
    mask = torch.rand(B, T) < 0.8
    ids = torch.rand(B, T, V).argsort(-1)[..., :5]
    target = torch.rand(B, T, 5, dtype=torch.float64) / 5
    target[..., 3:][torch.rand(B, T, 2) < 0.5] = 0
    dense = torch.zeros(B, T, V, dtype=torch.float64).scatter_(-1, ids, target)
    want = F.cross_entropy((x @ w.T)[mask], dense[mask])
    true = torch.autograd.grad(want, (x, w))
    kl = linear_divergence(x, w, None, None, teacher_topk=(ids, target.log(), "drop"), mask=mask, reduction="mean")
    for ids_BTK in (ids, ids.masked_fill(target == 0, -100)):
        got = losses.soft_target_loss(linear_logprobs(x, w, ids_BTK), target, mask)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, (x, w)), true)
    torch.testing.assert_close(torch.autograd.grad(kl, (x, w)), true)
    # classes that are impossible and not used, and a masked token
    logprob = torch.tensor([[[-1.0, -torch.inf], [-2.0, torch.nan], [torch.nan] * 2]], requires_grad=True)
    prob = torch.tensor([[[0.5, 0.0], [0.25, 0.0], [torch.nan, 1.0]]])
    loss = losses.soft_target_loss(logprob, prob, torch.tensor([[1, 1, 0]]), reduction="sum")
    loss.backward()
    assert loss.item() == 1.0
    assert torch.equal(logprob.grad, torch.tensor([[[-0.5, 0.0], [-0.25, 0.0], [0.0, 0.0]]]))
