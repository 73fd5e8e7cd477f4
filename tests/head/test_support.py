"""Log-probabilities over sets of classes: beside whole, masked logits in float64; what is read, and what refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from head.kernel_plans import use_kernels, use_set_kernels
from lowtide import HeadOptions, TokenStats, linear_logprobs, linear_token_stats
from lowtide.errors import LowtideError
from lowtide.head.nodes import Function
from lowtide.measure.allocations import track_allocations
from support import head, in_float64, mask_of_ids, relative_error, sets_oracle

WANT = ("logprob", "entropy", "lse", "argmax", "sum_sq_prob", "is_top1")
FORMS = ("padded", "shared")
N, D, V, K = 17, 24, 61, 9


def sets_of(form: str, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Return sets with repetitions, pads among the ids and an empty one, in one form; and bool [N, V]."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (N, K), generator=g)
    ids[:, 3] = ids[:, 0]
    ids[torch.rand(N, K, generator=g) < 0.3] = -1
    ids[4] = -1
    if form == "shared":
        ids = ids[:3].reshape(-1)
    mask = mask_of_ids(ids.expand(N, -1), V)
    return ids, mask


def targets(mask: Tensor, T: int | None, seed: int = 5) -> Tensor:
    """Return classes most of which are in the sets, some outside, some ignored."""
    g = torch.Generator().manual_seed(seed)
    weights = mask.double() + 0.02
    y = torch.multinomial(weights, T or 1, replacement=True, generator=g)
    y[torch.rand(y.shape, generator=g) < 0.2] = -100
    y[0] = mask[0].nonzero()[0, 0]
    return y if T else y[:, 0]


def total(stats: dict[str, Tensor], of: Iterable[str] = ("logprob", "entropy", "lse")) -> Tensor:
    """Return one number that is finite where a target is outside of its set, or a set is empty."""
    parts = []
    for i, name in enumerate(of):
        x = stats[name]
        weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64).to(x.dtype)
        parts.append((weights * x.masked_fill(x.detach() == -torch.inf, 0)).sum())
    return torch.stack(parts).sum()


def found(stats: TokenStats) -> dict[str, Tensor]:
    return {name: value for name, value in stats._asdict().items() if value is not None}


def check(form: str, T: int | None, dtype: torch.dtype, kwargs: dict[str, Any], bound: float) -> None:
    """Compare values and gradients with the oracle's."""
    x, w, b, _ = head(N, D, V, dtype=dtype)
    support, mask = sets_of(form)
    y = targets(mask, T)
    kwargs = {"linear_bias": b} | kwargs
    options = kwargs.pop("options", None)
    leaves = {"input": x, "linear_weight": w} | {k: v for k, v in kwargs.items() if isinstance(v, Tensor)}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    true = in_float64({"input": x, "linear_weight": w, **kwargs})
    want = sets_oracle(target=y, mask=mask, **true)
    got = found(linear_token_stats(x, w, y, want=WANT, support=support, options=options, **kwargs))
    assert set(got) == set(want)
    for name, value in want.items():
        finite = value != -torch.inf
        assert torch.equal(got[name] != -torch.inf, finite), name
        if value.is_floating_point():
            assert relative_error(got[name][finite], value[finite]) < bound, name
        elif name == "outside" or bound < 1e-4:
            assert torch.equal(got[name], value), name
    grads = torch.autograd.grad(total(got), list(leaves.values()))
    exact = torch.autograd.grad(total(want), [true[name] for name in leaves])
    for name, g, e in zip(leaves, grads, exact, strict=True):
        assert g.dtype == leaves[name].dtype
        assert relative_error(g, e) < 3 * bound, name


