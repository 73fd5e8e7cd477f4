"""What every loss of tokens promises: nothing leaves a masked position, nothing kept is 0, no host synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from losses.loops import Batch, batch
from lowtide import losses
from support import every_pair

TOKEN_LOSSES: dict[str, Callable[[Batch, dict[str, Any]], Tensor]] = {
    "reduce_tokens": lambda b, o: losses.reduce_tokens(b.logprob, b.mask, **o),
    "sft_loss": lambda b, o: losses.sft_loss(b.logprob, b.mask, **o),
    "dft_loss": lambda b, o: losses.dft_loss(b.logprob, b.mask, **o),
    "focal_loss": lambda b, o: losses.focal_loss(b.logprob, b.mask, **o),
    "label_smoothed_loss": lambda b, o: losses.label_smoothed_loss(b.logprob, b.mean_logit, b.lse, b.mask, **o),
    "soft_target_loss": lambda b, o: losses.soft_target_loss(
        torch.stack((b.logprob, b.old), -1), torch.stack((b.sum_sq_prob, b.entropy), -1), b.mask, **o
    ),
    "z_loss": lambda b, o: losses.z_loss(b.lse, b.mask, **o),
    "gkd_loss": lambda b, o: losses.gkd_loss(b.divergence, b.mask, **o),
    "sampled_distillation_loss": lambda b, o: losses.sampled_distillation_loss(b.logprob, b.ref, b.mask, **o),
    "policy_loss": lambda b, o: losses.policy_loss(b.divergence, b.logprob, b.mask, **terms(b), **o),
    "ppo_loss": lambda b, o: losses.ppo_loss(b.logprob, b.old, b.token_advantage, b.mask, **terms(b), **o),
    "grpo_loss": lambda b, o: losses.grpo_loss(b.logprob, b.old, b.advantage, b.mask, **terms(b), **o),
    "dr_grpo_loss": lambda b, o: losses.dr_grpo_loss(
        b.logprob, b.old, b.advantage, b.mask, max_length=9, **terms(b), **o
    ),
    "bnpo_loss": lambda b, o: losses.bnpo_loss(b.logprob, b.old, b.advantage, b.mask, **terms(b), **o),
    "dapo_loss": lambda b, o: losses.dapo_loss(b.logprob, b.old, b.token_advantage, b.mask, **terms(b), **o),
    "gspo_loss": lambda b, o: losses.gspo_loss(b.logprob, b.old, b.advantage, b.mask, **terms(b), **o),
    "gspo_token": lambda b, o: losses.gspo_loss(
        b.logprob, b.old, b.token_advantage, b.mask, token_level=True, **terms(b), **o
    ),
    "cispo_loss": lambda b, o: losses.cispo_loss(b.logprob, b.old, b.token_advantage, b.mask, **terms(b), **o),
    "sapo_loss": lambda b, o: losses.sapo_loss(b.logprob, b.old, b.token_advantage, b.mask, **terms(b), **o),
    "reinforce_loss": lambda b, o: losses.reinforce_loss(b.logprob, b.token_advantage, b.mask, **terms(b), **o),
}
REDUCTIONS = ["token", "sequence", "sequence_sum", "sum", "none"]


def terms(b: Batch) -> dict[str, Any]:
    correction = losses.sampler_correction(b.old, b.sampler, b.mask, level="sequence", kind="mask")
    correction = correction.where(b.mask != 0, b.old)  # poisoned where the rest is
    return {"correction": correction, "ref_logprob": b.ref, "beta": 0.1, "entropy": b.entropy, "entropy_coef": 0.2}


def with_leaves(b: Batch, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Turn every tensor of tokens into a leaf that requires a gradient, and return them."""
    leaves = []
    for name in Batch.TOKENS:
        leaves.append(change(getattr(b, name)).clone().requires_grad_())
        setattr(b, name, leaves[-1])
    return leaves


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_nothing_leaves_a_masked_position(name: str, reduction: str) -> None:
    results = []
    for change in (lambda x: x, lambda x: x.nan_to_num(7.0, 7.0, 7.0)):  # poisoned, and with 7 in its place
        b = batch(0)
        b.advantage[1] = torch.nan if change(torch.tensor(torch.nan)).isnan() else 7.0  # of the wholly masked sequence
        leaves = with_leaves(b, change)
        loss = TOKEN_LOSSES[name](b, {"reduction": reduction})
        with torch.autograd.set_detect_anomaly(True):  # not even on its way is a gradient NaN
            loss.sum().backward()
        results.append([loss, *(x.grad for x in leaves)])
        assert any(x.grad is not None for x in leaves)
        for x in leaves:
            assert x.grad is None or torch.equal(x.grad.where(~b.mask, 0), torch.zeros_like(x))
    for poisoned, clean in zip(*results, strict=True):
        assert poisoned is clean is None or torch.equal(poisoned, clean)
    assert results[0][0].isfinite().all()


