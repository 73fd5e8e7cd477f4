"""linear_divergence: values and gradients against whole logits in float64, for a teacher's head and for its top k."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import HeadOptions, TeacherTopK, linear_divergence
from lowtide.head import reference
from lowtide.head.terms import divergence as divergence_terms
from support import divergence_of, divergence_oracle, head, in_float64, relative_error

KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.0), ("jsd", 1.0), ("tv", 0.5)]
REVERSE = [("reverse_kl", 0.5), ("jsd", 1.0)]
TAILS = ("bucket", "renormalise", "drop")
OPTIONS: dict[str, list[Any]] = {
    "kind": KINDS,
    "linear_bias": [False, True],
    "teacher_bias": [False, True],
    "teacher_D": [1, 9, 14],
    "mask": [None, "some", "one"],
    "temperature": [1.0, 0.5, 3, "tensor"],
    "leading": [(), (13,), (2, 7), (2, 1, 5)],
    "workspace_mib": [None, 1e-6, 0.004],
    "accumulate": ["auto", "float32", "input"],
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}
STUDENT = ("input", "linear_weight", "linear_bias")


@pytest.fixture(params=["dropped", "computed as zeros"])
def rows_of_no_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways with rows that count for nothing, on the CPU: dropped as there, or computed as on other devices."""
    if request.param != "dropped":
        monkeypatch.setattr(divergence_terms, "drops_rows", lambda device: False)
    return request.param


def case_of(seed: int, **fixed: Any) -> dict[str, Any]:
    choose = random.Random(seed)
    return {name: fixed.get(name, choose.choice(values)) for name, values in OPTIONS.items()}


def arguments(case: dict[str, Any], dtype: torch.dtype, seed: int, D: int = 9, V: int = 23) -> dict[str, Any]:
    x, w, b, _ = head(case["leading"], D, V, dtype=dtype, seed=seed, bias=case["linear_bias"])
    tx, tw, tb, _ = head(case["leading"], case["teacher_D"], V, dtype=dtype, seed=seed + 1, bias=case["teacher_bias"])
    mask = None
    if case["mask"] is not None:
        mask = torch.rand(case["leading"], generator=torch.Generator().manual_seed(seed)) < 0.6
        if case["mask"] == "one":
            mask = torch.zeros(case["leading"], dtype=torch.bool)
            mask.view(-1)[-1] = True
    return {
        "input": x,
        "linear_weight": w,
        "teacher_input": tx,
        "teacher_weight": tw,
        "kind": case["kind"][0],
        "beta": case["kind"][1],
        "temperature": torch.tensor(1.7) if case["temperature"] == "tensor" else case["temperature"],
        "linear_bias": b,
        "teacher_bias": tb,
        "mask": mask,
    }


def options_of(case: dict[str, Any]) -> HeadOptions:
    return HeadOptions(workspace_mib=case["workspace_mib"], accumulate=case["accumulate"])


def check_gradients(
    value: Tensor, expected: Tensor, leaves: list[Tensor], true: list[Tensor], tolerance: float
) -> None:
    upstream = torch.randn_like(expected)
    got = torch.autograd.grad(value, leaves, upstream.to(value.dtype))
    want = torch.autograd.grad(expected, true, upstream)
    for g, e, leaf in zip(got, want, leaves, strict=True):
        assert g.dtype == leaf.dtype
        assert relative_error(g, e) <= tolerance


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_over_random_options(dtype: torch.dtype, rows_of_no_use: str) -> None:
    for seed in range(200):
        case = case_of(seed)
        kwargs = arguments(case, dtype, seed)
        truth = in_float64(kwargs)
        value, expected = linear_divergence(**kwargs, options=options_of(case)), divergence_oracle(**truth)
        assert value.shape == expected.shape
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert relative_error(value, expected) <= TOLERANCE[dtype], case
        if kwargs["mask"] is not None:
            assert (value[~kwargs["mask"]] == 0).all()
        names = [n for n in STUDENT if kwargs[n] is not None]
        upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        want = torch.autograd.grad(expected, [truth[n] for n in names], upstream)
        leaves = [kwargs[n] for n in names]
        got = torch.autograd.grad(value, leaves, upstream.to(value.dtype))
        rounding = 50 * torch.finfo(dtype).eps * upstream.norm()  # all there is in a row that is saturated
        for g, e in zip(got, want, strict=True):
            assert g.dtype == dtype
            assert (g.double() - e).norm() <= TOLERANCE[dtype] * e.norm() + rounding, case
        assert all(kwargs[n] is None or kwargs[n].grad is None for n in ("teacher_input", "teacher_weight"))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_the_limits_of_the_jsd_are_the_two_kls(kind: str) -> None:
    """At beta 0 and 1 the KLs themselves; on the way there, the jsd over beta (1 - beta)."""
    kwargs = arguments(case_of(0, leading=(6,), mask=None), torch.float64, 0)
    end, near = (0.0, 1e-6) if kind == "forward_kl" else (1.0, 1 - 1e-6)
    kl = linear_divergence(**{**kwargs, "kind": kind})
    assert torch.equal(linear_divergence(**{**kwargs, "kind": "jsd", "beta": end}), kl)
    jsd = linear_divergence(**{**kwargs, "kind": "jsd", "beta": near})
    torch.testing.assert_close(jsd / (near * (1 - near)), kl, rtol=1e-4, atol=0)


