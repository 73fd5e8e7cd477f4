"""The contract by kernels, from hidden states to gradients: in Triton's interpreter, against float64 autograd.

The exponential path in float32, since the interpreter's bfloat16 products are wrong; rows of logits in every dtype.
On a GPU `tests/gpu` runs all of it as users do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from contract.cases import DIFFERENTIABLE, FUNCTIONS, KINDS, NARROW, arguments
from contract.function import Arguments, check, flat, near, total
from head.kernel_plans import use_kernels
from lowtide import (
    HeadOptions,
    linear_cross_entropy,
    linear_logprobs,
    linear_token_stats,
)
from lowtide.head.token_stats import WANTS
from promises import promise
from support import (
    assert_near,
    every_pair,
    head,
    in_float64,
    logits_of,
    oracle,
    pairs,
    relative_error,
    stats_oracle,
)

if torch.cuda.is_available():
    pytest.skip("on a GPU tests/gpu runs these kernels", allow_module_level=True)

pytestmark = [promise("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # the interpreter's NumPy
SINGLE = torch.float32
STATS = tuple(name for name in WANTS if name != "topk")
FEWER: dict[str, list[Any]] = {  # options of which some values are enough here
    "ignored": ["some", "all but one"],
    "leading": [(2, 5)],
    "workspace_mib": [None],
    "num_items": [None, 2.5],
    "kind": [kind for kind in KINDS if kind != ("jsd", 0.5)],
    "temperature": [1.0, 0.5, "tensor"],
    "tail": [None],
    "topk": [4],
    "teacher_D": [9],
    "targets": [1, None, 3],
    "want": [STATS, WANTS, ("entropy",), ("mean_logit",)],
    "ignored_tokens": ["auto"],
    "accumulate": ["auto"],
}
DTYPES = {
    name: [SINGLE] if name == "linear_token_stats" else [SINGLE, *NARROW]
    for name in FUNCTIONS
    if name != "linear_contrastive"
}
RUNS = [  # functions in the dtypes that their kernels take, and the schedules of the exponential path
    ("linear_cross_entropy", SINGLE, "blocks"),
    *((name, dtype, "chunks") for name, dtypes in DTYPES.items() for dtype in dtypes),
]
SIZES = [(15, 24, 61), (1, 8, 2), (14, 40, 64), (5, 8, 1)]  # N, D, V
LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "capped": {"softcap": 9.0, "z_loss": 0.01, "logit_scale": 0.7},
    "smoothed": {"label_smoothing": 0.1, "z_loss": 0.01, "weight": True, "token_weight": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"logit_scale": 0.7, "softcap": 9.0},
    "negative": {"logit_scale": -1.3},
}


@pytest.fixture(params=["chunks"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends of the plans that were made; the parameter is the exponential path's schedule."""
    return use_kernels(monkeypatch, request.param)


both_schedules = pytest.mark.parametrize("kernels", ["chunks", "blocks"], indirect=True)


@pytest.mark.parametrize(
    ("name", "dtypes", "kernels"),
    [*((name, dtypes, "chunks") for name, dtypes in DTYPES.items()), ("linear_cross_entropy", [SINGLE], "blocks")],
    indirect=["kernels"],
)
def test_every_pair_of_options(name: str, dtypes: list[torch.dtype], kernels: list[str]) -> None:
    options, bounds = FUNCTIONS[name].options, dict[str, Any]()
    options = options | {option: values for option, values in FEWER.items() if option in options}
    options["dtype"] = dtypes
    if "logit_scale" in options:
        options["logit_scale"] = [-1.3, "trained"]
    if name == "linear_logprobs":
        options["targets"] = [1]  # several are a statistic
    if name == "linear_apply":
        options["args"], bounds["tolerance"] = ["trained"], near(1e-12, 1e-5, 8e-3, 1e-3)
    for choice in pairs(options, seed=int(torch.randint(2**31, ()))):
        kernels.clear()
        dtype = choice.pop("dtype")
        if dtype != SINGLE and choice.get("logit_scale") == "trained":
            choice["logit_scale"] = "tensor"  # head/test_numbers.py
        check(FUNCTIONS[name], choice | {"D": 24, "V": 45}, dtype, **bounds)
        exp = dtype == SINGLE and name != "linear_divergence"
        exp &= not (choice["softcap"] and choice.get("label_smoothing"))
        assert {*kernels} == {"torch" if name == "linear_apply" else "exp" if exp else "row"}


