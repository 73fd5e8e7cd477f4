"""Every loss of tokens: values and gradients against the references in float64, and what all of them promise."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from losses.loops import Batch, NoHostSync, batch
from losses.references import token_loss
from lowtide import losses
from promises import promise

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Row(NamedTuple):
    """A loss: its tensors by their names in `Batch`, arguments, other defaults than the reference's, reduction."""

    loss: str
    fields: tuple[str, ...]
    arguments: Mapping[str, Any] = NOTHING
    defaults: Mapping[str, Any] = NOTHING
    reduction: str = "token"


CLIPPED = ("logprob", "old", "advantage")
PER_TOKEN = ("logprob", "old", "token_advantage")
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
ROWS = {
    "reduce": Row("reduce_tokens", ("logprob",)),
    "sft": Row("sft_loss", ("logprob",)),
    "dft": Row("dft_loss", ("logprob",)),
    "focal": Row("focal_loss", ("logprob",)),
    "focal half": Row("focal_loss", ("logprob",), {"gamma": 0.5}),
    "smoothed": Row("label_smoothed_loss", ("logprob", "mean_logit", "lse")),
    "z": Row("z_loss", ("lse",)),
    "gkd": Row("gkd_loss", ("divergence",), {"temperature": 3}),
    "sampled": Row("sampled_distillation_loss", ("logprob", "ref")),
    "sampled k3": Row("sampled_distillation_loss", ("logprob", "ref"), {"kind": "k3"}),
    "policy": Row("policy_loss", ("divergence", "logprob")),
    "ppo": Row("ppo_loss", PER_TOKEN),
    "ppo clipped": Row("ppo_loss", CLIPPED, {"clip_low": 0.1, "clip_high": 0.3, "ratio_max": 1.5}),
    "grpo": Row("grpo_loss", CLIPPED, {"ratio_max": 1.4}, reduction="sequence"),
    "dr_grpo": Row("dr_grpo_loss", CLIPPED, {"max_length": 9}, reduction="sequence_sum"),
    "bnpo": Row("bnpo_loss", CLIPPED),
    "dapo": Row("dapo_loss", PER_TOKEN, {}, {"clip_high": 0.28}),
    "dapo clipped": Row("dapo_loss", CLIPPED, {"clip_high": 0.1}),
    "gspo": Row("gspo_loss", CLIPPED, {}, GSPO, "sequence"),
    "gspo of tokens": Row("gspo_loss", PER_TOKEN, {"token_level": True}, GSPO, "sequence"),
    "cispo": Row("cispo_loss", PER_TOKEN),
    "cispo clipped": Row("cispo_loss", CLIPPED, {"ratio_min": 0.9, "ratio_max": 1.2}),
    "sapo": Row("sapo_loss", PER_TOKEN, reduction="sequence"),
    "reinforce": Row("reinforce_loss", ("logprob", "advantage"), reduction="sequence_sum"),
}
OF_POLICIES = list(ROWS)[list(ROWS).index("policy") :]
REDUCTIONS = ["token", "sequence", "sequence_sum", "sum", "none"]
every_row = pytest.mark.parametrize("name", ROWS)


def terms_of(name: str, b: Batch) -> dict[str, Any]:
    """Return what a policy's loss may have beside its surrogate."""
    if name not in OF_POLICIES:
        return {}
    correction = losses.sampler_correction(b.old, b.sampler, b.mask, level="sequence", kind="mask")
    correction = correction.where(b.mask != 0, b.old)  # poisoned where the rest is
    return {"correction": correction, "ref_logprob": b.ref, "beta": 0.1, "entropy": b.entropy, "entropy_coef": 0.2}


def computed(name: str, b: Batch, **more: Any) -> Tensor:
    row = ROWS[name]
    return getattr(losses, row.loss)(*(getattr(b, field) for field in row.fields), b.mask, **row.arguments, **more)


def expected(name: str, b: Batch, **more: Any) -> Tensor:
    """Return the same by the reference of the randomly generated tests, which has words of its own."""
    row, words = ROWS[name], {"old": "other", "ref": "other", "divergence": "other", "token_advantage": "advantage"}
    first, rest = row.fields[0], row.fields[1:]
    if name == "policy":
        first, rest = "logprob", ("divergence",)
    tensors = {words.get(field, field): getattr(b, field) for field in rest}
    more = {"ref" if key == "ref_logprob" else key: value for key, value in more.items()}
    arguments = {"reduction": row.reduction, **row.defaults, **row.arguments, **more}
    return token_loss(row.loss, getattr(b, first), b.mask, **tensors, **arguments)[0]


def leaves_of(b: Batch) -> list[Tensor]:
    """Turn every tensor of a batch into a leaf that requires a gradient, and return them."""
    for field in (*Batch.TOKENS, "advantage"):
        setattr(b, field, getattr(b, field).detach().clone().requires_grad_())
    return [getattr(b, field) for field in (*Batch.TOKENS, "advantage")]


