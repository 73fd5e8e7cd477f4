"""Policy-gradient losses against plain PyTorch, their parts against loops, in float64; gradients against formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fuzz.loss_cases import k_estimate, reduced, token_loss
from losses.loops import Batch, batch, each
from lowtide import losses
from lowtide.errors import LowtideError

SEEDS = range(4)


def log_ratio(b: Batch, i: int, t: int) -> float:
    return b.logprob[i, t].item() - b.old[i, t].item()


def ratio(b: Batch, i: int, t: int, level: str) -> float:
    if level == "token":
        return math.exp(log_ratio(b, i, t))
    ts = b.kept()[i]
    total = sum(log_ratio(b, i, u) for u in ts)
    return math.exp(total / len(ts) if level.startswith("geometric") else total)


def same(got: Tensor, true: Tensor | float) -> None:
    torch.testing.assert_close(got, torch.as_tensor(true, dtype=torch.float64), rtol=1e-11, atol=1e-13)


def same_loss(name: str, b: Batch, advantage: Tensor, arguments: dict, reference: dict) -> None:
    """Compare value and gradient with the reference's, which takes its own arguments."""
    b.logprob.requires_grad_()
    got, true = call(name, b, advantage, **arguments), expected(name, b, advantage, **reference)
    same(got, true)
    same(*(torch.autograd.grad(loss.sum(), b.logprob)[0] for loss in (got, true)))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "geometric_token"])
def test_importance_ratio(level: str) -> None:
    for seed in SEEDS:
        b = batch(seed)
        got = losses.importance_ratio(b.logprob, b.old, b.mask, level=level)
        same(got, each(b, lambda i, t, b=b: ratio(b, i, t, level)))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0), (0.8, 1.1), (0.9, math.inf)])
def test_sampler_correction(level: str, kind: str, low: float, high: float) -> None:
    for seed in SEEDS:
        b = batch(seed)
        b.sampler[0, 0] = math.nan  # a kept token that the sampler could not score

        def difference(i: int, t: int, b: Batch = b) -> float:
            s = b.sampler[i, t].item()
            return 0.0 if math.isnan(s) else b.old[i, t].item() - s

        def weight(i: int, t: int, b: Batch = b) -> float:
            ts = b.kept()[i]
            d = sum(difference(i, u) for u in ts) / (len(ts) if level == "geometric" else 1)
            w = math.exp(difference(i, t) if level == "token" else d)
            return min(max(w, low), high) if kind == "truncate" else (w if low <= w <= high else 0.0)

        got = losses.sampler_correction(b.old, b.sampler, b.mask, level=level, kind=kind, low=low, high=high)
        same(got, each(b, weight))


def test_the_clip_takes_the_gradient_on_its_own_side_alone() -> None:
    r = torch.tensor([[0.5, 0.9, 1.1, 1.5, 5.0]] * 2, requires_grad=True)
    advantage = torch.tensor([1.0, -1.0])
    losses.clipped_surrogate(r, advantage, ratio_max=3.0).sum().backward()
    assert r.grad.tolist() == [[-1, -1, -1, 0, 0], [0, 1, 1, 1, 0]]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimate(kind: str) -> None:
    for seed in SEEDS:
        b = batch(seed)
        true = reduced(k_estimate(b.logprob, b.ref, kind), b.mask, "none")[0]
        same(losses.kl_estimate(b.logprob, b.ref, b.mask, kind=kind), true)


def test_k3_of_close_models_is_not_noise() -> None:
    x = torch.full((1, 64), -3.0)
    ref = x + 1e-3
    d = (ref.double() - x.double()).tolist()[0]
    got = losses.kl_estimate(x, ref)[0].double().tolist()
    naive = (torch.exp(ref - x) - (ref - x) - 1)[0].double().tolist()
    error = max(abs(g - (math.expm1(v) - v)) / (v * v / 2) for g, v in zip(got, d, strict=True))
    assert error < 1e-3 < max(abs(g - (math.expm1(v) - v)) / (v * v / 2) for g, v in zip(naive, d, strict=True))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages(scale: str) -> None:
    g = torch.Generator().manual_seed(0)
    reward = torch.randn(12, generator=g, dtype=torch.float64).requires_grad_()
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


