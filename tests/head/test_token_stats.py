"""What is linear_token_stats' own: its fields, logits that are infinite, digits of sure rows, several targets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import HeadOptions, TokenStats, linear_logprobs, linear_token_stats
from lowtide.errors import LowtideError
from lowtide.head.token_stats import WANTS
from support import assert_same_gradients, head, in_float64, relative_error, stats_oracle


def as_dict(stats: TokenStats) -> dict[str, Tensor]:
    found = {name: value for name, value in stats._asdict().items() if value is not None}
    if "topk" in found:
        found["topk_values"], found["topk_ids"] = found.pop("topk")
    return found


@pytest.mark.parametrize("name", WANTS)
def test_each_field_alone_and_no_other(name: str) -> None:
    x, w, _, y = head((2, 3), 4, 7)
    stats = linear_token_stats(x, w, y, want=(name,), topk=2 if name == "topk" else None)
    assert [field for field, value in stats._asdict().items() if value is not None] == [name]
    expected = stats_oracle(x, w, y, topk=2)
    for key, value in as_dict(stats).items():
        torch.testing.assert_close(value, expected[key])


def test_the_default_is_what_the_signature_says_and_topk_is_wanted_where_given() -> None:
    x, w, _, y = head((2, 3), 4, 7)
    stats = linear_token_stats(x, w, y, topk=3)
    found = {field for field, value in stats._asdict().items() if value is not None}
    assert found == {"logprob", "entropy", "lse", "argmax", "topk"}
    assert stats.topk.ids.shape == stats.topk.values.shape == (2, 3, 3)


def test_classes_that_a_bias_of_minus_infinity_rules_out() -> None:
    x, w, b, y = head(9, 6, 31, dtype=torch.float64)
    with torch.no_grad():
        b[::4] = -torch.inf
    y[y % 4 == 0] += 1
    stats = as_dict(linear_token_stats(x, w, y, want=("logprob", "entropy", "lse", "sum_sq_prob"), linear_bias=b))
    allowed = [v for v in range(31) if v % 4]
    to_index = torch.tensor([allowed.index(v) for v in y.tolist()])
    cut = in_float64({"x": x, "w": w, "b": b})
    expected = stats_oracle(cut["x"], cut["w"][allowed], to_index, linear_bias=cut["b"][allowed])
    for name, value in stats.items():
        torch.testing.assert_close(value, expected[name])
    got, want = (torch.stack([found[n].sum() for n in ("logprob", "entropy")]).sum() for found in (stats, expected))
    assert_same_gradients(got, want, (x, w), (cut["x"], cut["w"]))


def test_an_infinite_logit_is_no_probability() -> None:
    x, w, b, y = head(9, 6, 31)
    with torch.no_grad():
        b[3] = torch.inf
    stats = as_dict(linear_token_stats(x, w, y, want=("logprob", "entropy", "sum_sq_prob"), linear_bias=b))
    assert F.log_softmax(F.linear(x, w, b), -1).isnan().all()
    assert all(value.isnan().all() for value in stats.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logsumexp_of_infinite_logits_is_pytorchs(dtype: torch.dtype) -> None:
    x, w = torch.randn(4, 8).to(dtype), torch.randn(11, 8).to(dtype)
    for fill, places in ((-torch.inf, slice(None)), (-torch.inf, slice(3, None)), (torch.inf, 2), (torch.nan, 4)):
        b = torch.zeros(11, dtype=dtype)
        b[places] = fill
        z = F.linear(x.double(), w.double(), b.double())
        lse = linear_token_stats(x, w, want=("lse",), linear_bias=b).lse
        torch.testing.assert_close(lse.double(), z.logsumexp(-1), equal_nan=True, rtol=1e-5, atol=1e-5)


def test_one_factor_for_all_tokens_is_not_rounded_with_each() -> None:
    """In bf16 a target's entry, close to its upstream, would be missed by as much in every row alike."""
    x, w, _, y = head(400, 32, 900)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stats = linear_token_stats(x, w, y, want=("logprob", "lse"), options=HeadOptions(workspace_mib=16))
    true = [t.detach().bfloat16().double().requires_grad_() for t in (x, w)]
    upstream = torch.full((400,), 0.0040283203125 * 1.003)  # most entries a bit below half way between two of bf16
    (got,) = torch.autograd.grad(stats.logprob, w, upstream)
    (want,) = torch.autograd.grad(stats_oracle(*true, y)["logprob"], true[1], upstream.double())
    share = ((got.double() * want).sum() / want.square().sum()).item()
    assert abs(share - 1) < 5e-4


def test_a_sure_model_keeps_its_digits() -> None:
    """Entropy and 1 - p of about 1e-6, where a sum over all probabilities holds 1e-7 of rounding."""
    _, w, _, y = head(8, 96, 30)
    w = F.normalize(w.detach()).requires_grad_()
    x = (22 * w.detach()[y]).requires_grad_()
    kwargs = {"input": x, "linear_weight": w, "target": torch.stack((y, (y + 1) % 30), -1)}
    stats = as_dict(linear_token_stats(**kwargs, want=("logprob", "entropy")))
    expected = stats_oracle(**(truth := in_float64(kwargs)))
    assert expected["entropy"].median() < 1e-4
    assert relative_error(stats["logprob"][:, 0], expected["logprob"][:, 0]) < 1e-4
    assert relative_error(stats["entropy"], expected["entropy"]) < 1e-4
    for name, cut in (("entropy", slice(None)), ("logprob", (slice(None), 0))):
        got = torch.autograd.grad(stats[name][cut].sum(), x, retain_graph=True)[0]
        want = torch.autograd.grad(expected[name][cut].sum(), truth["input"], retain_graph=True)[0]
        assert relative_error(got, want) < 1e-4


def test_targets_of_any_strides() -> None:
    x, w = torch.randn(2, 5, 7), torch.randn(11, 7)
    y = torch.randint(0, 11, (2, 5))
    twice = y[..., None].expand(2, 5, 2)
    torch.testing.assert_close(linear_logprobs(x, w, twice)[..., 1], linear_logprobs(x, w, y))


def test_a_trained_scale_in_float32_beside_bfloat16() -> None:
    x, w, _, y = head(60, 8, 40, dtype=torch.bfloat16, bias=False)
    scale = torch.tensor(0.5, requires_grad=True)
    truth = in_float64({"x": x, "w": w, "s": scale})
    got = torch.autograd.grad(linear_token_stats(x, w, y, logit_scale=scale).entropy.sum(), scale)[0]
    want = torch.autograd.grad(
        stats_oracle(truth["x"], truth["w"], logit_scale=truth["s"])["entropy"].sum(), truth["s"]
    )
    assert got.dtype == torch.float32
    assert relative_error(got, want[0]) < 1e-2


def test_gradients_in_forward_where_they_can_be_right() -> None:
    x, w, _, y = head((2, 3), 4, 7)
    options = HeadOptions(gradient="forward")
    assert linear_logprobs(x, w.detach(), y, options=options).requires_grad
    with pytest.raises(LowtideError, match="gradient: expected"):
        linear_token_stats(x, w.detach(), y, options=options)
