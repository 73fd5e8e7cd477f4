"""What is linear_contrastive's own: one tensor on both sides, queries without positives, ids, memory, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import HeadOptions, linear_contrastive
from lowtide.errors import ArgumentTypeError, ArgumentValueError, LowtideError, TargetIndexError, UnsupportedError
from lowtide.measure.allocations import track_allocations
from promises import promise
from support import counted_flop, every_pair

D = 8


def sides(Q: int, K: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    queries, keys = (torch.randn(n, D, dtype=torch.float64).to(dtype).requires_grad_() for n in (Q, K))
    return queries, keys


@promise("ignored")
@every_pair(shape=[None, (0,), (0, 2), (4,), (4, 1), (4, 2)], symmetric=[False, True])
def test_no_query_that_has_a_positive(shape: tuple[int, ...] | None, symmetric: bool) -> None:
    """NaN, as the mean of no loss is in PyTorch, and gradients of 0."""
    y = None if shape is None else torch.full(shape, -1)
    queries, keys = sides(shape[0] if shape else 0, 5)
    loss = linear_contrastive(queries, keys, y, symmetric=symmetric)
    assert loss.isnan()
    assert not any(g.any() for g in torch.autograd.grad(loss, (queries, keys)))


@promise("ignored")
@pytest.mark.parametrize("P", [1, 3])
def test_a_query_without_positives_may_be_nan(P: int) -> None:
    (queries, keys), y = sides(9, 20), torch.randint(20, (9, P))
    y[3], mask = -1, torch.rand(9, 20) < 0.5
    want = linear_contrastive(queries, keys, y, mask=mask)
    grads = torch.autograd.grad(want, (queries, keys))
    with torch.no_grad():
        queries[3] = torch.nan
    got = linear_contrastive(queries, keys, y, mask=mask)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, (queries, keys)), grads)


@promise("memory")
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("case", [{}, {"mask": True}, {"P": 3}, {"P": 1, "mask": True, "symmetric": True}], ids=str)
def test_no_similarities_are_allocated(case: dict[str, Any]) -> None:
    """Nothing of a quarter of them in float32; with ids, a mask and both directions there is a copy of the mask."""
    N = 640
    queries, keys = (torch.randn(N, D, requires_grad=True) for _ in range(2))
    kwargs: dict[str, Any] = {"symmetric": case.get("symmetric", False)}
    kwargs |= {"mask": torch.rand(N, N) < 0.3} if "mask" in case else {}
    kwargs |= {"positives": torch.randint(N, (N, case["P"]))} if "P" in case else {}
    with track_allocations() as seen:
        linear_contrastive(queries, keys, **kwargs).backward()
    copied = N * N * ("mask" in case and "P" in case)
    assert 0 < seen.largest_bytes <= max(copied, N * N)
    assert seen.peak_bytes - copied < N * N * 4 / 2


@promise("host")
@pytest.mark.parametrize(
    ("case", "products"), [({}, 3), ({"mask": True}, 3), ({"P": 3}, 4), ({"symmetric": True}, 6), ({"P": 1}, 3)]
)
def test_products(case: dict[str, Any], products: int) -> None:
    """With one positive a query the gradients are computed with the loss, masked or not."""
    queries, keys = sides(21, 21, torch.float32)
    kwargs = {"mask": torch.rand(21, 21) < 0.5} if "mask" in case else {}
    kwargs |= {"positives": torch.randint(21, (21, case["P"]))} if "P" in case else {}
    symmetric = case.get("symmetric", False)
    run = lambda: linear_contrastive(queries, keys, symmetric=symmetric, **kwargs).backward()  # noqa: E731
    assert counted_flop(run) == [products * 2 * 21 * 21 * D]


@promise("dtypes")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16])
def test_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    (queries, keys), y = sides(4, 5), torch.tensor([3, 0, 4, 0])
    for ids in (y, y.view(4, 1), torch.stack((y, y.flip(0)), 1)):
        assert torch.equal(linear_contrastive(queries, keys, ids.to(dtype)), linear_contrastive(queries, keys, ids))


X = torch.randn(4, D)
BAD: list[tuple[dict[str, Any], type[LowtideError], str]] = [
    ({"queries": torch.randn(2, 3, D)}, ArgumentValueError, r"queries: expected shape \[Q, D\], got \[2, 3, 8\]"),
    ({"keys": torch.randn(D)}, ArgumentValueError, r"keys: expected shape \[K, D\], got \[8\]"),
    ({"keys": torch.randn(4, 7)}, ArgumentValueError, "queries: expected shape"),
    ({"keys": X.double()}, ArgumentTypeError, "keys: expected dtype torch.float32, as queries has"),
    ({"keys": "x"}, ArgumentTypeError, "keys: expected a torch.Tensor"),
    ({"keys": X[:0]}, ArgumentValueError, "keys: expected at least one"),
    ({"keys": X[:3]}, ArgumentValueError, "keys: expected at least 4, a key for each query, got 3"),
    ({"positives": torch.rand(4)}, ArgumentTypeError, "positives: expected ids of keys, an integer dtype"),
    ({"positives": torch.eye(4) > 0}, ArgumentTypeError, r"got torch.bool. Where .* pass \.nonzero\(\)"),
    ({"positives": torch.zeros(3).long()}, ArgumentValueError, r"positives: expected shape \[4\] or \[4, P\]"),
    ({"positives": torch.zeros(4, 0).long()}, ArgumentValueError, "with P above 0"),
    ({"positives": torch.tensor([0, 1, 4, 2])}, TargetIndexError, r"expected ids from 0 to 3.*got 4 at \[2\]"),
    ({"positives": torch.tensor([[0, 1], [2, -2], [2, 1], [3, 3]])}, TargetIndexError, r"got -2 at \[1, 1\]"),
    ({"mask": torch.zeros(4, 4)}, ArgumentTypeError, "mask: expected a bool tensor"),
    ({"mask": torch.zeros(4, 5) > 0}, ArgumentValueError, r"mask: expected shape \[4, 4\]"),
    ({"mask": torch.zeros(4, 4, device="meta") > 0}, ArgumentValueError, "mask: .* cpu, as queries is"),
    ({"keys": X.to("meta")}, ArgumentValueError, "keys: expected a tensor on cpu, as queries is, got meta"),
    ({"temperature": 0}, ArgumentValueError, "temperature: expected a finite number above 0"),
    ({"temperature": torch.ones(1)}, ArgumentValueError, "temperature: expected a number or a 0-d tensor"),
    ({"symmetric": 1}, ArgumentTypeError, "symmetric: expected True or False"),
    ({"group": "all"}, ArgumentValueError, "group: expected a process group"),
    ({"options": {}}, ArgumentTypeError, "options"),
    ({"mask": torch.zeros(4, 4) > 0, "options": HeadOptions(backend="exp")}, UnsupportedError,
     r"backend: expected 'auto', .*lacks others"),
    ({"positives": torch.zeros(4, 3).long(), "options": HeadOptions(gradient="forward")}, UnsupportedError,
     "gradient: expected 'auto' or 'recompute' with a value for each token"),
]  # fmt: skip


@promise("errors")
@pytest.mark.parametrize(("kwargs", "error", "match"), BAD, ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")
def test_errors(kwargs: dict[str, Any], error: type[LowtideError], match: str) -> None:
    with pytest.raises(error, match=match):
        linear_contrastive(**{"queries": X, "keys": X} | kwargs)