def test_the_generalised_jsd_is_that_of_gkd() -> None:
    """TRL's GKDTrainer.generalized_jsd_loss, written out: its mixture takes the teacher with weight beta."""
    kwargs = arguments(case_of(1, leading=(6,), mask=None, temperature=2.0), torch.float64, 1)
    log_s = (F.linear(kwargs["input"], kwargs["linear_weight"], kwargs["linear_bias"]) / 2).log_softmax(-1)
    log_t = (F.linear(kwargs["teacher_input"], kwargs["teacher_weight"], kwargs["teacher_bias"]) / 2).log_softmax(-1)
    for beta in (0.0, 0.3, 1.0):
        if beta == 0:
            each = F.kl_div(log_s, log_t, reduction="none", log_target=True)
        elif beta == 1:
            each = F.kl_div(log_t, log_s, reduction="none", log_target=True)
        else:
            b = torch.tensor(beta, dtype=torch.float64)
            mixture = torch.logsumexp(torch.stack([log_s + torch.log1p(-b), log_t + b.log()]), 0)
            each = b * F.kl_div(mixture, log_t, reduction="none", log_target=True)
            each = each + (1 - b) * F.kl_div(mixture, log_s, reduction="none", log_target=True)
        got = linear_divergence(**{**kwargs, "kind": "jsd", "beta": beta})
        torch.testing.assert_close(got, each.sum(-1))


