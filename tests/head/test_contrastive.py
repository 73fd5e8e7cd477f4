"""The contrastive loss: beside the naive formula's autograd in float64; its work and memory, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from head.kernel_plans import use_kernels
from head.test_flop_counter import counted
from lowtide import HeadOptions, linear_contrastive
from lowtide.errors import ArgumentTypeError, ArgumentValueError, LowtideError, TargetIndexError, UnsupportedError
from lowtide.measure.allocations import track_allocations
from support import assert_same_gradients, in_float64, pairs, relative_error

Q, D = 21, 8
CHOICES: dict[str, list[Any]] = {
    "K": [Q, 40, 1],
    "P": [None, 0, 1, 3],  # 0: ids [Q]
    "temperature": [1.0, 0.3, "tensor", "trained"],
    "mask": [None, "some", "all", "transposed"],
    "symmetric": [False, True],
    "workspace_mib": [None, 2e-3],
    "frozen": ["", "queries", "keys"],
}
EVERY = [c for c in pairs(CHOICES, seed=1) if not (c["P"] is None and c["K"] == 1)]


def naive(
    queries: Tensor, keys: Tensor, positives: Tensor | None = None, *, temperature: Any = 1.0,
    mask: Tensor | None = None, symmetric: bool = False,
) -> Tensor:  # fmt: skip
    """Return the loss from all similarities, and the times that each key is a query's positive."""
    y = torch.arange(len(queries), device=queries.device) if positives is None else positives
    times = F.one_hot(y.view(len(queries), -1) + 1, len(keys) + 1).sum(1)[:, 1:]
    z = (queries @ keys.T).to(torch.promote_types(queries.dtype, torch.float32)) / temperature
    masked = torch.zeros_like(times, dtype=torch.bool) if mask is None else mask & (times == 0)

    def one_way(z: Tensor, times: Tensor, masked: Tensor) -> Tensor:
        nll = z.masked_fill(masked, -torch.inf).logsumexp(1, keepdim=True) - z
        some = times.sum(1) > 0
        return ((nll * times).sum(1)[some] / times.sum(1)[some]).mean()

    loss = one_way(z, times, masked)
    return (loss + one_way(z.T, times.T, masked.T)) / 2 if symmetric else loss