# A loss, its arguments, the reference's where they differ (the paper's defaults), and the paper's reduction.
OBJECTIVES = [
    ("ppo_loss", {}, {}, "token"),
    ("ppo_loss", {"clip_low": 0.1, "clip_high": 0.3, "ratio_max": 1.5}, {}, "token"),
    ("grpo_loss", {}, {}, "sequence"),
    ("grpo_loss", {"ratio_max": 1.4}, {}, "sequence"),
    ("dr_grpo_loss", {"max_length": 9}, {}, "sequence_sum"),
    ("bnpo_loss", {}, {}, "token"),
    ("dapo_loss", {}, {"clip_high": 0.28}, "token"),
    ("dapo_loss", {"clip_high": 0.1}, {}, "token"),
    ("gspo_loss", {}, {"clip_low": 3e-4, "clip_high": 4e-4}, "sequence"),
    ("gspo_loss", {"token_level": True}, {"clip_low": 3e-4, "clip_high": 4e-4}, "sequence"),
    ("cispo_loss", {}, {}, "token"),
    ("cispo_loss", {"ratio_min": 0.9, "ratio_max": 1.2}, {}, "token"),
    ("sapo_loss", {}, {}, "sequence"),
    ("reinforce_loss", {}, {}, "sequence_sum"),
]
NAMES = [f"{name}-{'-'.join(arguments)}" for name, arguments, *_ in OBJECTIVES]


def call(name: str, b: Batch, advantage: Tensor, logprob: Tensor | None = None, **kwargs: object) -> Tensor:
    logprob = b.logprob if logprob is None else logprob
    if name == "reinforce_loss":
        return losses.reinforce_loss(logprob, advantage, b.mask, **kwargs)  # type: ignore[arg-type]
    return getattr(losses, name)(logprob, b.old, advantage, b.mask, **kwargs)


def expected(name: str, b: Batch, advantage: Tensor, **kwargs: object) -> Tensor:
    """Return the same by the reference of the randomly generated tests."""
    other = None if name == "reinforce_loss" else b.old
    return token_loss(name, b.logprob, b.mask, other=other, advantage=advantage, **kwargs)[0]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("name", "arguments", "defaults", "reduction"), OBJECTIVES, ids=NAMES)
def test_objectives(name: str, arguments: dict, defaults: dict, reduction: str, per_token: bool) -> None:
    if name == "gspo_loss" and not arguments:
        per_token = False  # one advantage per sequence is the definition; test_errors holds the other refused
    for seed in SEEDS:
        b = batch(seed, spread=0.5)
        advantage = b.token_advantage if per_token else b.advantage
        true = {**arguments, **defaults}
        same_loss(name, b, advantage, arguments, {**true, "reduction": reduction})
        for other in ("sum", "none"):
            same_loss(name, b, advantage, {**arguments, "reduction": other}, {**true, "reduction": other})
        for count in (23, torch.tensor(23)):
            of_reference = {**true, "reduction": reduction, "num_items": 23}
            same_loss(name, b, advantage, {**arguments, "num_items": count}, of_reference)


@pytest.mark.parametrize(("name", "arguments", "defaults", "reduction"), OBJECTIVES, ids=NAMES)
def test_terms(name: str, arguments: dict, defaults: dict, reduction: str) -> None:
    b = batch(7, spread=0.5)
    both = {"correction": losses.sampler_correction(b.old, b.sampler, b.mask), "entropy": b.entropy}
    both |= {"beta": 0.07, "entropy_coef": 0.03, **arguments}
    reference = {**both, **defaults, "ref": b.ref, "reduction": reduction}
    same_loss(name, b, b.advantage, {**both, "ref_logprob": b.ref}, reference)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_ppo_takes_the_ratio_of_a_level(level: str) -> None:
    b = batch(3)
    ratio = losses.importance_ratio(b.logprob, b.old, b.mask, level=level)
    surrogate = losses.clipped_surrogate(ratio, b.advantage)
    got = losses.ppo_loss(b.logprob, b.old, b.advantage, b.mask, level=level)
    same(got, reduced(surrogate, b.mask, "token")[0])


def test_grpo_takes_the_papers_beta_where_there_is_a_reference() -> None:
    b = batch(0)
    plain = losses.grpo_loss(b.logprob, b.old, b.advantage, b.mask)
    kl = reduced(k_estimate(b.logprob, b.ref, "k3"), b.mask, "sequence")[0]
    same(losses.grpo_loss(b.logprob, b.old, b.advantage, b.mask, ref_logprob=b.ref), plain + 0.04 * kl)
    same(losses.grpo_loss(b.logprob, b.old, b.advantage, b.mask, ref_logprob=b.ref, beta=0), plain)


