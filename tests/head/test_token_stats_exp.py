"""Token statistics on the exponential path, both directions, against float64 autograd; kernels by Triton's interpreter.

In float32, since the interpreter's bfloat16 products are wrong. On a GPU `tests/gpu` runs it as users do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lowtide.head.call import Head, TokenStatsArgs, Wanted
from lowtide.head.engine import gradient_buffers
from lowtide.head.gradients import Gradients
from lowtide.head.kernels import configs, stats_logits, stats_rows
from lowtide.head.kernels.exp_terms import finish_input_grad
from lowtide.head.plan import HeadPlan
from lowtide.head.ranks.alone import Alone
from lowtide.head.terms import token_stats as terms
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


@pytest.fixture(autouse=True)
def each_class_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU two entries for one class of a row would race; the interpreter, which has no threads, hides that."""
    put = stats_rows.put_entries

    def checked(g_CV: Tensor, entries: stats_logits.Entries, first_class: int) -> None:
        for row in entries.id[: len(g_CV)].tolist():
            classes = [v for v in row if v >= 0]
            assert len(set(classes)) == len(classes)
        put(g_CV, entries, first_class)

    monkeypatch.setattr(stats_rows, "put_entries", checked)


def plan(N: int, V: int, rows: int) -> HeadPlan:
    return HeadPlan(
        backend="exp", reason="", gradient="recompute", accumulate="input", rows=N, chunks=-(-N // rows),
        chunk_rows=rows, scratch_bytes=0, accumulator_bytes=0, cast_bytes=0, note="", schedule="blocks",
        block_columns=min(V, 24), sum_rows=17,
    )  # fmt: skip


class Stats:
    """Both directions of a call, in chunks of so many rows."""

    def __init__(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor | None,
        want: tuple[str, ...],
        kwargs: dict[str, Any],
        rows: int,
        topk: int = 0,
    ) -> None:
        N, scale = len(x), kwargs.get("logit_scale")
        head = Head(
            input=x, weight_VD=w, bias_V=kwargs.get("bias_V"), softcap=kwargs.get("softcap"),
            scale=None if scale is None else torch.tensor(scale), dtype=torch.float32, workspace_mib=None,
            accumulate="auto", backend="auto", ranks=Alone(len(w)),
        )  # fmt: skip
        target = torch.zeros(N, 0, dtype=torch.long) if y is None else y.view(N, -1)
        self.head, self.plan = head.prepared(), plan(N, len(w), rows)
        self.args = TokenStatsArgs(target=target, want=",".join(want), topk=topk, ignore_index=-100)

    def forward(self) -> dict[str, Tensor]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(terms, "plan_token_stats", lambda *_, **__: self.plan)
            self.found = terms.forward(self.head, self.args, Wanted(False, False, False), True)
        return self.found

    def backward(self, upstream: dict[str, Tensor]) -> Gradients:
        def poisoned(*args: Any, **kwargs: Any) -> Gradients:
            into = gradient_buffers(*args, **kwargs)
            for buffer in (into.input_ND, into.weight_VD):
                assert buffer is not None
                buffer.fill_(torch.nan)
            return into

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(terms, "plan_token_stats", lambda *_, **__: self.plan)
            patched.setattr(terms, "drops_rows", lambda device: False)  # as on a GPU
            patched.setattr(terms, "gradient_buffers", poisoned)
            given = {name: upstream.get(name) for name in DIFFERENTIABLE}
            return terms.backward(self.head, self.args, Wanted(True, True, True), given, self.found)


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
    found = Stats(x, w, y, WANT, kwargs, rows).forward()
    want = truth(x.double(), w.double(), y, None if b is None else b.double(), kwargs)
    assert torch.equal(found["argmax"], want["argmax"])
    assert torch.equal(found["is_top1"][:, 0], (want["argmax"] == y) & (y >= 0))
    digits = lost_digits(x, w, kwargs)
    for field in (*DIFFERENTIABLE, "sum_sq_prob"):
        torch.testing.assert_close(found[field].view(N).double(), want[field], rtol=NEAR, atol=4 * digits)
    sure = (y == want["argmax"]) & (want["logprob"] > -0.1) & (y >= 0)
    torch.testing.assert_close(found["logprob"][sure, 0].double(), want["logprob"][sure], rtol=8 * digits, atol=1e-37)


@pytest.mark.parametrize(
    ("flows", "N", "D", "V", "rows", "name"),
    [
        *((DIFFERENTIABLE, *size, name) for size in SIZES for name in OPTIONS),
        *(((field,), *SIZES[0], name) for field in DIFFERENTIABLE for name in OPTIONS),
        *(((field,), *size, "all") for field in DIFFERENTIABLE for size in SIZES[1:] if size[0] < 30),
    ],
)
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
    stats = Stats(x, w, y, WANT, kwargs, rows)
    stats.forward()
    flowing = dict(upstream)
    if "logprob" in flowing:
        flowing["logprob"] = flowing["logprob"][:, None]
    into = stats.backward(flowing)
    digits = lost_digits(x.nan_to_num(), w, kwargs)
    assert into.input_ND is not None
    assert (into.input_ND[dead] == 0).all()
    for got, want in zip((into.input_ND, into.weight_VD, into.bias_V), expected, strict=False):
        assert got is not None
        scale = max(want.norm().item(), 1e-6 * sum(g.norm().item() for g in upstream.values()))
        assert (got.double() - want).norm().item() <= (4 * NEAR + 4 * digits) * max(scale, 1e-30)


@pytest.mark.parametrize(
    ("K", "flows", "N", "D", "V", "rows", "name"),
    [
        *((5, ("logprob",), *SIZES[0], name) for name in OPTIONS),
        *((5, ("logprob",), *size, "all") for size in SIZES[1:]),
        *((2, DIFFERENTIABLE, *size, name) for size in SIZES[:2] for name in OPTIONS),
        *((2, DIFFERENTIABLE, *size, "negative") for size in SIZES[2:]),
    ],
)
def test_several_targets(name: str, N: int, D: int, V: int, rows: int, K: int, flows: tuple[str, ...]) -> None:
    x, w, y, b, kwargs = problem(N, D, V, name)
    ids = torch.randint(0, V, (N, K))
    ids[:, 0] = y  # some of them the highest class, some ignored
    ids[1::3, 1] = ids[1::3, 0]  # the same twice
    ids[2::5, 1] = -100
    leaves = [t.double().requires_grad_() for t in (x, w, *([] if b is None else [b]))]
    values = truth(leaves[0], leaves[1], None, leaves[2] if b is not None else None, kwargs)
    z = leaves[0] @ leaves[1].T
    z = (z if b is None else z + leaves[2]) * kwargs.get("logit_scale", 1.0)
    cap = kwargs.get("softcap")
    z = z if cap is None else cap * torch.tanh(z / cap)
    values["logprob"] = z.log_softmax(1).gather(1, ids.clamp(min=0)).where(ids >= 0, 0)

    stats = Stats(x, w, ids, WANT, kwargs, rows)
    found = stats.forward()
    digits = lost_digits(x, w, kwargs)
    torch.testing.assert_close(found["logprob"].double(), values["logprob"], rtol=NEAR, atol=4 * digits)
    assert torch.equal(found["is_top1"], values["argmax"][:, None] == ids)

    upstream = {field: torch.randn(N, K) if field == "logprob" else torch.randn(N) for field in flows}
    total = sum((values[field] * g.double()).sum() for field, g in upstream.items())
    expected = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    into = stats.backward(upstream)
    given = sum(g.norm().item() for g in upstream.values())
    others = w.norm().item(), x.norm().item(), 1.0  # what the gradient of the logits is multiplied with
    for got, want, other in zip((into.input_ND, into.weight_VD, into.bias_V), expected, others, strict=False):
        assert got is not None
        # the targets' parts and p times their sum, float32 both, may all but cancel
        rounding = torch.finfo(torch.float32).eps * given * other
        error, scale = (got.double() - want).norm().item(), max(want.norm().item(), 1e-6 * given, 1e-30)
        assert error <= (4 * NEAR + 4 * digits) * scale + rounding


def test_entries_are_rounded_once() -> None:
    """What the entry of each of several targets loses in a narrow buffer is found again in the input's gradient."""
    N, K, V, D = 9, 4, 40, 24
    x, w, ids = torch.randn(N, D).bfloat16(), torch.randn(V, D).bfloat16(), torch.randint(0, V, (N, K))
    ids[:, 2] = ids[:, 1]
    logp = (x.double() @ w.double().T).log_softmax(1)
    g = torch.randn(N, K)
    entries = stats_logits.Entries.empty(N, K, x.device, heat=False, even=False)
    known = stats_rows.RowStats(
        lse=(x.double() @ w.double().T).logsumexp(1).float(), top=logp.argmax(1), top_logprob=logp.amax(1).float(),
        logprob=logp.gather(1, ids).float(),
    )  # fmt: skip
    stats_rows.prepare_stats(known, stats_rows.RowStats(logprob=g), ids.int(), x, entries, V)
    softmax_part = (logp.exp() * -g.double().sum(1, keepdim=True)) / entries.s[:, None]
    e = softmax_part.bfloat16()
    stats_rows.put_entries(e, entries, 0)
    dx = torch.empty(N, D)
    finish_input_grad(e.float() @ w.float(), dx, w, entries.s, entries.id[:, 1:], entries.rest)
    exact = softmax_part.scatter_add(1, ids, g.double() / entries.s[:, None])
    torch.testing.assert_close(e.double(), exact, rtol=2**-7, atol=1e-6)  # the interpreter cuts digits off
    rounded = e.double().scatter(1, ids, exact.gather(1, ids))
    want = entries.s[:, None] * (rounded @ w.double())
    assert relative_error(dx, want) < NEAR


@pytest.mark.parametrize(("name", "k"), [("plain", 1), ("all", 40), ("negative", 7)])
@pytest.mark.parametrize(("N", "D", "V", "rows"), [*SIZES, (20, 24, 300, 9)])
def test_highest_logits(name: str, N: int, D: int, V: int, rows: int, k: int) -> None:
    k = min(k, V)
    x, w, _, b, kwargs = problem(N, D, V, name)
    found = Stats(x, w, None, ("topk",), kwargs, rows, k).forward()
    z = x.double() @ w.double().T
    z = (z if b is None else z + b) * kwargs.get("logit_scale", 1.0)
    cap = kwargs.get("softcap")
    z = z if cap is None else cap * torch.tanh(z / cap)
    values = z.topk(k, 1).values
    digits = lost_digits(x, w, kwargs)
    torch.testing.assert_close(found["topk_values"].double(), values, rtol=NEAR, atol=4 * digits)
    assert (found["topk_values"].diff(dim=1) <= 0).all()
    # classes that belong to the values, no two the same
    torch.testing.assert_close(z.gather(1, found["topk_ids"]), values, rtol=NEAR, atol=4 * digits)
    assert (found["topk_ids"].sort(1).values.diff(dim=1) > 0).all()


def test_highest_logits_of_as_many_tiles() -> None:
    x, w, b = torch.randn(3, 16), torch.randn(300, 16), torch.zeros(300)
    peaks = torch.tensor([5, 33, 95, 128, 190, 255, 299])  # each in a tile of its own
    b[peaks] = 100 + 20 * torch.arange(7.0)
    found = Stats(x, w, None, ("topk",), {"bias_V": b}, 2, 7).forward()
    assert torch.equal(found["topk_ids"], (x @ w.T + b).topk(7, 1).indices)
    assert torch.equal(found["topk_ids"].sort(1).values, peaks.expand(3, 7))


def test_highest_logits_of_equals_and_of_nothing() -> None:
    w = torch.randint(-4, 5, (1, 16)).float().expand(75, 16).contiguous()  # whole numbers: products are exact
    x, b = torch.randint(-4, 5, (5, 16)).float(), torch.zeros(75)
    b[::2] = -torch.inf
    x[3] = torch.nan
    found = Stats(x, w, None, ("topk",), {"bias_V": b}, 2, 40).forward()
    first = torch.cat((torch.arange(1, 75, 2), torch.tensor([0, 2, 4])))  # the lowest classes, and then those without
    assert torch.equal(found["topk_ids"][[0, 1, 2, 4]], first.expand(4, 40))
    assert torch.equal(found["topk_values"][0].isinf(), torch.arange(40) >= 37)
    assert found["topk_values"][3].isnan().all()
    assert (found["topk_ids"][3].sort().values == torch.arange(40)).all()


def test_rows_that_are_no_numbers() -> None:
    x, w = torch.randn(6, 16), torch.randn(50, 16)
    x[1], x[2] = torch.nan, torch.inf
    found = Stats(x, w, torch.randint(0, 50, (6,)), WANT, {}, 4).forward()
    for field in ("logprob", "entropy", "lse"):
        assert torch.equal(found[field].view(6).isnan(), torch.tensor([False, True, True, False, False, False]))
    assert (found["argmax"] < 50).all()


def test_classes_ruled_out_by_the_bias() -> None:
    x, w, b = torch.randn(20, 16), torch.randn(90, 16), torch.zeros(90)
    b[:70] = -torch.inf  # two tiles and a part have no class left
    y = torch.randint(70, 90, (20,))
    found = Stats(x, w, y, WANT, {"bias_V": b}, 8).forward()
    want = truth(x.double(), w[70:].double(), y - 70, None, {})
    for field in ("logprob", "entropy", "lse", "sum_sq_prob"):
        assert relative_error(found[field].view(20), want[field]) < NEAR
    assert torch.equal(found["argmax"], want["argmax"] + 70)


def test_no_tokens() -> None:
    x, w = torch.randn(0, 16), torch.randn(50, 16)
    stats = Stats(x, w, None, ("entropy",), {}, 1)
    assert stats.forward()["entropy"].shape == (0,)
    into = stats.backward({"entropy": torch.zeros(0)})
    assert into.weight_VD is not None
    assert (into.weight_VD == 0).all()