CASES: dict[str, dict[str, Any]] = {
    "plain": {"linear_bias": None},
    "bias": {},
    "softcap": {"softcap": 1.5},
    "scale": {"logit_scale": 0.7},
    "scale on the device": {"logit_scale": torch.tensor(0.7)},
    "all": {"softcap": 2.0, "logit_scale": torch.tensor(-1.3, dtype=torch.float64)},
    "chunks": {"options": HeadOptions(workspace_mib=1e-3)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("T", [None, 3])
def test_values_and_gradients(form: str, case: str, T: int | None) -> None:
    check(form, T, torch.float64, dict(CASES[case]), 1e-12)
    check(form, T, torch.float32, dict(CASES[case]), 2e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["all", "chunks"])
def test_low_precision(form: str, dtype: torch.dtype, case: str) -> None:
    check(form, 2, dtype, dict(CASES[case]), 2e-3 if dtype == torch.float16 else 1e-2)


@pytest.mark.parametrize("form", FORMS)
def test_a_trained_scale(form: str) -> None:
    scale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    check(form, 2, torch.float64, {"logit_scale": scale, "softcap": 3.0}, 1e-12)
    check(form, 2, torch.float64, {"logit_scale": scale, "linear_bias": None}, 1e-12)


@pytest.mark.parametrize("case", ["all", "chunks"])
def test_kernels(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, with tiles smaller than a row, a set and the pairs of a class."""
    used = use_set_kernels(monkeypatch)
    check("padded", 2, torch.float32, dict(CASES[case]), 2e-6)
    assert {"score", "input_grad", "weight_grad"} == set(used)


@pytest.mark.parametrize("form", FORMS)
def test_frozen_parts(form: str) -> None:
    x, w, b, _ = head(N, D, V)
    support, mask = sets_of(form)
    y = targets(mask, 2)
    names = {"input": x, "linear_weight": w, "linear_bias": b}
    full = total(found(linear_token_stats(x, w, y, linear_bias=b, want=WANT, support=support)))
    expected = dict(zip(names, torch.autograd.grad(full, [x, w, b]), strict=True))
    for trained in (["input"], ["linear_weight"], ["linear_bias"], ["input", "linear_bias"]):
        given = {name: t if name in trained else t.detach() for name, t in names.items()}
        value = total(found(linear_token_stats(target=y, want=WANT, support=support, **given)))
        for name, grad in zip(trained, torch.autograd.grad(value, [names[n] for n in trained]), strict=True):
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", [False, True])
def test_rows_outside_of_the_sets_are_not_read(form: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in all other rows of the weight and in their bias."""
    if kernels:
        use_set_kernels(monkeypatch)
    x, w, b, _ = head(N, D, V)
    support, mask = sets_of(form)
    y = targets(mask, 2)
    listed = mask.any(0)
    expected = total(found(linear_token_stats(x, w, y, linear_bias=b, want=WANT, support=support)))
    clean = torch.autograd.grad(expected, [x, w, b])
    with torch.no_grad():
        w[~listed], b[~listed] = torch.nan, torch.nan
    value = total(found(linear_token_stats(x, w, y, linear_bias=b, want=WANT, support=support)))
    assert torch.equal(value, expected)
    for got, want in zip(torch.autograd.grad(value, [x, w, b]), clean, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("more", [{}, {"logit_scale": 0.7}, {"softcap": 4.0}], ids=str)
def test_pads_of_one_set_where_they_stay(
    dtype: torch.dtype, kernels: bool, more: dict[str, Any], keep_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: whole tiles of pads, class 0, which stands in their place, and all other classes NaN."""
    keep_rows(True)
    if kernels and (dtype != torch.float32 or "softcap" in more):
        pytest.skip("the interpreter's products in bfloat16 are wrong; with a soft cap there are no kernels")
    used = use_kernels(monkeypatch) if kernels else []
    x, w, b, _ = head(N, D, V, dtype=dtype)
    ids = torch.cat((torch.full((100,), -1), torch.arange(20, 40), torch.arange(20, 40), torch.full((9,), -1)))
    mask = mask_of_ids(ids.expand(N, -1), V)
    y = targets(mask, 2)
    true = in_float64({"input": x, "linear_weight": w, "linear_bias": b})
    want = sets_oracle(target=y, mask=mask, **true, **more)
    exact = torch.autograd.grad(total(want), list(true.values()))
    with torch.no_grad():
        w[~mask[0]], b[~mask[0]] = torch.nan, torch.nan
    seen = []
    call = Function.__call__
    monkeypatch.setattr(Function, "__call__", lambda f, head, *a, **k: seen.append(head) or call(f, head, *a, **k))
    got = found(linear_token_stats(x, w, y, want=WANT, linear_bias=b, support=ids, **more))
    ruled_out = seen[0].bias_V == -torch.inf  # exactly: any other number is rounded, and measured from its rounding
    assert ruled_out.sum() == (0 if "softcap" in more else 129)
    assert seen[0].bias_V.dtype == torch.float32 or "softcap" in more
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for name in ("logprob", "entropy", "lse", "sum_sq_prob"):
        finite = want[name] != -torch.inf
        assert torch.equal(got[name] != -torch.inf, finite), name
        assert relative_error(got[name][finite], want[name][finite]) < bound, name
    for g, e in zip(torch.autograd.grad(total(got), [x, w, b]), exact, strict=True):
        assert relative_error(g, e) < 3 * bound
    assert set(used) == ({"exp"} if kernels else set())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", [False, True])
def test_ignored_tokens_contribute_nothing(form: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels:
        use_set_kernels(monkeypatch)
    x, w, b, _ = head(N, D, V)
    support, mask = sets_of(form)
    y = targets(mask, None)
    y[[2, 5, 11]] = -100
    with torch.no_grad():
        x[[2, 5, 11]] = torch.nan
    logprob = linear_logprobs(x, w, y, linear_bias=b, support=support)
    assert (logprob[y == -100] == 0).all()
    grads = torch.autograd.grad(total({"logprob": logprob}, ["logprob"]), [x, w, b])
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][y == -100] == 0).all()
    entropy = linear_token_stats(x, w, y, want=("entropy", "lse"), support=support)
    kept = torch.zeros(N)
    kept[[0, 8]] = 1
    value = (entropy.entropy.where(kept > 0, 0) + entropy.lse.where(kept > 0, 0)).sum()
    assert all(g.isfinite().all() for g in torch.autograd.grad(value, [x, w]))


def test_shapes() -> None:
    """Leading axes, none at all, one target beside several, sets of length 0 and tokens that are not there."""
    x, w, _, y = head((2, 3, 5), D, V)
    ids = torch.randint(0, V, (2, 3, 5, 4), dtype=torch.int32)
    stats = linear_token_stats(x, w, y, want=WANT, support=ids)
    assert {tuple(t.shape) for name, t in found(stats).items() if name != "outside"} == {(2, 3, 5)}
    assert stats.outside.shape == ()
    assert stats.outside.dtype == torch.int64
    assert linear_logprobs(x, w, ids.long(), support=ids).shape == (2, 3, 5, 4)
    flat = linear_logprobs(x.view(30, D), w, ids.view(30, 4).long(), support=ids.view(30, 4))
    assert torch.equal(flat.view(2, 3, 5, 4), linear_logprobs(x, w, ids.long(), support=ids))
    one = linear_logprobs(x[0, 0, 0], w, ids[0, 0, 0, 1].long(), support=ids[0, 0, 0])
    torch.testing.assert_close(one, linear_logprobs(x, w, ids.long(), support=ids)[0, 0, 0, 1])
    for empty in (ids[..., :0], ids.new_zeros(0)):
        stats = linear_token_stats(x, w, y, want=("logprob", "entropy", "lse", "argmax"), support=empty)
        assert (stats.lse == -torch.inf).all()
        assert (stats.logprob == -torch.inf).all()
        assert (stats.entropy == 0).all()
        assert (stats.argmax == -1).all()
        assert stats.outside == 30
        grads = torch.autograd.grad(stats.entropy.sum() + stats.lse.sum(), [x, w])
        assert all((g == 0).all() for g in grads)
    nobody = x[:0]
    for support in (ids[:0], ids[0, 0, 0]):
        value = linear_logprobs(nobody, w, y[:0], support=support)
        assert value.shape == (0, 3, 5)
        assert (torch.autograd.grad(value.sum(), w)[0] == 0).all()


@pytest.mark.parametrize("more", [{}, {"logit_scale": torch.tensor(0.7, requires_grad=True)}, {"softcap": 4.0}])
@pytest.mark.parametrize("want", [WANT, ("logprob", "lse")])
@pytest.mark.parametrize("ignored_tokens", ["auto", "compute"])
def test_one_empty_set(ignored_tokens: Any, want: tuple[str, ...], more: dict[str, Any]) -> None:
    """No token has a logit, and no gradient, whether tokens to which none flows back are dropped or computed."""
    x, w, b, y = head(N, D, V)
    options = HeadOptions(ignored_tokens=ignored_tokens)
    support = torch.full((5,), -1)
    stats = linear_token_stats(x, w, y, linear_bias=b, want=want, support=support, options=options, **more)
    assert stats.lse is not None
    assert stats.logprob is not None
    assert (stats.lse == -torch.inf).all()
    assert (stats.logprob == -torch.inf).all()
    assert stats.outside == N
    leaves = [x, w, b, *(t for t in more.values() if isinstance(t, Tensor))]
    grads = torch.autograd.grad(total(found(stats), ("logprob", "lse")) + stats.lse.exp().sum(), leaves)
    assert all((g == 0).all() for g in grads)


def test_without_targets_nothing_is_outside() -> None:
    x, w, _, _ = head(N, D, V)
    stats = linear_token_stats(x, w, want=("entropy",), support=sets_of("padded")[0])
    assert list(found(stats)) == ["entropy"]


def test_strides_of_the_weight_and_of_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _, _ = head((2, N), D, V)
    ids, mask = sets_of("padded")
    y, both = targets(mask, 2), torch.stack((ids, ids))
    expected = linear_logprobs(x, w, torch.stack((y, y)), support=both)
    y = torch.stack((y, y)).mT.contiguous().mT
    with_strides = x.detach().transpose(0, 1).contiguous().transpose(0, 1), w.detach().T.contiguous().T
    for kernels in (False, True):
        if kernels:
            use_set_kernels(monkeypatch)
        got = linear_logprobs(*with_strides, y, support=both.mT.contiguous().mT)
        torch.testing.assert_close(got, expected)


def test_a_sure_model_keeps_its_digits() -> None:
    """1 - p of 1e-8: a difference of probabilities would hold nothing of it."""
    x, w, _, _ = head(4, D, V)
    w = (w.detach() / w.detach().norm(dim=1, keepdim=True)).requires_grad_()
    x = (25 * w.detach()[:4]).requires_grad_()
    ids, y = torch.arange(V).expand(4, V), torch.arange(4)
    true = in_float64({"input": x, "linear_weight": w})
    want = sets_oracle(target=y, mask=torch.ones(4, V, dtype=torch.bool), **true)
    got = found(linear_token_stats(x, w, y, want=("logprob", "entropy"), support=ids))
    assert want["entropy"].max() < 1e-2
    for name in ("logprob", "entropy"):
        assert relative_error(got[name], want[name]) < 1e-4
        (g,), (e,) = (
            torch.autograd.grad(s[name].sum(), leaf, retain_graph=True) for s, leaf in ((got, x), (want, true["input"]))
        )
        assert relative_error(g, e) < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_autocast(form: str) -> None:
    x, w, b, _ = head(N, D, V)
    support, mask = sets_of(form)
    y = targets(mask, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprob = linear_logprobs(x, w, y, linear_bias=b, support=support)
    rounded = {"input": x.detach().bfloat16(), "linear_weight": w.detach().bfloat16(), "linear_bias": b.detach()}
    want = sets_oracle(target=y, mask=mask, **in_float64(rounded))["logprob"]
    finite = want != -torch.inf
    assert logprob.dtype == torch.float32
    assert relative_error(logprob[finite], want[finite]) < 5e-3
    grads = torch.autograd.grad(total({"logprob": logprob}, ["logprob"]), [x, w, b])
    assert {g.dtype for g in grads} == {torch.float32}


@pytest.mark.parametrize("form", FORMS)
def test_uses_of_autograd(form: str) -> None:
    """A second backward, checkpoints, no gradients, a second derivative."""
    x, w, b, _ = head(N, D, V)
    support, mask = sets_of(form)
    y = targets(mask, 2)

    def value() -> Tensor:
        return total(found(linear_token_stats(x, w, y, linear_bias=b, want=WANT, support=support)))

    kept = value()
    first = torch.autograd.grad(kept, [x, w, b], retain_graph=True)
    for again in (kept, checkpoint(value, use_reentrant=False)):
        assert all(torch.equal(*pair) for pair in zip(first, torch.autograd.grad(again, [x, w, b]), strict=True))
    with torch.no_grad():
        assert not value().requires_grad
    logprob = linear_logprobs(x, w, y.clamp(min=0), support=support)
    grads = torch.autograd.grad(logprob.masked_fill(logprob == -torch.inf, 0).sum(), [x], create_graph=True)
    with pytest.raises(LowtideError, match="not differentiated again"):
        grads[0].sum().backward()


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("form", FORMS)
def test_compiled(form: str) -> None:
    x, w, b, _ = head(N, D, V)
    support, mask = sets_of(form)
    y = targets(mask, 2)

    def values(x: Tensor, w: Tensor, b: Tensor, support: Any) -> TokenStats:
        return linear_token_stats(x, w, y, linear_bias=b, want=WANT, support=support)

    compiled = torch.compile(values, fullgraph=True, backend="aot_eager")
    got, want = (found(f(x, w, b, support)) for f in (compiled, values))
    torch.testing.assert_close(got, want)
    for g, e in zip(*(torch.autograd.grad(total(v), [x, w, b]) for v in (got, want)), strict=True):
        torch.testing.assert_close(g, e)


def test_no_memory_of_the_vocabulary() -> None:
    """Frozen, in 2 MiB beside a weight of 40; and the bound of the options."""
    x, w, _, _ = head(64, 512, 20000)
    ids = torch.randint(0, 20000, (64, 40))
    for mib in (2, 8):
        with track_allocations() as seen:
            linear_logprobs(x, w.detach(), ids, support=ids, options=HeadOptions(workspace_mib=mib)).sum().backward()
        saved_and_gradient = x.grad.nbytes + 64 * 40 * 30
        assert seen.peak_bytes - saved_and_gradient < mib * 2**20
        x.grad = None


def test_flop_count() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, w, _, _ = head(N, D, V)
    support, mask = sets_of("padded")
    with FlopCounterMode(display=False) as counter:
        linear_token_stats(x, w, targets(mask, None), want=("entropy",), support=support).entropy.sum().backward()
    assert counter.get_total_flops() == 4 * 2 * N * K * D


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"support": torch.full((N, 2), V)}, IndexError, "support: expected ids from 0 to 60"),
    ({"support": torch.full((N, 2), -2)}, IndexError, "support: expected ids"),
    ({"support": torch.tensor([1, V])}, IndexError, "support: expected ids"),
    ({"support": torch.zeros(N, 2)}, TypeError, "support: expected an integer dtype"),
    ({"support": torch.zeros(N, V, dtype=torch.bool)}, TypeError, "pass the ids where it is True"),
    ({"support": torch.zeros(N - 1, 2, dtype=torch.long)}, ValueError, "support: expected shape"),
    ({"support": torch.tensor(3)}, ValueError, "support: expected shape"),
    ({"support": [1, 2]}, TypeError, "support: expected a tensor of ids"),
    ({"support": (torch.zeros(N, 2).long(),)}, TypeError, "support: expected a tensor of ids"),
    ({"support": torch.zeros(N, 2, dtype=torch.long), "want": ("mean_logit",)}, ValueError, "want: expected"),
    ({"support": torch.zeros(N, 2, dtype=torch.long), "topk": 2}, ValueError, "want: expected"),
    ({"support": torch.zeros(N, 2).long(), "options": HeadOptions(backend="exp")}, RuntimeError, "backend: expected"),
    ({"support": torch.zeros(N, 2).long(), "options": HeadOptions(backend="row")}, RuntimeError, "backend: expected"),
    ({"support": torch.zeros(N, 2).long(), "options": HeadOptions(gradient="forward")}, RuntimeError, "gradient: "),
    ({"support": torch.zeros(N, 2).long(), "target": torch.full((N,), V)}, IndexError, "target: expected"),
    ({"support": torch.zeros(3).long(), "target": torch.full((N,), V)}, IndexError, "target: expected class indices"),
    ({"want": ("outside",)}, ValueError, "want: expected names"),
]


@pytest.mark.parametrize(("kwargs", "kind", "text"), ERRORS, ids=lambda value: "")
def test_errors(kwargs: dict[str, Any], kind: type[Exception], text: str) -> None:
    x, w, _, y = head(N, D, V)
    with pytest.raises(LowtideError, match=text) as error:
        linear_token_stats(x, w, **({"target": y} | kwargs))
    assert isinstance(error.value, kind)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", [False, True])
def test_elsewhere_a_wrong_id_makes_its_token_nan(
    form: str, kernels: bool, keep_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_rows(True)
    if kernels:
        use_set_kernels(monkeypatch)
    x, w, _, _ = head(N, D, V)
    support, mask = sets_of(form)
    y = targets(mask, None)
    y[3] = V + 5
    wrong = torch.ones(N, dtype=torch.bool) if form == "shared" else torch.zeros(N, dtype=torch.bool)
    wrong[0] = True
    support.view(-1)[0] = V
    capped = linear_token_stats(x, w, y, want=("lse",), support=support, softcap=4.0)
    stats = linear_token_stats(x, w, y, want=("logprob", "lse"), support=support)
    assert torch.equal(stats.lse.isnan(), wrong)
    assert torch.equal(capped.lse.isnan(), wrong)
    wrong[3] = True
    assert torch.equal(stats.logprob.isnan(), wrong & (y != -100))
    dx, _ = torch.autograd.grad(stats.logprob.masked_fill(stats.logprob == -torch.inf, 0).sum() + stats.lse[1], [x, w])
    assert dx[[0, 3]].isnan().all()
    assert dx[1].isfinite().all() or form == "shared"