def test_a_first_step_may_be_given_its_own_logprobs() -> None:
    b = batch(6)
    grads = []
    for old in (lambda x: x, lambda x: x.detach()):
        x = b.logprob.clone().requires_grad_()
        losses.grpo_loss(x, old(x), b.advantage, b.mask, reduction="sum").backward()
        grads.append(x.grad)
    same(grads[0], grads[1])
    same(grads[0], each(b, lambda i, t: -b.advantage[i].item()))


def test_nothing_but_the_policy_is_differentiated() -> None:
    b = batch(9)
    rest = [x.clone().requires_grad_() for x in (b.old, b.advantage, b.ref, b.sampler)]
    old, advantage, ref, correction = rest
    x = b.logprob.clone().requires_grad_()
    losses.grpo_loss(x, old, advantage, b.mask, ref_logprob=ref, correction=correction).backward()
    assert x.grad is not None
    assert all(leaf.grad is None for leaf in rest)


@pytest.mark.parametrize(("name", "arguments"), [case[:2] for case in OBJECTIVES], ids=NAMES)
@pytest.mark.parametrize("gap", [-5000.0, -100.0, 81.0, 100.0, 5000.0])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_finite_at_extremes(name: str, arguments: dict, gap: float, advantage: float) -> None:
    x = torch.full((2, 3), -6000.0, requires_grad=True)
    b = batch(0, 2, 3, dtype=torch.float32)
    b.mask = torch.ones(2, 3, dtype=torch.bool)
    b.old = x.detach() - gap
    loss = call(name, b, torch.full((2,), advantage), logprob=x, ref_logprob=x.detach() + gap, beta=0.01, **arguments)
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()


ONE = torch.zeros(2, 3)
A = torch.ones(2)


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda: losses.ppo_loss(ONE, ONE[:1], A), r"old_logprob: expected shape \[2, 3\], as logprob has, got"),
        (lambda: losses.ppo_loss(ONE, ONE, torch.ones(3)), r"advantage: expected shape \[2\], one per sequence, or"),
        (lambda: losses.ppo_loss(ONE, ONE, A, level="tokens"), "level: expected 'token', 'sequence'"),
        (lambda: losses.ppo_loss(ONE, ONE, A, clip_low=1.5), "clip_low: expected a number from 0 to 1"),
        (lambda: losses.ppo_loss(ONE, ONE, A, ratio_max=1.1), "ratio_max: expected a number above 1 \\+ clip_high"),
        (lambda: losses.ppo_loss(ONE, ONE, A, beta=0.1), "ref_logprob: expected a tensor, as beta is 0.1, got None"),
        (lambda: losses.ppo_loss(ONE, ONE, A, ref_logprob=ONE), "beta: expected a number, as ref_logprob is given"),
        (lambda: losses.ppo_loss(ONE, ONE, A, entropy=ONE), "entropy_coef: expected a number, as entropy is given"),
        (lambda: losses.ppo_loss(ONE, ONE, A, entropy_coef=1), "entropy: expected a tensor"),
        (lambda: losses.ppo_loss(ONE, ONE, A, ref_logprob=ONE, beta=1, kl="k4"), "kl: expected 'k1', 'k2'"),
        (lambda: losses.dr_grpo_loss(ONE, ONE, A, max_length=0), "max_length"),
        (lambda: losses.gspo_loss(ONE, ONE, ONE), "advantage: expected one per sequence"),
        (lambda: losses.cispo_loss(ONE, ONE, A, ratio_min=6), "ratio_max: expected a number above ratio_min"),
        (lambda: losses.sapo_loss(ONE, ONE, A, tau_positive=0), "tau_positive"),
        (
            lambda: losses.sampler_correction(ONE, ONE, level="geometric_token"),
            "level: expected 'token', 'sequence' or",
        ),
        (lambda: losses.sampler_correction(ONE, ONE, kind="clip"), "kind: expected 'truncate' or 'mask'"),
        (lambda: losses.sampler_correction(ONE, ONE, low=2, high=2), "high: expected a number above low"),
        (lambda: losses.group_advantages(torch.ones(5), 2), "group_size: expected 2 or more, and a divisor of the 5"),
        (lambda: losses.group_advantages(ONE, 2), r"reward: expected shape \[B\]"),
        (lambda: losses.group_advantages(A, 2, scale="std"), "scale: expected 'group', 'batch' or 'none'"),
    ],
)
def test_errors(f: Callable[[], Tensor], text: str) -> None:
    with pytest.raises(LowtideError, match=text):
        f()
