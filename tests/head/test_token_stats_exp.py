"""Token statistics on the exponential path, both directions, against float64 autograd; kernels by Triton's interpreter.

In float32, since the interpreter's bfloat16 products are wrong. On a GPU `tests/gpu` runs it as users do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lowtide.head.kernels import configs
from lowtide.head.logit_stats import Known, Upstream
from lowtide.head.plan import HeadPlan
from lowtide.head.schedules import Gradients
from lowtide.head.token_stats_exp import ExpStats
from lowtide.head.token_stats_rows import StatsJob, _of_targets
from support import relative_error

if torch.cuda.is_available():
    pytest.skip("on a GPU tests/gpu runs this path", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
WANT = ("logprob", "entropy", "lse", "mean_logit", "argmax", "sum_sq_prob", "is_top1")
DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logit")
NEAR = 5e-6
SIZES = [(37, 24, 61, 16), (1, 8, 2, 1), (33, 40, 64, 33), (5, 8, 1, 2)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"bias": True, "logit_scale": 0.7, "softcap": 9.0},
    "negative": {"logit_scale": -1.3},
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configs.GemmConfig(rows=16, columns=32, depth=16, group=2, stages=1, warps=4, pieces=2)
    monkeypatch.setattr(configs, "of_device", lambda device: config)


def plan(N: int, V: int, rows: int) -> HeadPlan:
    return HeadPlan(
        backend="exp", reason="", gradient="recompute", accumulate="input", rows=N, chunks=-(-N // rows),
        chunk_rows=rows, scratch_bytes=0, accumulator_bytes=0, cast_bytes=0, note="", schedule="blocks",
        block_columns=min(V, 24), sum_rows=17,
    )  # fmt: skip


def make_job(x: Tensor, w: Tensor, y: Tensor | None, want: tuple[str, ...], kwargs: dict[str, Any]) -> StatsJob:
    scale = kwargs.get("logit_scale")
    return StatsJob(
        input=x, weight_VD=w, target_NK=torch.zeros(len(x), 0, dtype=torch.long) if y is None else y[:, None],
        bias_V=kwargs.get("bias_V"), logit_scale=None if scale is None else torch.tensor(scale),
        softcap=kwargs.get("softcap"), want=frozenset(want), topk=0, ignore_index=-100, dtype=torch.float32,
        wide=torch.float32,
    )  # fmt: skip


def truth(x: Tensor, w: Tensor, y: Tensor | None, b: Tensor | None, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The statistics from whole logits, in their dtype."""
    z = x @ w.T
    z = (z if b is None else z + b) * kwargs.get("logit_scale", 1.0)
    cap = kwargs.get("softcap")
    z = z if cap is None else cap * torch.tanh(z / cap)
    logp = torch.log_softmax(z, 1)
    p = logp.exp()
    found = {"entropy": -(p * logp.clamp(min=-1e4)).sum(1), "lse": z.logsumexp(1), "mean_logit": z.mean(1)}
    found |= {"argmax": z.argmax(1), "sum_sq_prob": p.square().sum(1)}
    if y is not None:
        others = (z - z.amax(1, keepdim=True)).exp().scatter(1, found["argmax"][:, None], 0).sum(1)
        logprob = logp.gather(1, y.clamp(min=0)[:, None])[:, 0]
        found["logprob"] = torch.where(y == found["argmax"], -others.log1p(), logprob).where(y >= 0, 0)
    return found


def problem(N: int, D: int, V: int, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]]:
    x, w, y = torch.randn(N, D), torch.randn(V, D), torch.randint(0, V, (N,))
    kwargs = {key: value for key, value in OPTIONS[name].items() if key != "bias"}
    b = torch.randn(V) if "bias" in OPTIONS[name] else None
    if b is not None:
        kwargs["bias_V"] = b
    y[3::4] = -100
    x[: N // 5] *= 3 if "softcap" in kwargs else 30  # sure of something, and not of everything that meets the cap
    if V > 1:
        y[: N // 8] = truth(x, w, None, b, kwargs)["argmax"][: N // 8]
    return x, w, y, b, kwargs


def lost_digits(x: Tensor, w: Tensor, kwargs: dict[str, Any]) -> float:
    """What float32 may lose of a logit: a part of its largest term."""
    return (x.abs() @ w.abs().T).amax().item() * abs(kwargs.get("logit_scale", 1.0)) * 2**-22


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("N", "D", "V", "rows"), SIZES)
def test_statistics(name: str, N: int, D: int, V: int, rows: int) -> None:
    x, w, y, b, kwargs = problem(N, D, V, name)
    job = make_job(x, w, y, WANT, kwargs)
    found = _of_targets(job, y.clamp(min=0)[:, None], ExpStats(job, plan(N, V, rows)).forward())
    want = truth(x.double(), w.double(), y, None if b is None else b.double(), kwargs)
    assert torch.equal(found["argmax"], want["argmax"])
    assert torch.equal(found["is_top1"][:, 0], (want["argmax"] == y) & (y >= 0))
    digits = lost_digits(x, w, kwargs)
    for field in (*DIFFERENTIABLE, "sum_sq_prob"):
        torch.testing.assert_close(found[field].view(N).double(), want[field], rtol=NEAR, atol=4 * digits)
    sure = (y == want["argmax"]) & (want["logprob"] > -0.1) & (y >= 0)
    torch.testing.assert_close(found["logprob"][sure, 0].double(), want["logprob"][sure], rtol=8 * digits, atol=1e-37)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("N", "D", "V", "rows"), SIZES)