def assert_same(name: str, b: Batch, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    leaves = leaves_of(b)
    got, true = computed(name, b, **ours), expected(name, b, **theirs)
    torch.testing.assert_close(got, true, rtol=1e-11, atol=1e-13)
    grads = (torch.autograd.grad(loss.sum(), leaves, allow_unused=True) for loss in (got, true))
    for g, e in zip(*grads, strict=True):
        assert (g is None) == (e is None)
        if g is not None:
            torch.testing.assert_close(g, e, rtol=1e-11, atol=1e-13)


@promise("values", "options")
@every_row
def test_values_and_gradients(name: str) -> None:
    for seed in range(2):
        b = batch(seed, spread=0.5)
        assert_same(name, b, {}, {})
        for reduction in REDUCTIONS:
            assert_same(name, b, {"reduction": reduction}, {"reduction": reduction})
        for count in (23, torch.tensor(23)):
            assert_same(name, b, {"num_items": count}, {"num_items": 23})


@promise("options")
@pytest.mark.parametrize("name", OF_POLICIES)
def test_terms(name: str) -> None:
    for kl in ("k1", "k2", "k3"):
        b = batch(7, spread=0.5)
        leaves_of(b)
        terms = terms_of(name, b) | {"correction": losses.sampler_correction(b.old, b.sampler, b.mask), "kl": kl}
        assert_same(name, b, terms, terms)


@promise("ignored")
@every_row
def test_nothing_leaves_a_masked_position(name: str) -> None:
    for reduction in REDUCTIONS:
        results = []
        for change in (lambda x: x, lambda x: x.nan_to_num(7.0, 7.0, 7.0)):  # poisoned, and with 7 in its place
            b = batch(0)
            b.advantage[1] = torch.nan  # of the wholly masked sequence
            for field in (*Batch.TOKENS, "advantage"):
                setattr(b, field, change(getattr(b, field)))
            leaves = leaves_of(b)
            loss = computed(name, b, reduction=reduction, **terms_of(name, b))
            with torch.autograd.set_detect_anomaly(True):  # not even on its way is a gradient NaN
                loss.sum().backward()
            results.append([loss, *(x.grad for x in leaves)])
            assert any(x.grad is not None for x in leaves)
            for x in leaves:
                assert x.grad is None or torch.equal(x.grad.where(~b.mask, 0), torch.zeros_like(x))
        for poisoned, clean in zip(*results, strict=True):
            assert poisoned is clean is None or torch.equal(poisoned, clean)
        assert results[0][0].isfinite().all()


@promise("ignored", "layouts")
@every_row
def test_nothing_kept_is_zero_and_connected(name: str) -> None:
    for i, shape in enumerate([(3, 4), (1, 1), (0, 4), (3, 0), (2, 5)]):
        b = batch(1, *shape)
        b.mask = torch.zeros_like(b.mask)
        leaves = leaves_of(b)
        loss = computed(name, b, reduction=REDUCTIONS[i], **terms_of(name, b))
        assert torch.equal(loss, torch.zeros_like(loss))
        loss.sum().backward()
        assert any(x.grad is not None for x in leaves)
        assert all(x.grad is None or torch.equal(x.grad, torch.zeros_like(x)) for x in leaves)


@promise("dtypes")
@every_row
def test_dtypes(name: str) -> None:
    """float32 is near float64; of bfloat16 each tensor is cast once, and its gradient; integers serve as a mask."""
    b = batch(2)
    true = computed(name, b, **terms_of(name, b))
    low = batch(2, dtype=torch.float32)
    low.mask = low.mask.long()
    got = computed(name, low, **terms_of(name, low))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-6)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        b = batch(5, dtype=torch.bfloat16)
        for field in (*Batch.TOKENS, "advantage"):
            setattr(b, field, getattr(b, field).nan_to_num(0, 0, 0).to(dtype))
        leaves = leaves_of(b)
        loss = computed(name, b, **terms_of(name, b))
        loss.backward()
        results.append([loss, *(None if x.grad is None else x.grad.to(torch.bfloat16) for x in leaves)])
    for narrow, wide in zip(*results, strict=True):
        assert narrow is wide is None or torch.equal(narrow, wide)


@promise("layouts")
@every_row
def test_leading_axes(name: str) -> None:
    b = batch(3, 6, 4)
    whole = computed(name, b, reduction="none", **terms_of(name, b))
    for field in (*Batch.TOKENS, "mask"):
        setattr(b, field, getattr(b, field).view(2, 3, 4))
    b.advantage = b.advantage.view(2, 3)
    assert torch.equal(computed(name, b, reduction="none", **terms_of(name, b)), whole.view(2, 3, 4))


@promise("host")
@every_row
def test_no_host_synchronisation(name: str) -> None:
    b = batch(4)
    leaves_of(b)
    with NoHostSync():
        computed(name, b, num_items=torch.tensor(5), **terms_of(name, b)).backward()


@promise("compile")
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "focal"])
def test_compiles_as_one_graph(name: str) -> None:
    b = batch(5)
    got = torch.compile(lambda b: computed(name, b, **terms_of(name, b)), fullgraph=True, backend="eager")(b)
    torch.testing.assert_close(got, computed(name, b, **terms_of(name, b)))


@promise("values")
@pytest.mark.parametrize("name", [name for name in OF_POLICIES if name != "policy"])
def test_finite_at_extremes(name: str) -> None:
    for gap in (-5000.0, -100.0, 81.0, 100.0, 5000.0):
        for advantage in (-2.0, 0.0, 2.0):
            b = batch(0, 2, 3, dtype=torch.float32)
            b.mask = torch.ones(2, 3, dtype=torch.bool)
            b.logprob = x = torch.full((2, 3), -6000.0, requires_grad=True)
            b.old, b.ref = x.detach() - gap, x.detach() + gap
            b.advantage, b.token_advantage = torch.full((2,), advantage), torch.full((2, 3), advantage)
            loss = computed(name, b, ref_logprob=b.ref, beta=0.01)
            loss.backward()
            assert loss.isfinite()
            assert x.grad.isfinite().all()


@promise("values")
def test_every_public_loss_of_tokens_is_in_the_table() -> None:
    others = {"dpo_loss", "simpo_loss", "cpo_loss", "orpo_loss", "kto_loss", "multi_token_loss", "soft_target_loss"}
    assert {name for name in losses.__all__ if name.endswith("_loss")} - others <= {row.loss for row in ROWS.values()}
