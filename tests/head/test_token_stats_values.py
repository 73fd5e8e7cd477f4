"""linear_logprobs and linear_token_stats: values and gradients against whole logits in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import HeadOptions, TokenStats, linear_logprobs, linear_token_stats
from lowtide.head import reference
from lowtide.head.terms import token_stats as terms
from support import head, in_float64, relative_error, stats_oracle

DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logit")
OPTIONS: dict[str, list[Any]] = {
    "linear_bias": [False, True],
    "targets": [None, 1, 3, 40],
    "ignored": ["none", "some", "a class", "all but one"],
    "softcap": [None, 3.0],
    "logit_scale": [1.0, 0.5, "tensor"],
    "leading": [(), (13,), (2, 7), (2, 1, 5), (1, 3)],
    "workspace_mib": [None, 1e-6, 0.004],
    "accumulate": ["auto", "float32", "input"],
    "differentiated": [("entropy",), ("lse",), ("mean_logit", "lse"), DIFFERENTIABLE, ("logprob",)],
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def case_of(seed: int) -> dict[str, Any]:
    choose = random.Random(seed)
    return {name: choose.choice(values) for name, values in OPTIONS.items()}


def arguments(case: dict[str, Any], dtype: torch.dtype, seed: int, D: int = 9, V: int = 23) -> dict[str, Any]:
    leading, K = case["leading"], case["targets"]
    x, w, b, _ = head(leading, D, V, dtype=dtype, seed=seed, bias=case["linear_bias"])
    g = torch.Generator().manual_seed(seed + 1)
    y = None
    if K is not None:
        y = torch.randint(0, V, leading if K == 1 else (*leading, K), generator=g)
        if case["ignored"] == "some":
            y[torch.rand(y.shape, generator=g) < 0.4] = -100
        elif case["ignored"] == "all but one":
            y.view(-1)[:-1] = -100
    return {
        "input": x,
        "linear_weight": w,
        "target": y,
        "linear_bias": b,
        "softcap": case["softcap"],
        "logit_scale": torch.tensor(0.8) if case["logit_scale"] == "tensor" else case["logit_scale"],
        "ignore_index": 5 if case["ignored"] == "a class" else -100,
    }


def as_dict(stats: TokenStats) -> dict[str, Tensor]:
    found = {name: value for name, value in stats._asdict().items() if value is not None}
    if "topk" in found:
        found["topk_values"], found["topk_ids"] = found.pop("topk")
    return found


def check(case: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    kwargs = arguments(case, dtype, seed)
    options = HeadOptions(workspace_mib=case["workspace_mib"], accumulate=case["accumulate"])
    names = [n for n in TokenStats._fields if kwargs["target"] is not None or n not in ("logprob", "is_top1")]
    stats = as_dict(linear_token_stats(**kwargs, want=names, topk=4, options=options))
    truth = in_float64(kwargs)
    expected = stats_oracle(**truth, topk=4)
    assert stats.keys() == expected.keys()
    for name, value in stats.items():
        assert value.shape == expected[name].shape, name
        if not value.is_floating_point():
            assert value.dtype == (torch.bool if name == "is_top1" else torch.int64)
            assert torch.equal(value, expected[name]), name
        else:
            assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert value.requires_grad == (name in DIFFERENTIABLE)
            assert relative_error(value, expected[name]) <= TOLERANCE[dtype], name
    used = [n for n in case["differentiated"] if n in stats]
    if not used:
        return
    upstream = [torch.randn_like(expected[n]) for n in used]
    leaves = [n for n in ("input", "linear_weight", "linear_bias") if kwargs[n] is not None]
    got = torch.autograd.grad(
        [stats[n] for n in used], [kwargs[n] for n in leaves], [u.to(stats["lse"].dtype) for u in upstream]
    )
    want = torch.autograd.grad([expected[n] for n in used], [truth[n] for n in leaves], upstream, allow_unused=True)
    for name, g, e in zip(leaves, got, want, strict=True):
        assert g.dtype == dtype
        assert relative_error(g, e) <= TOLERANCE[dtype], (name, used)


@pytest.fixture(params=["dropped", "computed as zeros"])
def rows_of_no_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways with rows that count for nothing, on the CPU: dropped as there, or computed as on other devices."""
    if request.param != "dropped":
        monkeypatch.setattr(terms, "drops_rows", lambda device: False)
    return request.param


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_over_random_options(dtype: torch.dtype, rows_of_no_use: str) -> None:
    for seed in range(150):
        check(case_of(seed), dtype, seed)


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logprobs_over_random_options(targets: int, dtype: torch.dtype) -> None:
    for seed in range(60):
        case = {**case_of(seed), "targets": targets}
        kwargs = arguments(case, dtype, seed)
        truth = in_float64(kwargs)
        options = HeadOptions(workspace_mib=case["workspace_mib"], accumulate=case["accumulate"])
        got, want = linear_logprobs(**kwargs, options=options), stats_oracle(**truth)["logprob"]
        assert got.shape == want.shape
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert relative_error(got, want) <= TOLERANCE[dtype]
        ignored = kwargs["target"] == kwargs["ignore_index"]
        assert (got[ignored] == 0).all()
        assert not got[ignored].signbit().any()
        upstream = torch.randn_like(want)
        leaves = [n for n in ("input", "linear_weight", "linear_bias") if kwargs[n] is not None]
        grads = torch.autograd.grad(got, [kwargs[n] for n in leaves], upstream.to(got.dtype))
        expected = torch.autograd.grad(want, [truth[n] for n in leaves], upstream)
        assert all(relative_error(g, e) <= TOLERANCE[dtype] for g, e in zip(grads, expected, strict=True)), case