@every_pair(name=TOKEN_LOSSES, reduction=REDUCTIONS, shape=[(3, 4), (1, 1), (0, 4), (3, 0)])
def test_nothing_kept_is_zero_and_connected(name: str, reduction: str, shape: tuple[int, int]) -> None:
    b = batch(1, *shape)
    b.mask = torch.zeros_like(b.mask)
    leaves = with_leaves(b, lambda x: x)
    loss = TOKEN_LOSSES[name](b, {"reduction": reduction})
    assert torch.equal(loss, torch.zeros_like(loss))
    loss.sum().backward()
    assert any(x.grad is not None for x in leaves)
    for x in leaves:
        assert x.grad is None or torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_precision(name: str) -> None:
    """float32 stays close to float64, bfloat16 inputs are computed in float32, integers serve as a mask."""
    true = TOKEN_LOSSES[name](batch(2), {})
    low = batch(2, dtype=torch.float32)
    low.mask = low.mask.long()
    got = TOKEN_LOSSES[name](low, {})
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-6)
    assert TOKEN_LOSSES[name](batch(2, dtype=torch.bfloat16), {}).dtype == torch.float32


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_narrow_leaves_are_cast_once(name: str) -> None:
    """What several terms send back is summed in float32, and rounded once."""
    grads = []
    for dtype in (torch.bfloat16, torch.float32):
        b = batch(5, dtype=torch.bfloat16)
        b.advantage = b.advantage.to(torch.float32)
        leaves = with_leaves(b, lambda x, dtype=dtype: x.nan_to_num(0, 0, 0).to(dtype))
        TOKEN_LOSSES[name](b, {}).backward()
        grads.append([x.grad for x in leaves])
    for narrow, wide in zip(*grads, strict=True):
        assert narrow is wide is None or torch.equal(narrow, wide.to(torch.bfloat16))


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_leading_axes(name: str) -> None:
    b = batch(3, 6, 4)
    whole = TOKEN_LOSSES[name](b, {"reduction": "none"})
    for field in (*Batch.TOKENS, "mask"):
        setattr(b, field, getattr(b, field).view(2, 3, 4))
    b.advantage = b.advantage.view(2, 3)
    assert torch.equal(TOKEN_LOSSES[name](b, {"reduction": "none"}), whole.view(2, 3, 4))


class NoHostSync(TorchDispatchMode):
    """Refuses what makes the host wait for the device."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, name
        if name == "index":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "indexing with a bool mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_no_host_synchronisation(name: str) -> None:
    b = batch(4)
    with_leaves(b, lambda x: x)
    with NoHostSync():
        TOKEN_LOSSES[name](b, {"num_items": torch.tensor(5)}).backward()


def test_no_host_synchronisation_of_sequences() -> None:
    x, y, u, v = (-torch.rand(6, requires_grad=True) for _ in range(4))
    n, count = torch.arange(1, 7), torch.tensor(9)
    with NoHostSync():
        for kind in losses.DPO_KINDS:
            o: dict[str, Any] = {"label_smoothing": 0.1} if kind in ("exo_pair", "robust", "sigmoid", "aot") else {}
            if kind in ("ipo", "sigmoid_norm"):
                o = {"chosen_length": n, "rejected_length": n}
            losses.dpo_loss(x, y, u, v, kind=kind, num_items=count, **o).backward(retain_graph=True)
        losses.simpo_loss(x, y, num_items=count)
        losses.cpo_loss(x, y, -x, num_items=count)
        losses.orpo_loss(x, y, num_items=count)
        losses.kto_loss(x, y, n > 3, losses.kto_reference(x, y), num_items=count)
        losses.group_advantages(x, 3)
        losses.leave_one_out_advantages(x, 3)
        losses.wpo_weights(x[None], x[None].exp(), n[None] > 2)


@pytest.mark.parametrize("name", ["grpo_loss", "gspo_loss", "cispo_loss", "focal_loss"])
def test_compiles_as_one_graph(name: str) -> None:
    b = batch(5)
    true = TOKEN_LOSSES[name](b, {})
    got = torch.compile(lambda b: TOKEN_LOSSES[name](b, {}), fullgraph=True, backend="eager")(b)
    torch.testing.assert_close(got, true)


def test_preference_losses_compile_as_one_graph() -> None:
    x, y, u, v = -torch.rand(4, 6)
    compiled = torch.compile(losses.dpo_loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, y, u, v), losses.dpo_loss(x, y, u, v))


def test_every_public_loss_of_tokens_is_in_the_table() -> None:
    of_heads = {"multi_token_loss"}
    of_sequences = {"dpo_loss", "simpo_loss", "cpo_loss", "orpo_loss", "kto_loss"}
    assert {name for name in losses.__all__ if name.endswith("_loss")} - of_sequences - of_heads <= set(TOKEN_LOSSES)