@pytest.mark.parametrize(
    ("N", "D", "V"), [(1, 1, 1), (1, 3, 2), (37, 1, 5003), (5, 896, 3), (129, 33, 517), (4, 0, 9), (0, 5, 11)]
)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_odd_shapes(N: int, D: int, V: int, kind: str, beta: float) -> None:
    for workspace in (None, 0.01):
        x, w, b, _ = head(N, D, V, dtype=torch.float64, seed=N)
        tx, tw, _, _ = head(N, D + 2, V, dtype=torch.float64, seed=N + 1)
        value = linear_divergence(
            x, w, tx, tw, kind=kind, beta=beta, linear_bias=b, options=HeadOptions(workspace_mib=workspace)
        )
        expected = divergence_oracle(x, w, tx, tw, kind=kind, beta=beta, linear_bias=b)
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-13)
        upstream = torch.rand(N, dtype=torch.float64)
        got = torch.autograd.grad(value, (x, w, b), upstream)
        want = torch.autograd.grad(expected, (x, w, b), upstream)
        for g, e in zip(got, want, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("topk", [False, True])
def test_masked_tokens_may_hold_anything(
    poison: float, kind: str, beta: float, topk: bool, rows_of_no_use: str
) -> None:
    x, w, b, _ = head(20, 6, 31)
    tx, tw, _, _ = head(20, 4, 31 if (kind, beta) in REVERSE else 29, seed=1)
    logprobs, ids = F.log_softmax(tx @ tw.T, -1).topk(5)
    mask = torch.arange(20) % 3 != 0
    results = []
    for bad in (0.0, poison):
        x_, tx_, logprobs_ = (t.detach().clone() for t in (x, tx, logprobs))
        for t in (x_, tx_, logprobs_):
            t[~mask] = t[~mask] * 0 + bad
        x_.requires_grad_()
        teacher = (None, None) if topk else (tx_, tw)
        value = linear_divergence(
            x_,
            w,
            *teacher,
            kind=kind,
            beta=beta,
            linear_bias=b,
            mask=mask,
            teacher_topk=(ids, logprobs_) if topk else None,
        )
        results.append((value, *torch.autograd.grad(value.sum(), (x_, w, b))))
    for clean, got in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, got)
    assert (results[1][0][~mask] == 0).all()
    assert (results[1][1][~mask] == 0).all()


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_token_to_which_nothing_flows_back_contributes_nothing(kind: str, beta: float, rows_of_no_use: str) -> None:
    x, w, _, _ = head(6, 5, 9)
    tx, tw, _, _ = head(6, 4, 9, seed=1)
    with torch.no_grad():
        x[2], tx[4] = torch.nan, torch.inf
    value = linear_divergence(x, w, tx, tw, kind=kind, beta=beta)
    good = [0, 1, 3, 5]
    assert value[[2, 4]].isnan().all()
    got = torch.autograd.grad(value[good].sum(), (x, w))
    expected = divergence_oracle(x[good], w, tx[good], tw, kind=kind, beta=beta)
    for g, e in zip(got, torch.autograd.grad(expected.sum(), (x, w)), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("larger", ["student", "teacher"])
def test_classes_that_one_side_lacks_have_probability_zero(kind: str, beta: float, larger: str) -> None:
    V, V_teacher = (17, 13) if larger == "student" else (13, 17)
    x, w, b, _ = head(7, 5, V, dtype=torch.float64)
    tx, tw, _, _ = head(7, 6, V_teacher, dtype=torch.float64, seed=1)
    value = linear_divergence(
        x, w, tx, tw, kind=kind, beta=beta, linear_bias=b, options=HeadOptions(workspace_mib=0.001)
    )
    log_s = F.pad((x @ w.T + b).log_softmax(-1), (0, 17 - V), value=-torch.inf)
    log_t = F.pad((tx @ tw.T).log_softmax(-1), (0, 17 - V_teacher), value=-torch.inf)
    forward, reverse = ((kind, beta) in named for named in ([("forward_kl", 0.5), ("jsd", 0.0)], REVERSE))
    if (forward and larger == "teacher") or (reverse and larger == "student"):
        assert (value == torch.inf).all()
        if forward:  # the gradient of what is there
            (dx,) = torch.autograd.grad(value.sum(), x)
            torch.testing.assert_close(dx, (log_s.exp() - log_t.exp())[:, :V] @ w)
        return
    s, t = log_s.exp(), log_t.exp()
    rows = slice(0, min(V, V_teacher))
    if kind == "tv":
        expected = (s - t).abs().sum(-1) / 2
    elif forward:
        expected = (t[:, rows] * (log_t - log_s)[:, rows]).sum(-1)
    elif reverse:
        expected = (s[:, rows] * (log_s - log_t)[:, rows]).sum(-1)
    else:
        m = beta * t + (1 - beta) * s
        entropy = lambda p: torch.special.entr(p).sum(-1)  # noqa: E731
        expected = entropy(m) - beta * entropy(t) - (1 - beta) * entropy(s)
    torch.testing.assert_close(value, expected)
    leaves = (x, w, b)
    got, want = torch.autograd.grad(value.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e)


def test_classes_that_both_sides_rule_out() -> None:
    """-inf on both sides is 0 log 0 / 0, not NaN."""
    x, w, b, _ = head(7, 5, 13, dtype=torch.float64)
    tx, tw, tb, _ = head(7, 6, 13, dtype=torch.float64, seed=1)
    with torch.no_grad():
        b[::3] = tb[::3] = -torch.inf
    allowed = [v for v in range(13) if v % 3]
    for kind, beta in KINDS:
        value = linear_divergence(x, w, tx, tw, kind=kind, beta=beta, linear_bias=b, teacher_bias=tb)
        cut = (x, w[allowed], tx, tw[allowed])
        expected = divergence_oracle(*cut, kind=kind, beta=beta, linear_bias=b[allowed], teacher_bias=tb[allowed])
        torch.testing.assert_close(value, expected)
        got, want = torch.autograd.grad(value.sum(), (x, w)), torch.autograd.grad(expected.sum(), (x, w))
        for g, e in zip(got, want, strict=True):
            torch.testing.assert_close(g, e)


def test_logits_far_apart_underflow_to_nothing() -> None:
    x, w, _, _ = head(5, 8, 40)
    tx, tw, _, _ = head(5, 8, 40, seed=1)
    x, tx = (60 * x.detach()).requires_grad_(), 60 * tx.detach()
    for kind, beta in KINDS:
        truth = [t.detach().double().requires_grad_() for t in (x, w, tx, tw)]
        value = linear_divergence(x, w, tx, tw, kind=kind, beta=beta)
        log_s, log_t = (truth[0] @ truth[1].T).log_softmax(-1), (truth[2] @ truth[3].T).log_softmax(-1).detach()
        expected = divergence_of(log_s, log_t, kind, beta)
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-4)
        assert torch.autograd.grad(value.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_student_close_to_its_teacher(kind: str, beta: float) -> None:
    """Log-probabilities around -10 hold 1e-6 of rounding, and the divergence is 5e-5: it must not drown."""
    tx, tw, _, _ = head(50, 32, 4000)
    x, w = tx.detach().clone(), (tw * (1 + 0.004 * torch.randn_like(tw))).detach().requires_grad_()
    truth = [t.detach().double().requires_grad_() for t in (x, w, tx, tw)]
    value = linear_divergence(x, w, tx, tw, kind=kind, beta=beta)
    expected = divergence_oracle(*truth, kind=kind, beta=beta)
    assert (value >= 0).all()
    assert kind == "tv" or expected.mean() < 6e-5
    assert relative_error(value, expected) < 3e-3
    same = linear_divergence(tx, tw, tx, tw, kind=kind, beta=beta)
    assert (same.abs() < 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("workspace_mib", [None, 0.1, 12])
def test_low_precision_errs_less_than_plain_pytorch(dtype: torch.dtype, workspace_mib: float | None) -> None:
    x, w, b, _ = head(300, 40, 211, dtype=dtype)
    tx, tw, _, _ = head(300, 24, 211, dtype=dtype, seed=1)
    true = [t.detach().double().requires_grad_() for t in (x, w, b)]
    teacher = [t.detach().double() for t in (tx, tw)]
    upstream = torch.rand(300) / 300
    for kind, beta in KINDS:
        kwargs = {"kind": kind, "beta": beta}
        value = linear_divergence(
            x, w, tx, tw, linear_bias=b, **kwargs, options=HeadOptions(workspace_mib=workspace_mib)
        )
        expected = divergence_oracle(*true[:2], *teacher, linear_bias=true[2], **kwargs)
        log_s = F.linear(x, w, b).float().log_softmax(-1)
        naive = divergence_of(log_s, F.linear(tx, tw).float().log_softmax(-1).detach(), kind, beta)
        assert relative_error(value, expected) < 1e-5 < relative_error(naive, expected)
        got = torch.autograd.grad(value, (x, w, b), upstream)
        base = torch.autograd.grad(naive, (x, w, b), upstream)
        want = torch.autograd.grad(expected, true, upstream.double())
        for g, n, e in zip(got, base, want, strict=True):
            assert relative_error(g, e) <= 1.05 * relative_error(n, e)


def test_a_teacher_of_another_dtype() -> None:
    x, w, _, _ = head(9, 6, 31)
    tx, tw, _, _ = head(9, 4, 31, dtype=torch.bfloat16, seed=1)
    value = linear_divergence(x, w, tx, tw)
    expected = divergence_oracle(x, w, tx.detach().float(), tw.detach().float())
    torch.testing.assert_close(value, expected)
    check_gradients(value, expected, [x, w], [x, w], 1e-5)


def cut_by_hand(log_s: Tensor, logprobs: Tensor, ids: Tensor, tail: str) -> tuple[Tensor, Tensor]:
    """Both sides' log-probabilities of the outcomes, row by row."""
    sides = ([], [])
    for s, t, row in zip(log_s, logprobs, ids, strict=True):
        known = t > -torch.inf
        s_known, t_known = s[row[known]], t[known]
        if tail == "renormalise":
            s_known, t_known = s_known.log_softmax(0), t_known.log_softmax(0)
        elif tail == "bucket":
            others = torch.ones(len(s), dtype=torch.bool)
            others[row[known]] = False
            s_known = torch.cat((s_known, s[others].logsumexp(0)[None]))
            t_known = torch.cat((t_known, (1 - t_known.exp().sum()).log()[None]))
        pad = len(row) + 1 - len(s_known)
        sides[0].append(F.pad(s_known, (0, pad), value=-torch.inf))
        sides[1].append(F.pad(t_known, (0, pad), value=-torch.inf))
    return torch.stack(sides[0]), torch.stack(sides[1])


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("K", [1, 4, 12])
def test_a_teachers_top_k(tail: str, kind: str, beta: float, dtype: torch.dtype, K: int, rows_of_no_use: str) -> None:
    x, w, b, _ = head((3, 5), 9, 23, dtype=dtype)
    tx, tw, _, _ = head((3, 5), 4, 23, dtype=dtype, seed=1)
    logprobs, ids = F.log_softmax(tx.detach() @ tw.detach().T, -1).topk(K)
    if K > 1:
        logprobs[0, 1, -1] = -torch.inf  # a place that is not used, whatever stands there
        ids[0, 1, -1] = ids[0, 1, 0]
    temperature = 1.6
    value = linear_divergence(
        x, w, None, None, kind=kind, beta=beta, temperature=temperature, linear_bias=b,
        teacher_topk=(ids, logprobs, tail), options=HeadOptions(workspace_mib=0.002),
    )  # fmt: skip
    true = [t.detach().double().requires_grad_() for t in (x, w, b)]
    log_s = (F.linear(*true) / temperature).log_softmax(-1).view(15, 23)
    cut = cut_by_hand(log_s, logprobs.double().view(15, K), ids.view(15, K), tail)
    # NaN gradients come from -inf minus -inf in what pads the rows: kept out of the oracle
    cut = tuple(side.masked_fill(side == -torch.inf, -1e4) for side in cut)
    expected = divergence_of(*cut, kind, beta).view(3, 5)
    tolerance = 1e-10
    if dtype == torch.float32:  # in 1 - sum t digits cancel
        tolerance = 2e-5 + (3e-7 / (1 - logprobs.exp().sum(-1)).min().item() if tail == "bucket" else 0)
    assert relative_error(value, expected) <= tolerance
    if expected.abs().max() > 1e-12:
        check_gradients(value, expected, [x, w, b], true, tolerance)
    else:  # one class that is all there is
        assert all((g.abs() < 1e-6).all() for g in torch.autograd.grad(value.sum(), (x, w, b)))


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_top_k_of_everything_is_the_teacher_itself(tail: str, kind: str, beta: float, dtype: torch.dtype) -> None:
    x, w, b, _ = head(15, 9, 23, dtype=dtype)
    tx, tw, _, _ = head(15, 4, 23, dtype=dtype, seed=1)
    logprobs, ids = F.log_softmax(tx.detach() @ tw.detach().T, -1).topk(23)
    few = linear_divergence(
        x, w, None, None, kind=kind, beta=beta, linear_bias=b, teacher_topk=TeacherTopK(ids, logprobs, tail)
    )
    whole = linear_divergence(x, w, tx, tw, kind=kind, beta=beta, linear_bias=b)
    torch.testing.assert_close(few, whole)
    check_gradients(few, whole, [x, w, b], [x, w, b], 1e-5)


def test_ids_that_the_student_lacks() -> None:
    x, w, _, _ = head(4, 5, 7, dtype=torch.float64)
    ids = torch.tensor([[0, 9], [1, 2], [3, 7], [6, 5]])
    logprobs = torch.full((4, 2), 0.4, dtype=torch.float64).log()
    kl = linear_divergence(x, w, None, None, teacher_topk=(ids, logprobs))
    assert (kl.isinf() == torch.tensor([True, False, True, False])).all()
    tv = linear_divergence(x, w, None, None, kind="tv", teacher_topk=(ids, logprobs, "drop"))
    s = (x @ w.T).softmax(-1)
    torch.testing.assert_close(tv[0], (s[0, 0] - 0.4).abs() / 2 + 0.2)
    assert torch.autograd.grad(tv.sum(), x)[0].isfinite().all()


def test_the_default_of_a_plain_tuple_is_the_bucket() -> None:
    x, w, _, _ = head(4, 5, 7)
    ids, logprobs = torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.4).log()
    results = [
        linear_divergence(x, w, None, None, teacher_topk=t) for t in ((ids, logprobs), (ids, logprobs, "bucket"))
    ]
    assert torch.equal(*results)
    assert torch.equal(linear_divergence(x, w, None, None, teacher_topk=TeacherTopK(ids, logprobs)), results[0])


def test_reference_is_the_specification() -> None:
    for seed in range(80):
        kwargs = in_float64(arguments(case_of(seed), torch.float64, seed))
        torch.testing.assert_close(reference.linear_divergence(**kwargs), divergence_oracle(**kwargs))
        x, w = kwargs["input"], kwargs["linear_weight"]
        for tail in TAILS:
            logprobs, ids = F.log_softmax(kwargs["teacher_input"] @ kwargs["teacher_weight"].T, -1).detach().topk(4)
            common = {n: kwargs[n] for n in ("kind", "beta", "temperature", "linear_bias", "mask")}
            got = reference.linear_divergence(x, w, None, None, teacher_topk=(ids, logprobs, tail), **common)
            want = linear_divergence(x, w, None, None, teacher_topk=(ids, logprobs, tail), **common)
            torch.testing.assert_close(got, want)


def test_the_same_bits_from_run_to_run() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, w, b, _ = head(200, 32, 500, dtype=dtype)
        tx, tw, _, _ = head(200, 16, 500, dtype=dtype, seed=1)
        runs = []
        for _ in range(2):
            value = linear_divergence(x, w, tx, tw, kind="jsd", linear_bias=b, options=HeadOptions(workspace_mib=0.2))
            runs.append((value, *torch.autograd.grad(value.sum(), (x, w, b))))
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