@pytest.mark.parametrize("name", TokenStats._fields)
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
    assert stats.topk is not None
    assert stats.topk.ids.shape == stats.topk.values.shape == (2, 3, 3)


@pytest.mark.parametrize(
    ("N", "D", "V"), [(1, 1, 1), (1, 3, 2), (37, 1, 5003), (5, 896, 3), (129, 33, 517), (4, 0, 9), (0, 5, 11)]
)
@pytest.mark.parametrize("K", [1, 2])
def test_odd_shapes(N: int, D: int, V: int, K: int) -> None:
    for workspace in (None, 1e-6, 0.01):
        x, w, b, y = head(N, D, V, dtype=torch.float64, seed=N)
        y = y if K == 1 else torch.stack((y, y.flip(0)), -1)
        kwargs = {"input": x, "linear_weight": w, "target": y, "linear_bias": b}
        stats = as_dict(
            linear_token_stats(**kwargs, want=TokenStats._fields, topk=1, options=HeadOptions(workspace_mib=workspace))
        )
        expected = stats_oracle(**(truth := in_float64(kwargs)))
        for name, value in stats.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-12)
        got = torch.autograd.grad([stats[n].sum() for n in DIFFERENTIABLE], (x, w, b))
        want = torch.autograd.grad(
            [expected[n].sum() for n in DIFFERENTIABLE], [truth[n] for n in ("input", "linear_weight", "linear_bias")]
        )
        for g, e in zip(got, want, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("alone", [True, False])
def test_ignored_tokens_may_hold_anything(poison: float, K: int, alone: bool, rows_of_no_use: str) -> None:
    x, w, b, y = head(20, 6, 31)
    y[::3] = -100
    y = y if K == 1 else torch.stack((y, y), -1)
    scale = torch.tensor(0.7, requires_grad=True)
    dirty = x.detach().clone()
    dirty[::3] = poison
    dirty.requires_grad_()
    results = []
    for input in (x, dirty):
        want = ("logprob",) if alone else ("logprob", "entropy", "lse")
        stats = linear_token_stats(input, w, y, want=want, linear_bias=b, logit_scale=scale)
        assert stats.logprob is not None
        total = stats.logprob.sum()
        if stats.entropy is not None and stats.lse is not None:  # nothing flows back to what is not selected
            total = total + stats.entropy.where(y.view(20, -1)[:, 0] != -100, 0).sum() + stats.lse[1::3].sum()
        results.append((stats.logprob, *torch.autograd.grad(total, (input, w, b, scale))))
    for clean, got in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, got)
    assert (results[1][1][::3] == 0).all()


def test_an_ignored_target_beside_another_one_of_the_same_token() -> None:
    """Class 0, put in an ignored target's place, must not be taken for a target."""
    x, w, _, _ = head(2, 5, 7, dtype=torch.float64)
    y = torch.tensor([[-100, 3, 0], [0, 0, -100]])
    got = torch.autograd.grad(linear_logprobs(x, w, y).sum(), (x, w))
    want = torch.autograd.grad(stats_oracle(x, w, y)["logprob"].sum(), (x, w))
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e)