@pytest.mark.parametrize("flows", [("logprob",), ("entropy",), ("lse",), ("mean_logit",), DIFFERENTIABLE])
def test_gradients(name: str, N: int, D: int, V: int, rows: int, flows: tuple[str, ...]) -> None:
    x, w, y, b, kwargs = problem(N, D, V, name)
    upstream = {field: torch.randn(N) for field in flows}
    for g in upstream.values():
        g[2::7] = 0
    exact = [t.double().requires_grad_() for t in (x, w, *([] if b is None else [b]))]
    values = truth(exact[0], exact[1], y, exact[2] if b is not None else None, kwargs)
    total = sum((values[field] * g.double()).sum() for field, g in upstream.items())
    expected = torch.autograd.grad(total, exact, allow_unused=True, materialize_grads=True)

    dead = torch.ones(N, dtype=torch.bool)
    for field, g in upstream.items():
        dead &= (g == 0) | ((y < 0) if field == "logprob" else torch.zeros(N, dtype=torch.bool))
    x = x.masked_fill(dead[:, None], torch.nan)  # nothing flows back to these
    job = make_job(x, w, y, WANT, kwargs)
    stats = ExpStats(job, plan(N, V, rows))
    found = stats.forward()
    ids = torch.stack((found["argmax"], y.where(y >= 0, found["argmax"])), 1)
    logprobs = torch.stack((found["top_logprob"], found["logprob"][:, 0].where(y >= 0, found["top_logprob"])), 1)
    known = Known(lse=found["lse"], entropy=found["entropy"], ids=ids, logprobs=logprobs)
    flowing = dict(upstream)
    if "logprob" in flowing:
        flowing["logprob"] = flowing["logprob"].where(y >= 0, 0)[:, None]
    into = Gradients(
        input_ND=torch.full_like(x, torch.nan), weight_VD=torch.full_like(w, torch.nan), bias_V=torch.zeros(V)
    )
    stats.backward(known, Upstream(**flowing), into)
    digits = lost_digits(x.nan_to_num(), w, kwargs)
    assert into.input_ND is not None
    assert (into.input_ND[dead] == 0).all()
    for got, want in zip((into.input_ND, into.weight_VD, into.bias_V), expected, strict=False):
        assert got is not None
        scale = max(want.norm().item(), 1e-6 * sum(g.norm().item() for g in upstream.values()))
        assert (got.double() - want).norm().item() <= (4 * NEAR + 4 * digits) * max(scale, 1e-30)


def test_rows_that_are_no_numbers() -> None:
    x, w = torch.randn(6, 16), torch.randn(50, 16)
    x[1], x[2] = torch.nan, torch.inf
    job = make_job(x, w, torch.randint(0, 50, (6,)), WANT, {})
    found = ExpStats(job, plan(6, 50, 4)).forward()
    for field in ("logprob", "entropy", "lse"):
        assert torch.equal(found[field].view(6).isnan(), torch.tensor([False, True, True, False, False, False]))
    assert (found["argmax"] < 50).all()


def test_classes_ruled_out_by_the_bias() -> None:
    x, w, b = torch.randn(20, 16), torch.randn(90, 16), torch.zeros(90)
    b[:70] = -torch.inf  # two tiles and a part have no class left
    y = torch.randint(70, 90, (20,))
    job = make_job(x, w, y, WANT, {"bias_V": b})
    found = ExpStats(job, plan(20, 90, 8)).forward()
    want = truth(x.double(), w[70:].double(), y - 70, None, {})
    for field in ("logprob", "entropy", "lse", "sum_sq_prob"):
        assert relative_error(found[field].view(20), want[field]) < NEAR
    assert torch.equal(found["argmax"], want["argmax"] + 70)


def test_no_tokens() -> None:
    x, w = torch.randn(0, 16), torch.randn(50, 16)
    job = make_job(x, w, None, ("entropy",), {})
    stats = ExpStats(job, plan(0, 50, 1))
    found = stats.forward()
    assert found["entropy"].shape == (0,)
    into = Gradients(input_ND=torch.empty(0, 16), weight_VD=torch.full((50, 16), torch.nan))
    none = torch.zeros(0, 1)
    stats.backward(
        Known(lse=none[:, 0], entropy=none[:, 0], ids=none.long(), logprobs=none), Upstream(entropy=none[:, 0]), into
    )
    assert (into.weight_VD == 0).all()