def losing_digits(x: Tensor, w: Tensor, scale: float = 1.0) -> float:
    """Return what float32 may lose of a logit: a part of its largest term."""
    return (x.abs() @ w.abs().T).amax().item() * abs(scale) * 2**-22


@pytest.mark.parametrize(
    ("size", "huge", "name", "kernels"),
    [
        *(
            (*case, schedule)
            for schedule in ("chunks", "blocks")
            for case in [
                (SIZES[1], False, "smoothed"),
                (SIZES[0], True, "smoothed"),
                *((SIZES[2], name != "smoothed", name) for name in LOSSES),
            ]
        ),
        *((size, False, "smoothed", "chunks") for size in ((3, 1100, 37), (5, 8, 2250))),  # rows of several blocks
    ],
    indirect=["kernels"],
)
def test_losses_of_any_size(name: str, size: tuple[int, int, int], huge: bool) -> None:
    """Some tokens are ignored, and hold NaN."""
    N, D, V = size
    kwargs = arguments("linear_cross_entropy", SINGLE, D=D, V=V, leading=(N,), **LOSSES[name])
    del kwargs["options"], kwargs["reduction"]
    kwargs["target"][3::4] = -100
    if huge:
        with torch.no_grad():
            kwargs["input"][: N // 5] *= 100  # of one token alone the gradient may be too small for float32
    leaves = ("input", "linear_weight", "linear_bias")
    found = []
    for given in (in_float64(kwargs), kwargs):
        value = oracle(**given)
        found.append((value, *torch.autograd.grad(value, [given[n] for n in leaves])))
    # a single product may err so much, and lse has no more digits, from which blocks are rebuilt
    digits = losing_digits(kwargs["input"], kwargs["linear_weight"]) if huge else 0.0
    with torch.no_grad():
        kwargs["input"][3::4] = torch.nan
    loss = linear_cross_entropy(**kwargs)
    got = (loss, *torch.autograd.grad(loss, [kwargs[n] for n in leaves]))
    for i, (g, true, baseline) in enumerate(zip(got, *found, strict=True)):
        assert relative_error(g, true) < (4 if i else 1) * 5e-6 + digits + 4 * relative_error(baseline, true)
    with torch.no_grad():
        assert relative_error(linear_cross_entropy(**kwargs), found[0][0]) < 5e-6 + digits + 4 * relative_error(
            found[1][0], found[0][0]
        )


@every_pair(K=[1, 5], name=OPTIONS, size=SIZES)
def test_statistics_of_sure_tokens(name: str, size: tuple[int, int, int], K: int) -> None:
    """Also of targets that occur twice, are ignored, or get no upstream; a token without any may hold NaN."""
    (N, D, V), options = size, OPTIONS[name]
    kwargs = arguments("linear_token_stats", SINGLE, D=D, V=V, leading=(N,), linear_bias=name == "all", want=STATS)
    kwargs |= options | {"topk": None}
    leaves = [n for n in ("input", "linear_weight", "linear_bias") if kwargs[n] is not None]
    y = torch.randint(0, V, (N, K))
    with torch.no_grad():
        kwargs["input"][: N // 5] *= 3 if "softcap" in options else 30  # not sure of all that meets the cap
        z = logits_of(kwargs["input"], *(kwargs[n] for n in ("linear_weight", "linear_bias")), **options)
    y[: N // 8, 0] = z.argmax(1)[: N // 8]
    if K > 1:
        y[1::3, 1], y[2::5, 1] = y[1::3, 0], -100
    y[3::4, 0] = -100
    kwargs["target"] = y if K > 1 else y[:, 0]
    wide = in_float64({n: value for n, value in kwargs.items() if n not in ("want", "topk")})
    want = stats_oracle(**wide)
    digits = losing_digits(kwargs["input"], kwargs["linear_weight"], options.get("logit_scale", 1.0))
    got = linear_token_stats(**kwargs)
    for field in (*DIFFERENTIABLE, "sum_sq_prob"):
        torch.testing.assert_close(getattr(got, field).double(), want[field], rtol=5e-6, atol=4 * digits)
    assert torch.equal(got.argmax, want["argmax"])
    assert torch.equal(got.is_top1, want["is_top1"])
    z = logits_of(*(wide[n] for n in ("input", "linear_weight", "linear_bias")), **options).detach()
    top = want["argmax"][:, None]
    below = -(z - z.gather(1, top)).exp().scatter(1, top, 0).sum(1, keepdim=True).log1p()
    sure = want["is_top1"].view(N, K) & (below > -0.1)
    found = got.logprob.view(N, K)
    torch.testing.assert_close(found[sure].double(), below.expand(N, K)[sure], rtol=8 * digits, atol=1e-37)

    upstream = {field: torch.randn(want[field].shape) for field in DIFFERENTIABLE}
    for g in upstream.values():
        g[2::7] = 0
    expected = torch.autograd.grad(
        [want[f] for f in upstream], [wide[n] for n in leaves], [g.double() for g in upstream.values()]
    )
    kwargs["input"].data[2::7] = torch.nan  # nothing flows back to these
    found = torch.autograd.grad([getattr(got, f) for f in upstream], [kwargs[n] for n in leaves], [*upstream.values()])
    assert (found[0][2::7] == 0).all()
    given = sum(g.norm().item() for g in upstream.values())
    others = (
        wide["linear_weight"].norm().item(),
        wide["input"].norm().item(),
        1.0,
    )  # what the logits' is multiplied with
    for g, e, other in zip(found, expected, others, strict=False):
        # the targets' parts and p times their sum, float32 both, may all but cancel
        rounding = torch.finfo(SINGLE).eps * given * other if K > 1 else 0
        scale = max(e.norm().item(), 1e-6 * given, 1e-30)
        assert (g.double() - e).norm().item() <= (2e-5 + 4 * digits) * scale + rounding


@every_pair(name=OPTIONS, k=[1, 40, 7], size=[*SIZES, (9, 24, 300)])
def test_highest_logits(name: str, size: tuple[int, int, int], k: int) -> None:
    N, D, V = size
    kwargs = arguments("linear_token_stats", SINGLE, D=D, V=V, leading=(N,), linear_bias=name == "all")
    kwargs = {n: kwargs[n] for n in ("input", "linear_weight", "linear_bias")} | OPTIONS[name]
    found = linear_token_stats(**kwargs, want=("topk",), topk=min(k, V)).topk
    z = logits_of(**in_float64(kwargs)).detach()
    values = z.topk(min(k, V), 1).values
    digits = losing_digits(kwargs["input"], kwargs["linear_weight"], OPTIONS[name].get("logit_scale", 1.0))
    assert (found.values.diff(dim=1) <= 0).all()
    assert (found.ids.sort(1).values.diff(dim=1) > 0).all()
    for got in (found.values.double(), z.gather(1, found.ids)):  # classes that belong to the values
        torch.testing.assert_close(got, values, rtol=5e-6, atol=4 * digits)


@pytest.mark.parametrize(("name", "dtype", "kernels"), RUNS, indirect=["kernels"])
def test_no_tokens(name: str, dtype: torch.dtype) -> None:
    kwargs = arguments(name, dtype, D=16, V=50, leading=(0,), **({"want": STATS} if "stats" in name else {}))
    found = flat(FUNCTIONS[name].run(**kwargs))
    for g in torch.autograd.grad(total(found).nan_to_num(), [kwargs["input"], kwargs["linear_weight"]]):
        assert (g == 0).all()


@pytest.mark.parametrize(
    ("name", "dtype", "kernels"),
    [run for run in RUNS if run[0] in ("linear_cross_entropy", "linear_token_stats", "linear_divergence")],
    indirect=["kernels"],
)
def test_some_gradients_alone(name: str, dtype: torch.dtype) -> None:
    leaves = ("input", "linear_weight", "linear_bias")
    choice: dict[str, Any] = {"want": STATS} if name == "linear_token_stats" else {}
    kwargs = arguments(name, dtype, D=24, V=45, leading=(9,), **choice)
    whole = torch.autograd.grad(total(flat(FUNCTIONS[name].run(**kwargs))), [kwargs[n] for n in leaves])
    for wanted in ((0,), (1,), (2,), (1, 2)):
        cut = kwargs | {n: kwargs[n].detach().requires_grad_(i in wanted) for i, n in enumerate(leaves)}
        found = torch.autograd.grad(total(flat(FUNCTIONS[name].run(**cut))), [cut[leaves[i]] for i in wanted])
        for i, g in zip(wanted, found, strict=True):
            assert torch.equal(g, whole[i]), (wanted, i)


@every_pair(gradient=["forward", "recompute"], factor=[2.0**-14, 1.0, 2.0**16], logit_scale=[1.0, 100.0])
def test_fp16_gradients_for_any_factor(gradient: Any, factor: float, logit_scale: float) -> None:
    """Neither what multiplies the hidden states nor what is stored leaves fp16's range before the factor has come."""
    x, w, _, y = head(20, 8, 33, dtype=torch.float16, bias=False)
    y[3] = -100
    with torch.no_grad():
        most = 1e3 / (factor * logit_scale)  # so that the gradients are within float16's range
        size = min(700.0, most)
        x *= size
        w *= min(most, 1 / (size * logit_scale))
    kwargs: dict[str, Any] = {"logit_scale": logit_scale, "reduction": "sum", "options": HeadOptions(gradient=gradient)}
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    true = torch.autograd.grad(factor * oracle(*exact, y, logit_scale=logit_scale, reduction="sum"), exact)
    losses = [linear_cross_entropy(x, w, y, **kwargs)]
    if gradient == "recompute":
        losses.append(-linear_logprobs(x, w, y, logit_scale=logit_scale).sum())
    for loss in losses:
        for g, t in zip(torch.autograd.grad(factor * loss, (x, w)), true, strict=True):
            assert relative_error(g, t) < 2e-3 + 2 * relative_error(t.half(), t)


@both_schedules
def test_tokens_sure_or_lost_by_any_margin() -> None:
    """Row by row losses and gradients keep their digits, whatever a weight leaves of them."""
    sure, lost = torch.tensor([80.0, 60, 16, 6]), torch.tensor([0.0, 6, 16, 40, 60, 87.5, 300])
    factors = torch.tensor([1.5, 2.0**-110, 2.0**30])
    g = torch.cat([torch.ones(len(sure)), factors.repeat_interleave(len(lost))])
    x, w, y = torch.zeros(len(g), 16), 256 * torch.eye(13, 16), torch.zeros(len(g), dtype=torch.int64)
    x[: len(sure), 0], x[len(sure) :, 1] = sure / 256, lost.repeat(len(factors)) / 256
    exact = x.double().requires_grad_()
    z = exact @ w.double().T
    want = torch.nn.functional.softplus((z[:, 1:] - z[:, :1]).logsumexp(1))
    (want_x,) = torch.autograd.grad(want, exact, g.double())
    x.requires_grad_()
    w.requires_grad_()
    torch.testing.assert_close(-linear_logprobs(x, w, y).double(), want, rtol=1e-5, atol=0)
    for loss in (
        linear_cross_entropy(x, w, y, token_weight=g, reduction="sum"),
        -(linear_logprobs(x, w, y) * g).sum(),
    ):
        got_x, got_w = torch.autograd.grad(loss, (x, w))
        assert ((got_x.double() - want_x).norm(dim=1) <= 1e-4 * want_x.norm(dim=1)).all()
        assert got_w.isfinite().all()


def tokens_of_every_kind(V: int, **choice: Any) -> Arguments:
    """Return ordinary tokens, sure ones, lost ones, ignored ones that hold anything, and some of hardly any weight."""
    choice |= {"leading": (22,), "token_weight": True, "reduction": "sum"}
    kwargs = arguments("linear_cross_entropy", SINGLE, D=32, V=V, **choice)
    x, w, y, weight = (kwargs[n].detach() for n in ("input", "linear_weight", "target", "token_weight"))
    w.mul_(8).round_().div_(8)
    x.mul_(8).round_().div_(8)  # on a grid: float32 logits are exact, large ones too
    sure = w[y] / w[y].square().sum(1, keepdim=True)
    for i in range(4, 9):  # more so from token to token
        x[i] = sure[i] * 6 * (i - 3)
    x[9:13] *= 256
    x[13], x[14] = -4096 * sure[13], 4096 * sure[14]  # lost, and sure
    y[[16, 17, 18, 21]] = -100
    x[16], x[17] = torch.nan, torch.inf
    weight[19], weight[20] = 0, 2.0**-110
    return kwargs


@pytest.mark.parametrize(
    ("V", "ruled_out", "name", "kernels"),
    [(37, True, "plain", "chunks"), (64, False, "capped", "blocks"), (64, False, "smoothed", "chunks")],
    indirect=["kernels"],
)
def test_tokens_of_every_kind(V: int, ruled_out: bool, name: str) -> None:
    """Row by row, the same bits again; a class without a chance, and a kept token that is no number, in rows alone."""
    far = {"softcap": 256.0} if "softcap" in LOSSES[name] else {}  # beyond what an exponential holds
    kwargs = tokens_of_every_kind(V, **LOSSES[name] | far)
    bias, y = kwargs["linear_bias"], kwargs["target"]
    with torch.no_grad():
        bias.mul_(8).round_().div_(8)
        if ruled_out:
            bias[[5, 36]] = -torch.inf
            y[(y == 36) | (y == 5)] = 9
    clean = in_float64(kwargs)
    kept = y >= 0
    clean["input"].data[~kept] = 0
    each = kwargs | {"reduction": "none"}
    leaves = ("input", "linear_weight", "linear_bias")
    want = oracle(**clean | {"reduction": "none"})
    want_x, *others = torch.autograd.grad(want.sum(), [clean[n] for n in leaves])
    assert want.max() > 100
    found = linear_cross_entropy(**each)
    (found_x,) = torch.autograd.grad(found.sum(), kwargs["input"])
    torch.testing.assert_close(found.double(), want, rtol=2e-5, atol=1e-5)
    runs = []
    for _ in range(2):
        loss = linear_cross_entropy(**kwargs)
        runs.append((loss, *torch.autograd.grad(loss, [kwargs[n] for n in leaves])))
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))
    loss, got_x, *rest = runs[0]
    assert relative_error(loss, want.sum()) < 2e-5
    # float32 holds an lse of thousands to 2**-13 of a nat, and blocks are rebuilt from it
    loose = max(1e-5, want.max().item() * 2.0**-22)
    for i, (g, e) in enumerate(zip(got_x, want_x, strict=True)):
        least = 1e-15 * abs(float(kwargs["token_weight"][i]))  # float64's own, of what is left of softmax - 1
        assert (g.double() - e).norm() <= loose * e.norm() + least, i
    assert (got_x[~kept] == 0).all()
    assert_near(rest, others, loose)

    with torch.no_grad():
        kwargs["input"][3] = torch.nan
        if ruled_out:
            y[2] = 5
    again = linear_cross_entropy(**each)
    (grad,) = torch.autograd.grad(again.sum(), kwargs["input"])
    assert again[3].isnan()
    assert grad[3].isnan().all()
    assert (again[2] == torch.inf) == ruled_out
    untouched = torch.tensor([i not in (2, 3) for i in range(22)])
    assert torch.equal(again[untouched], found[untouched])
    assert relative_error(grad[untouched], found_x[untouched]) < 1e-6


@both_schedules
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_target_without_a_chance(reduction: str) -> None:
    """Its loss is infinite, the gradients are plain PyTorch's; with a class weight of 0 it counts for nothing."""
    kwargs = arguments("linear_cross_entropy", SINGLE, D=24, V=61, leading=(11,), reduction=reduction)
    leaves, y = [kwargs[n] for n in ("input", "linear_weight", "linear_bias")], kwargs["target"]
    with torch.no_grad():
        kwargs["linear_bias"][[5, 40]] = -torch.inf
    y.remainder_(5)[7] = 5
    weight = torch.ones(61).index_fill(0, torch.tensor(5), 0)
    for lost, ours, truth in ((torch.inf, {}, {}), (0, {"weight": weight}, {"target": y.where(y != 5, -100)})):
        wide = in_float64(kwargs | truth)
        got, want = linear_cross_entropy(**kwargs | ours), oracle(**{k: v for k, v in wide.items() if k != "options"})
        assert reduction == "sum" or got[7] == lost
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        true = torch.autograd.grad(want.sum(), [wide[n] for n in ("input", "linear_weight", "linear_bias")])
        assert_near(torch.autograd.grad(got.sum(), leaves), true, 1e-5)


@promise("bitwise")
def test_a_token_has_one_set_of_bits() -> None:
    """Of a loss, a log-probability and statistics, of one target or of the first of several."""
    x, w, b, y = (t if t is None else t.detach() for t in head(40, 16, 70))
    y[::3] = (x @ w.T + b).argmax(1)[::3]
    given: dict[str, Any] = {"linear_bias": b, "softcap": 3.0, "logit_scale": 0.7}
    one, several = linear_logprobs(x, w, y, **given), torch.stack((y, y.roll(1), y), 1)
    assert torch.equal(one, 0 - linear_cross_entropy(x, w, y, reduction="none", **given))
    stats = linear_token_stats(x, w, y, want=("logprob", "entropy"), **given)
    assert torch.equal(one, stats.logprob)
    assert torch.equal(one, linear_logprobs(x, w, several, **given)[:, 0])
    assert torch.equal(one, linear_logprobs(x, w, several, **given)[:, 2])
    assert torch.equal(stats.entropy, linear_token_stats(x, w, want=("entropy",), **given).entropy)