def test_upstream_of_an_ignored_target_is_not_looked_at() -> None:
    for K in (1, 2):
        x, w, _, y = head(6, 4, 9)
        y[2] = -100
        y = y if K == 1 else torch.stack((y, y), -1)
        upstream = torch.ones(y.shape)
        upstream[2] = torch.nan
        linear_logprobs(x, w, y).backward(upstream)
        assert (x.grad[2] == 0).all()
        assert x.grad.isfinite().all()
        assert w.grad.isfinite().all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_bad_hidden_states_spoil_their_own_rows_only(poison: float) -> None:
    x, w, b, y = head(9, 6, 31)
    with torch.no_grad():
        x[4] = poison
    stats = as_dict(linear_token_stats(x, w, y, want=("logprob", "entropy", "lse", "mean_logit"), linear_bias=b))
    clean = torch.arange(9) != 4
    expected = stats_oracle(x, w, y, linear_bias=b)
    for name in ("logprob", "entropy", "lse"):
        assert stats[name][4].isnan(), name
        torch.testing.assert_close(stats[name][clean], expected[name][clean])


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
    got = torch.autograd.grad([stats[n].sum() for n in ("logprob", "entropy")], (x, w))
    want = torch.autograd.grad([expected[n].sum() for n in ("logprob", "entropy")], (cut["x"], cut["w"]))
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e)


def test_an_infinite_logit_is_no_probability() -> None:
    x, w, b, y = head(9, 6, 31)
    with torch.no_grad():
        b[3] = torch.inf
    stats = as_dict(linear_token_stats(x, w, y, want=("logprob", "entropy", "sum_sq_prob"), linear_bias=b))
    assert F.log_softmax(F.linear(x, w, b), -1).isnan().all()
    assert all(value.isnan().all() for value in stats.values())


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("workspace_mib", [None, 0.05, 9])
def test_low_precision_errs_less_than_plain_pytorch(dtype: torch.dtype, workspace_mib: float | None) -> None:
    x, w, b, y = head(300, 40, 211, dtype=dtype)
    kwargs = {"input": x, "linear_weight": w, "target": y, "linear_bias": b}
    expected = stats_oracle(**(truth := in_float64(kwargs)))
    z = F.linear(x, w, b).float()
    lp = z.log_softmax(-1)
    naive = {
        "logprob": lp.gather(-1, y[:, None])[:, 0],
        "entropy": -(lp.exp() * lp).sum(-1),
        "lse": z.logsumexp(-1),
        "mean_logit": z.mean(-1),
    }
    stats = as_dict(linear_token_stats(**kwargs, want=DIFFERENTIABLE, options=HeadOptions(workspace_mib=workspace_mib)))
    for name in DIFFERENTIABLE:
        assert relative_error(stats[name], expected[name]) < 1e-6 < relative_error(naive[name], expected[name])
    for used in [*((n,) for n in DIFFERENTIABLE), DIFFERENTIABLE]:
        upstream = [torch.rand(300) / 300 for _ in used]
        leaves = ("input", "linear_weight", "linear_bias")
        got = torch.autograd.grad([stats[n] for n in used], (x, w, b), upstream, retain_graph=True)
        base = torch.autograd.grad([naive[n] for n in used], (x, w, b), upstream, retain_graph=True)
        want = torch.autograd.grad(
            [expected[n] for n in used], [truth[n] for n in leaves], [u.double() for u in upstream], retain_graph=True
        )
        for name, g, n, e in zip(leaves, got, base, want, strict=True):
            # all rows of the mean's gradient are the same 40 numbers: a few roundings, whose norm varies; 2**-8 is one
            least = 2**-8 if used == ("mean_logit",) and dtype == torch.bfloat16 else 0
            assert relative_error(g, e) <= max(least, 1.05 * relative_error(n, e)), (used, name)


def test_reference_is_the_specification() -> None:
    for seed in range(60):
        case = case_of(seed)
        kwargs = in_float64(arguments(case, torch.float64, seed))
        names = [n for n in TokenStats._fields if kwargs["target"] is not None or n not in ("logprob", "is_top1")]
        got = as_dict(reference.linear_token_stats(**kwargs, want=names, topk=4))
        expected = stats_oracle(**kwargs, topk=4)
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name])
        if kwargs["target"] is not None:
            torch.testing.assert_close(reference.linear_logprobs(**kwargs), expected["logprob"])


def test_the_same_bits_from_run_to_run() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, w, b, _ = head(200, 32, 500, dtype=dtype)
        y = torch.randint(0, 7, (200, 9))
        runs = []
        for _ in range(3):
            stats = linear_token_stats(x, w, y, linear_bias=b, options=HeadOptions(workspace_mib=0.1))
            assert stats.logprob is not None
            assert stats.entropy is not None
            runs.append((stats.logprob, *torch.autograd.grad(stats.logprob.sum() + stats.entropy.sum(), (x, w, b))))
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_targets_of_any_strides() -> None:
    x, w = torch.randn(2, 5, 7), torch.randn(11, 7)
    y = torch.randint(0, 11, (2, 5))
    twice = y[..., None].expand(2, 5, 2)
    torch.testing.assert_close(linear_logprobs(x, w, twice)[..., 1], linear_logprobs(x, w, y))