def arguments(choice: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    K, P, mask = choice.get("K", Q), choice.get("P"), choice.get("mask")
    kwargs: dict[str, Any] = {
        name: torch.randn(size, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for name, size in (("queries", Q), ("keys", K))
    }
    if choice.get("frozen"):
        kwargs[choice["frozen"]] = kwargs[choice["frozen"]].detach()
    if P is not None:
        y = torch.randint(K, (Q, max(P, 1)), generator=g)
        y[torch.rand(y.shape, generator=g) < 0.3] = -1
        y[3], y[4:6] = -1, 0  # none at all; the same key for two queries, and twice for one where P is 3
        kwargs["positives"] = y[:, 0] if P == 0 else y
    if mask is not None:
        kwargs["mask"] = torch.rand(Q, K, generator=g) < (2 if mask == "all" else 0.6)
        if mask == "transposed":
            kwargs["mask"] = kwargs["mask"].T.contiguous().T
    scale, wide = choice.get("temperature", 1.0), torch.promote_types(dtype, torch.float32)
    kwargs["temperature"] = (
        torch.tensor(0.7, dtype=wide, requires_grad=scale == "trained") if isinstance(scale, str) else scale
    )
    options = HeadOptions(workspace_mib=choice.get("workspace_mib"))
    return kwargs | {"symmetric": choice.get("symmetric", False), "options": options}


def check(kwargs: dict[str, Any], bound: float) -> None:
    """Compare value and gradients with the naive formula's in float64."""
    true = in_float64(kwargs)
    got, want = linear_contrastive(**kwargs), naive(**true)
    assert got.dtype == (torch.float64 if kwargs["queries"].dtype == torch.float64 else torch.float32)
    assert abs(got.item() - want.item()) <= bound * max(1.0, abs(want.item()))
    leaves = [name for name, value in kwargs.items() if isinstance(value, Tensor) and value.requires_grad]
    grads = torch.autograd.grad(got * 3, [kwargs[name] for name in leaves])
    for name, g, e in zip(leaves, grads, torch.autograd.grad(want * 3, [true[name] for name in leaves]), strict=True):
        assert g.dtype == kwargs[name].dtype
        if e.norm() > 1e-9:
            assert relative_error(g, e) <= 3 * bound, name
        else:  # with one key, or all others masked, there is nothing to learn
            assert g.double().norm() <= bound, name


@pytest.mark.usefixtures("rows_of_no_use")
@pytest.mark.parametrize("choice", EVERY, ids=str)
def test_values_and_gradients(choice: dict[str, Any]) -> None:
    check(arguments(choice, torch.float64), 1e-12)
    check(arguments(choice, torch.float32, 1), 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [{}, {"P": 3}, {"mask": "some", "P": 0}, {"symmetric": True, "P": 3, "mask": "some"}])
def test_narrow_operands_err_no_more_than_the_naive_formula(dtype: torch.dtype, case: dict[str, Any]) -> None:
    """Of some thousands of numbers: the similarities of the naive formula are rounded, and these are not."""
    g = torch.Generator().manual_seed(0)
    kwargs = arguments(case | {"K": 40}, dtype)
    for name in ("queries", "keys"):
        x = torch.randn(len(kwargs[name]), 64, generator=g).mul(0.5)
        kwargs[name] = x.to(dtype).requires_grad_()
    true = in_float64(kwargs)
    plain = {name: value for name, value in kwargs.items() if name != "options"}
    leaves = ("queries", "keys")
    exact = torch.autograd.grad(naive(**true), [true[n] for n in leaves])
    ours = torch.autograd.grad(linear_contrastive(**kwargs), [kwargs[n] for n in leaves])
    theirs = torch.autograd.grad(naive(**plain), [kwargs[n] for n in leaves])
    for a, b, e in zip(ours, theirs, exact, strict=True):
        assert relative_error(a, e) <= 1.3 * relative_error(b, e) + torch.finfo(dtype).eps / 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run by Triton's interpreter")
@pytest.mark.parametrize("case", [{}, {"K": 40, "P": 0}, {"P": 3, "K": 40}, {"P": 0, "symmetric": True}], ids=str)
@pytest.mark.parametrize("mask", [None, "some", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels(case: dict[str, Any], mask: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    used = use_kernels(monkeypatch)
    check(arguments(case | {"mask": mask, "temperature": "trained"}, dtype), 3e-6 if dtype == torch.float32 else 1e-2)
    of_loss = case.get("P") != 3
    if mask and of_loss:
        assert set(used) == {"row"}
    elif of_loss:
        assert set(used) == {"exp" if dtype == torch.float32 else "row"}


def test_a_sure_query_keeps_its_digits() -> None:
    """Losses of about 1e-7, where a sum over all probabilities holds 1e-7 of rounding."""
    keys = F.normalize(torch.randn(Q, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    for mask in (None, torch.rand(Q, Q) < 0.5):
        kwargs: dict[str, Any] = {"queries": keys.clone().requires_grad_(), "keys": keys.clone().requires_grad_()}
        kwargs |= {"temperature": 0.04, "mask": mask, "symmetric": True}
        true = in_float64(kwargs)
        got, want = linear_contrastive(**kwargs), naive(**true)
        assert want < 1e-5
        assert relative_error(got, want) < 1e-4
        assert_same_gradients(got, want, (kwargs["queries"], kwargs["keys"]), (true["queries"], true["keys"]), 1e-4)


def test_each_side_alone_and_neither() -> None:
    kwargs = arguments({"symmetric": True, "mask": "some"}, torch.float64)
    for name in ("queries", "keys"):
        check(kwargs | {name: kwargs[name].detach()}, 1e-12)
    neither = kwargs | {name: kwargs[name].detach() for name in ("queries", "keys")}
    assert not linear_contrastive(**neither).requires_grad
    with torch.no_grad():
        assert not linear_contrastive(**kwargs).requires_grad
    torch.testing.assert_close(linear_contrastive(**neither), linear_contrastive(**kwargs))


@pytest.mark.parametrize("symmetric", [False, True])
def test_one_tensor_as_queries_and_keys(symmetric: bool) -> None:
    """SimCLR: each of 2n views is a query, its positive the other view, and itself is masked."""
    views = torch.randn(2 * 6, D, dtype=torch.float64, requires_grad=True)
    other, itself = (torch.arange(12) + 6) % 12, torch.eye(12, dtype=torch.bool)
    kwargs: dict[str, Any] = {"temperature": 0.5, "mask": itself, "symmetric": symmetric}
    got, want = (f(views, views, other, **kwargs) for f in (linear_contrastive, naive))
    torch.testing.assert_close(got, want)
    assert_same_gradients(got, want, [views], bound=1e-12)


@pytest.mark.parametrize("shape", [None, (0,), (0, 1), (0, 2), (4,), (4, 1), (4, 2)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_no_query_that_has_a_positive(shape: tuple[int, ...] | None, symmetric: bool) -> None:
    """NaN, as the mean of no loss is in PyTorch, and gradients of 0."""
    y = None if shape is None else torch.full(shape, -1)
    queries, keys = torch.randn(shape[0] if shape else 0, D, requires_grad=True), torch.randn(5, D, requires_grad=True)
    loss = linear_contrastive(queries, keys, y, symmetric=symmetric)
    assert loss.isnan()
    for grad in torch.autograd.grad(loss, (queries, keys)):
        assert not grad.any()


def test_a_query_without_positives_may_be_nan() -> None:
    kwargs = arguments({"P": 3, "symmetric": True, "mask": "some"}, torch.float64)
    want = linear_contrastive(**kwargs | {"symmetric": False})
    with torch.no_grad():
        kwargs["queries"][3] = torch.nan
    got = linear_contrastive(**kwargs | {"symmetric": False})
    torch.testing.assert_close(got, want)
    assert torch.stack(
        [g.isfinite().all() for g in torch.autograd.grad(got, (kwargs["queries"], kwargs["keys"]))]
    ).all()


def test_masked_keys_get_no_gradient() -> None:
    kwargs = arguments({"K": 40, "P": 3}, torch.float64)
    mask = torch.zeros(Q, 40, dtype=torch.bool)
    mask[:, 30:] = True
    kwargs["positives"] %= 30
    (grad,) = torch.autograd.grad(linear_contrastive(**kwargs, mask=mask), kwargs["keys"])
    assert not grad[30:].any()
    assert grad[:30].any()


def test_strides_of_any_kind() -> None:
    queries, keys = torch.randn(D, 2 * Q).T[::2], torch.randn(Q, 2 * D)[:, ::2]
    y = torch.randint(Q, (3, Q)).T
    expected = linear_contrastive(queries.contiguous(), keys.contiguous(), y.contiguous().int(), symmetric=True)
    torch.testing.assert_close(linear_contrastive(queries, keys, y, symmetric=True), expected)


def test_under_autocast_operands_are_rounded_and_gradients_are_not() -> None:
    kwargs = arguments({"P": 0, "symmetric": True, "mask": "some", "temperature": "trained"}, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        check_near = linear_contrastive(**kwargs)
    rounded = kwargs | {n: kwargs[n].detach().bfloat16().double().requires_grad_() for n in ("queries", "keys")}
    true = in_float64(rounded)
    want = naive(**true)
    assert abs(check_near.item() - want.item()) < 1e-5
    leaves = ("queries", "keys", "temperature")
    grads = torch.autograd.grad(check_near, [kwargs[n] for n in leaves])
    for name, g, e in zip(leaves, grads, torch.autograd.grad(want, [true[n] for n in leaves]), strict=True):
        assert g.dtype == torch.float32
        assert relative_error(g, e) < 1e-2, name


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("case", [{}, {"mask": "some"}, {"P": 3}, {"P": 0, "mask": "some", "symmetric": True}], ids=str)
def test_no_similarities_are_allocated(case: dict[str, Any]) -> None:
    """Nothing of a quarter of them in float32; with ids, a mask and both directions there is a copy of the mask."""
    N = 640
    queries, keys = (torch.randn(N, D, requires_grad=True) for _ in range(2))
    kwargs: dict[str, Any] = {"symmetric": case.get("symmetric", False)}
    if "mask" in case:
        kwargs["mask"] = torch.rand(N, N) < 0.3
    if "P" in case:
        kwargs["positives"] = torch.randint(N, (N, max(1, case["P"])))
    with track_allocations() as seen:
        linear_contrastive(queries, keys, **kwargs).backward()
    copied = N * N * ("mask" in case and "P" in case)
    assert 0 < seen.largest_bytes <= max(copied, N * N)
    assert seen.peak_bytes - copied < N * N * 4 / 2
    with track_allocations() as seen:
        naive(queries, keys, **kwargs).backward()
    assert seen.largest_bytes >= N * N * 4


@pytest.mark.parametrize(
    ("case", "products"), [({}, 3), ({"mask": "some"}, 3), ({"P": 3}, 4), ({"symmetric": True}, 6), ({"P": 1}, 3)]
)
def test_products(case: dict[str, Any], products: int) -> None:
    """With one positive a query the gradients are computed with the loss, masked or not."""
    kwargs = arguments(case, torch.float32)
    assert counted(lambda: linear_contrastive(**kwargs).backward()) == products * 2 * Q * Q * D


def test_options_are_heeded() -> None:
    kwargs = arguments({"mask": "some"}, torch.float32)
    for options in (HeadOptions(gradient="recompute"), HeadOptions(backend="torch"), HeadOptions(gradient="forward")):
        check(kwargs | {"options": options}, 2e-6)
    with pytest.raises(UnsupportedError, match=r"backend: expected 'auto', .*lacks others"):
        linear_contrastive(**kwargs | {"options": HeadOptions(backend="exp")})
    several = arguments({"P": 3}, torch.float32) | {"options": HeadOptions(gradient="forward")}
    with pytest.raises(UnsupportedError, match="gradient: expected 'auto' or 'recompute' with several positives"):
        linear_contrastive(**several)


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("case", [{}, {"symmetric": True}, {"P": 3, "symmetric": True, "mask": "some"}], ids=str)
def test_one_graph_for_any_sizes_and_temperature(case: dict[str, Any]) -> None:
    torch._dynamo.utils.counters.clear()
    step = lambda q, k, **more: linear_contrastive(q * 2, k, **more) * 2  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for K, temperature in ((40, 0.5), (50, 0.4)):
        kwargs = arguments(case | {"K": K, "temperature": temperature}, torch.float32)
        leaves = kwargs["queries"], kwargs["keys"]
        given = {name: value for name, value in kwargs.items() if name not in ("queries", "keys")}
        got, want = (f(*leaves, **given) for f in (compiled, step))
        torch.testing.assert_close(got, want)
        assert_same_gradients(got, want, leaves, bound=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
def test_a_trained_temperature_in_one_graph() -> None:
    kwargs = arguments({"temperature": "trained", "P": 0}, torch.float32)
    leaves = [kwargs[name] for name in ("queries", "keys", "temperature")]
    step = lambda q, k, t: linear_contrastive(q, k, kwargs["positives"], temperature=t * 2)  # noqa: E731
    got, want = (f(*leaves) for f in (torch.compile(step, fullgraph=True, backend="aot_eager"), step))
    assert_same_gradients(got, want, leaves, bound=1e-6)


def test_second_derivatives_are_refused() -> None:
    for case in ({}, {"P": 3}):
        kwargs = arguments(case | {"temperature": "trained"}, torch.float64)
        (grad,) = torch.autograd.grad(linear_contrastive(**kwargs), kwargs["queries"], create_graph=True)
        with pytest.raises(UnsupportedError, match="second derivative"):
            grad.sum().backward()
    with pytest.raises(UnsupportedError, match=r"queries @ keys\.T / temperature"):
        torch.func.grad(linear_contrastive)(kwargs["queries"], kwargs["keys"])


def test_wrong_ids_are_an_error_on_the_cpu_and_nan_elsewhere(keep_rows: Callable[[bool], None]) -> None:
    queries, keys = torch.randn(4, D, requires_grad=True), torch.randn(5, D, requires_grad=True)
    ids = [torch.tensor([0, 1, 5, 2]), torch.tensor([[0, 1], [1, -1], [2, -2], [3, 3]])]
    for y, where in zip(ids, (r"5 at \[2\]", r"-2 at \[2, 1\]"), strict=True):
        with pytest.raises(TargetIndexError, match=rf"positives: expected ids from 0 to 4.*got {where}"):
            linear_contrastive(queries, keys, y)
    keep_rows(True)
    for y, symmetric in itertools.product(ids, (False, True)):
        for mask in (None, torch.rand(4, 5) < 0.5):
            assert linear_contrastive(queries, keys, y, symmetric=symmetric, mask=mask).isnan()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16])
def test_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    queries, keys = torch.randn(4, D), torch.randn(5, D)
    y = torch.tensor([3, 0, 4, 0])
    for ids in (y, y.view(4, 1), torch.stack((y, y.flip(0)), 1)):
        assert torch.equal(linear_contrastive(queries, keys, ids.to(dtype)), linear_contrastive(queries, keys, ids))


X = torch.randn(4, D)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"queries": torch.randn(2, 3, D)}, ArgumentValueError, r"queries: expected shape \[Q, D\], got \[2, 3, 8\]"),
        ({"keys": torch.randn(D)}, ArgumentValueError, r"keys: expected shape \[K, D\], got \[8\]"),
        ({"keys": torch.randn(4, 7)}, ArgumentValueError, "queries: expected shape"),
        ({"keys": X.double()}, ArgumentTypeError, "keys: expected dtype torch.float32, as queries has"),
        ({"keys": X.long()}, ArgumentTypeError, "keys: expected a floating-point dtype"),
        ({"keys": "x"}, ArgumentTypeError, "keys: expected a torch.Tensor"),
        ({"keys": X[:0]}, ArgumentValueError, "keys: expected at least one"),
        ({"keys": X[:3]}, ArgumentValueError, "keys: expected at least 4, a key for each query, got 3"),
        ({"positives": torch.rand(4)}, ArgumentTypeError, "positives: expected ids of keys, an integer dtype"),
        ({"positives": torch.eye(4) > 0}, ArgumentTypeError, r"got torch.bool. Where .* pass \.nonzero\(\)"),
        ({"positives": torch.zeros(3).long()}, ArgumentValueError, r"positives: expected shape \[4\] or \[4, P\]"),
        ({"positives": torch.zeros(4, 0).long()}, ArgumentValueError, "with P above 0"),
        ({"positives": [0, 1, 2, 3]}, ArgumentTypeError, "positives: expected a torch.Tensor"),
        ({"mask": torch.zeros(4, 4)}, ArgumentTypeError, "mask: expected a bool tensor"),
        ({"mask": torch.zeros(4, 5) > 0}, ArgumentValueError, r"mask: expected shape \[4, 4\]"),
        ({"mask": torch.zeros(4, 4, device="meta") > 0}, ArgumentValueError, "mask: .* cpu, as queries is"),
        ({"positives": torch.zeros(4, device="meta").long()}, ArgumentValueError, "positives: .* cpu, as queries is"),
        ({"keys": X.to("meta")}, ArgumentValueError, "keys: expected a tensor on cpu, as queries is, got meta"),
        ({"temperature": 0}, ArgumentValueError, "temperature: expected a finite number above 0"),
        ({"temperature": -0.1}, ArgumentValueError, "temperature: expected a finite number above 0"),
        ({"temperature": torch.ones(1)}, ArgumentValueError, "temperature: expected a number or a 0-d tensor"),
        ({"temperature": "1"}, ArgumentTypeError, "temperature: expected a number"),
        ({"symmetric": 1}, ArgumentTypeError, "symmetric: expected True or False"),
        ({"group": "all"}, ArgumentValueError, "group: expected a process group"),
        ({"options": {}}, ArgumentTypeError, "options"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(kwargs: dict[str, Any], error: type[LowtideError], match: str) -> None:
    with pytest.raises(error, match=match):
        linear_contrastive(**{"queries": X, "keys": X} | kwargs)
